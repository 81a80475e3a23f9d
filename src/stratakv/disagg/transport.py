"""What moves pages between engines must do, and the records that cross its boundary.

Owns the protocol. Both sides' memory is named when a transport is made, and stays where it is. Only
writes exist: who has the bytes sends them. Nothing here can be called off
(docs/adr, on transports): a write ends when it is done or when its peer's link is gone.
Must not know pages, groups or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NewType, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

PeerId = NewType("PeerId", str)
"""The caller's name for another side. A restarted peer is another one, or the same name once the
``Disconnected`` of the old one was polled."""
TransferId = NewType("TransferId", int)
"""One posted batch; counts up per transport."""

Memory: TypeAlias = npt.NDArray[np.uint8]
"""One registered region: contiguous bytes [n], kept alive by the transport. Any other memory that
the CPU can address becomes one by ``numpy.frombuffer`` or ``ndarray.view``."""
Indices: TypeAlias = npt.NDArray[np.int64]

NOTIFICATION_BYTES: Final = 32 << 10
"""The longest notification that every transport carries."""


@dataclass(frozen=True, slots=True, eq=False)
class Writes:
    """``sizes[i]`` bytes from ``offsets[i]`` of region ``regions[i]`` here to ``peer_offsets[i]``
    of the peer's region ``peer_regions[i]``; int64 [n] each, in bytes. ``n`` may be 0. Ranges at
    the peer must not overlap: they land in any order."""

    regions: Indices
    offsets: Indices
    peer_regions: Indices
    peer_offsets: Indices
    sizes: Indices


@dataclass(frozen=True, slots=True)
class Done:
    """Every byte is at the peer, and its notification is on the way. The ranges here are the
    caller's again."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Failed:
    """Which bytes have arrived nobody knows. The ranges here are the caller's again; those at the
    peer are when the peer reports it."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class Notified:
    """The peer's writes that this notification was posted with, and all before them, are here."""

    peer: PeerId
    notification: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """The peer has ended, does not answer, or has disconnected. Its link is being torn down, as
    after ``disconnect``."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The fence: whoever was behind this name writes nothing here any more, and nothing is read
    here for it. Its last event."""

    peer: PeerId


Event: TypeAlias = Done | Failed | Notified | Lost | Disconnected


class Transport(Protocol):
    """``TransportError`` where the environment fails at once; an event where it fails later. Calls
    from several threads are fine; ``post`` and ``poll`` return at once, whatever the peer does."""

    def describe(self, peer: PeerId) -> bytes:
        """What ``peer`` must know of this side to reach it, made for this peer alone: it travels in
        the handshake. From now on the peer may write here, until its ``Disconnected``."""
        ...

    def connect(self, peer: PeerId, description: bytes) -> None:
        """Reach a ``peer`` by what it has described for us. TransportError where it has another
        transport or version, with both values; nothing is different then."""
        ...

    def post(self, peer: PeerId, writes: Writes, notification: bytes | None = None) -> TransferId:
        """Begin to write, once the peer has connected too. What is posted to one peer is written in
        order, and ``notification`` (at most ``NOTIFICATION_BYTES``) reaches it after these bytes.
        Ends with ``Done`` or ``Failed``, once. The peer was connected and its ``Disconnected`` not
        yet polled; every range lies within our regions. TransportError where one does not lie
        within the peer's, who has named it: nothing is written then."""
        ...

    def poll(self) -> Sequence[Event]:
        """What has happened since the last call, in order for each peer."""
        ...

    def disconnect(self, peer: PeerId) -> None:
        """Begin to end a peer's link: what is posted and not done fails, and ``Disconnected`` says
        when the fence holds. A peer that is gone, or going, is left alone."""
        ...

    def close(self) -> None:
        """Disconnect all and wait for the fences, after which the memory is the caller's; their
        events are dropped. TransportError where a peer may still write: the transport keeps the
        memory alive for as long as that lasts. Twice is once."""
        ...

"""The blocking half of a transport: one peer's link over somebody else's library.

Owns the protocol that ``links`` runs on a thread. Must not have threads, queues or clocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.disagg.transport import Memory

Addresses: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """``sizes[i]`` bytes from address ``sources[i]`` of this process to ``targets[i]`` of the
    peer's; uint64 [n] each."""

    sources: Addresses
    targets: Addresses
    sizes: Addresses


class Wire(Protocol):
    """TransportError from any of them but ``sever``: the link is of no use any more. One thread at
    a time."""

    def describe(self) -> bytes:
        """What the other end's ``connect`` needs."""
        ...

    def connect(self, description: bytes) -> None: ...

    def write(self, ranges: Ranges, message: bytes | None, given_up: Event) -> None:
        """Return when every byte is at the peer, and a ``message`` on its way behind them: it comes
        after all that was written. ``ranges`` is not empty. TransportError soon after ``given_up``
        is set, however little the peer answers; what is under way then stays so until ``sever``."""
        ...

    def notify(self, message: bytes) -> None:
        """Send a message alone, which arrives after all that was written."""
        ...

    def notifications(self) -> Sequence[bytes]:
        """Messages of the connected peer since the last call."""
        ...

    def sever(self) -> bool:
        """Let go of everything, whatever state it is in. Whether the peer can write here no more;
        where it can, the question is asked again."""
        ...


OpenWire: TypeAlias = Callable[[Sequence[Memory]], Wire]
"""A wire of its own for one peer, over these regions."""

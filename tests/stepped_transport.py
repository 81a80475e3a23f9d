"""A transport between two ends of one process that has no threads: bytes move while the side that
writes them polls, a post at a time. A test of one seed is the same one again.

Owns the copies, and looks at each: whoever is written to has poison there, or somebody else's page
is overwritten; and whoever is read has not changed it since it was posted.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from stratakv.core.errors import TransportError
from stratakv.disagg.transport import (
    Disconnected,
    Done,
    Event,
    Failed,
    Lost,
    Memory,
    Notified,
    PeerId,
    TransferId,
    Writes,
)


@dataclass(slots=True, eq=False)
class _End:
    """One end of a link. ``given_up``: this side has ended it, or noticed that the other one has;
    its fence holds when it is not ``open``."""

    memories: Sequence[Memory]
    peer: "_End | None" = None
    given_up: str = ""
    open: bool = True
    posts: deque[tuple[TransferId, Writes, bytes | None]] = field(default_factory=deque)
    inbox: deque[bytes] = field(default_factory=deque)


class SteppedTransport:
    """``ends``: those of all transports that shall reach each other. At a poll at most ``most``
    posts of each peer are carried out."""

    def __init__(
        self, memories: Sequence[Memory], ends: list[_End], random: Random, most: int = 2
    ) -> None:
        self._memories, self._all, self._random, self._most = memories, ends, random, most
        self._ends: dict[PeerId, _End] = {}
        self._transfers = 0
        self.bytes_written = 0

    def describe(self, peer: PeerId) -> bytes:
        self._ends[peer] = end = _End(self._memories)
        self._all.append(end)
        return str(len(self._all) - 1).encode()

    def connect(self, peer: PeerId, description: bytes) -> None:
        other = self._all[int(description)]
        if not other.open:
            raise TransportError("it has ended")
        self._ends[peer].peer = other

    def post(self, peer: PeerId, writes: Writes, notification: bytes | None = None) -> TransferId:
        self._transfers += 1
        self._ends[peer].posts.append((TransferId(self._transfers), writes, notification))
        return TransferId(self._transfers)

    def poll(self) -> Sequence[Event]:
        found: list[Event] = []
        for peer, end in list(self._ends.items()):
            found += self._step(peer, end)
        return found

    def disconnect(self, peer: PeerId) -> None:
        end = self._ends.get(peer)
        if end is not None and not end.given_up:
            end.given_up = "the peer was disconnected"

    def close(self) -> None:
        for end in self._ends.values():
            end.open = False
        self._ends.clear()

    def _step(self, peer: PeerId, end: _End) -> list[Event]:
        found: list[Event] = []
        met = end.peer is not None and end.peer.peer is end
        for _ in range(self._random.randint(0, self._most)):
            if end.given_up or not met or not end.posts or not end.peer.open:
                break
            transfer, writes, notification = end.posts.popleft()
            self._copy(writes, end.peer.memories)
            if notification is not None:
                end.peer.inbox.append(notification)
            found.append(Done(transfer))
        found += [Notified(peer, end.inbox.popleft()) for _ in range(len(end.inbox))]
        if end.peer is not None and not end.peer.open and not end.given_up:
            end.given_up = "it has disconnected"
            found.append(Lost(peer, end.given_up))
        elif end.given_up and self._random.random() < 0.1:  # a fence takes its time
            end.open = False
            found += [Failed(transfer, end.given_up) for transfer, *_ in end.posts]
            found.append(Disconnected(peer))
            del self._ends[peer]
        return found

    def _copy(self, writes: Writes, targets: Sequence[Memory]) -> None:
        columns = (writes.regions, writes.offsets, writes.peer_regions, writes.peer_offsets)
        for region, offset, there, at, size in zip(*columns, writes.sizes, strict=True):
            target = targets[there][at : at + size]
            assert np.isnan(target.view(np.float32)).all(), "somebody's page is overwritten"
            target[:] = self._memories[region][offset : offset + size]
            self.bytes_written += int(size)


class Watched:
    """Any transport, of whose posts no byte may change until they have ended."""

    def __init__(self, transport, memories: Sequence[Memory]) -> None:
        self._transport, self._memories = transport, memories
        self._posted: dict[TransferId, tuple[Writes, bytes]] = {}
        self.describe, self.connect = transport.describe, transport.connect
        self.disconnect, self.close = transport.disconnect, transport.close

    def post(self, peer: PeerId, writes: Writes, notification: bytes | None = None) -> TransferId:
        transfer = self._transport.post(peer, writes, notification)
        if len(writes.sizes):
            self._posted[transfer] = writes, self._bytes(writes)
        return transfer

    def poll(self) -> Sequence[Event]:
        found = self._transport.poll()
        for event in found:
            if isinstance(event, Done | Failed) and event.transfer in self._posted:
                writes, before = self._posted.pop(event.transfer)
                assert self._bytes(writes) == before, "a page changed while it was read"
        return found

    @property
    def reading(self) -> bool:
        """Whether pages here may be read."""
        return bool(self._posted)

    def _bytes(self, writes: Writes) -> bytes:
        columns = (writes.regions, writes.offsets, writes.sizes)
        return b"".join(
            self._memories[region][offset : offset + size].tobytes()
            for region, offset, size in zip(*columns, strict=True)
        )

"""A transport between engines of one process, without a thread: bytes move when somebody polls, as
a schedule says.

Owns the schedule and every write in flight. A link that is torn down goes on writing until its
fence, as real ones do. Keeps the promises of ``disagg.transport`` and passes its suite;
deterministic for a ``Random`` and a sequence of calls.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from threading import RLock
from typing import Final, TypeAlias

from stratakv.core.errors import TransportError
from stratakv.disagg.description import Description, decode
from stratakv.disagg.ranges import Regions, located
from stratakv.disagg.transport import (
    NOTIFICATION_BYTES,
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

NAME: Final = "simulated"
BeforeWrite: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPace:
    """``moves``: how likely the oldest post of a link goes on at a look, and ``ranges``: by at most
    so many of its ranges, in any order. ``delivers``: how likely a peer's next event is given out
    at a poll. ``fence_looks``: the most looks for which a link that is torn down still writes."""

    moves: float = 0.7
    ranges: int = 4
    delivers: float = 0.7
    fence_looks: int = 6


@dataclass(slots=True, eq=False)
class _Post:
    """``left``: source, target and bytes of what is still to be written."""

    transfer: TransferId
    left: list[tuple[int, int, int]]
    notification: bytes | None


@dataclass(slots=True, eq=False)
class _End:
    """One side of a link. ``keeps``: the memory that the other one may write to. ``other``: once
    either has connected; ``regions``: of the other, once this one has. ``cut_in``: looks until the
    link is dead, None where it is not torn down; ``asked``: by this side; ``reported``: this side
    knows that its peer is lost."""

    peer: PeerId
    keeps: Sequence[Memory]
    other: "_End | None" = None
    regions: Regions | None = None
    posts: deque[_Post] = field(default_factory=deque[_Post])
    events: deque[Event] = field(default_factory=deque[Event])
    cut_in: int | None = None
    asked: bool = False
    reported: bool = False
    dead: bool = False

    @property
    def writes(self) -> bool:
        """Whether its bytes can go anywhere."""
        other = self.other
        return bool(self.posts and self.regions and other is not None and other.regions)

    def report_loss(self, reason: str) -> None:
        if not (self.asked or self.reported or self.dead):
            self.reported = True
            self.events.append(Lost(self.peer, reason))

    def die(self, reason: str) -> None:
        """Nothing is written or read any more."""
        if self.dead:
            return
        self.events.extend(Failed(post.transfer, reason) for post in self.posts)
        self.posts.clear()
        self.report_loss(reason)
        self.events.append(Disconnected(self.peer))
        self.dead = True


def _nothing(target: int, size: int) -> None:
    pass


class SimNetwork:
    """``before_write``: called with the address and the bytes of each range before it is written.
    ``late``: ranges that were written after their link was torn down."""

    def __init__(
        self, random: Random, pace: NetworkPace, before_write: BeforeWrite = _nothing
    ) -> None:
        self.random, self.pace = random, pace
        self._before_write = before_write
        self.lock = RLock()
        self.late = 0
        self._ends: dict[int, _End] = {}
        self._numbers = count()

    def open(self, memories: Sequence[Memory]) -> "SimTransport":
        return SimTransport(self, memories)

    def add(self, end: _End) -> int:
        number = next(self._numbers)
        self._ends[number] = end
        return number

    def end(self, number: bytes) -> _End:
        found = self._ends.get(int(number))
        if found is None or found.dead:
            raise TransportError("it has ended")
        return found

    def begin_cut(self, end: _End, reason: str) -> None:
        """Tear a link down. The other side may learn of it before it is dead, or then."""
        if end.cut_in is None:
            end.cut_in = self.random.randint(0, self.pace.fence_looks)
            if end.other is not None and self.random.random() < 0.5:
                end.other.report_loss(reason)

    def cut(self, end: _End, reason: str) -> None:
        """Now."""
        end.die(reason)
        if end.other is not None:
            end.other.die(reason)

    def stir(self) -> None:
        """A look: whatever is under way may go on."""
        for end in self._ends.values():
            if end.writes and self.random.random() < self.pace.moves:
                self._move(end)
        for end in self._ends.values():
            if end.cut_in is not None and not end.dead:
                end.cut_in -= 1
                if end.cut_in < 0:
                    self.cut(end, "the link has ended")

    def forget(self, end: _End) -> None:
        self._ends = {number: each for number, each in self._ends.items() if each is not end}

    def _move(self, end: _End) -> None:
        post, other = end.posts[0], end.other
        assert other is not None, "it writes to nobody"
        for _ in range(self.random.randint(1, self.pace.ranges)):
            if not post.left:
                break
            at = self.random.randrange(len(post.left))
            post.left[at], post.left[-1] = post.left[-1], post.left[at]
            source, target, size = post.left.pop()
            self._before_write(target, size)
            ctypes.memmove(target, source, size)
            self.late += end.cut_in is not None or other.cut_in is not None
        if not post.left:
            end.posts.popleft()
            end.events.append(Done(post.transfer))
            if post.notification is not None:
                other.events.append(Notified(other.peer, post.notification))


class SimTransport:
    """A ``Transport`` to others of its network."""

    def __init__(self, network: SimNetwork, memories: Sequence[Memory]) -> None:
        self._network = network
        self._memories = tuple(memories)
        self._regions = Regions.of([(each.ctypes.data, each.nbytes) for each in memories])
        self._ends: dict[PeerId, _End] = {}
        self._transfers = count()

    def describe(self, peer: PeerId) -> bytes:
        assert peer not in self._ends, f"{peer} is described already"
        end = self._ends[peer] = _End(peer, self._memories)
        number = self._network.add(end)
        return Description(NAME, self._regions, str(number).encode()).encode()

    def connect(self, peer: PeerId, description: bytes) -> None:
        found = decode(description, NAME)
        end, other = self._ends[peer], self._network.end(found.wire)
        assert end.regions is None, f"{peer} is connected already"
        end.regions, end.other, other.other = found.regions, other, end

    def post(self, peer: PeerId, writes: Writes, notification: bytes | None = None) -> TransferId:
        size = len(notification or b"")
        assert size <= NOTIFICATION_BYTES, f"a notification of {size} bytes"
        with self._network.lock:
            end = self._ends[peer]
            assert end.regions is not None, f"{peer} was not connected"
            ranges = located(writes, self._regions, end.regions)
            columns = (ranges.sources.tolist(), ranges.targets.tolist(), ranges.sizes.tolist())
            transfer = TransferId(next(self._transfers))
            if end.dead:  # as the caller is soon to learn
                end.events.insert(len(end.events) - 1, Failed(transfer, "the link has ended"))
                return transfer
            end.posts.append(_Post(transfer, list(zip(*columns, strict=True)), notification))
        return transfer

    def poll(self) -> Sequence[Event]:
        network = self._network
        with network.lock:
            network.stir()
            found: list[Event] = []
            for peer, end in list(self._ends.items()):
                while end.events and network.random.random() < network.pace.delivers:
                    found.append(end.events.popleft())
                if found and found[-1] == Disconnected(peer):
                    del self._ends[peer]
                    network.forget(end)
        return found

    def disconnect(self, peer: PeerId) -> None:
        with self._network.lock:
            end = self._ends.get(peer)
            if end is not None and not end.dead:
                end.asked = True
                self._network.begin_cut(end, "the peer has disconnected")

    def lose(self, peer: PeerId) -> None:
        """The link to ``peer`` breaks, and nobody has asked for it."""
        end = self._ends.get(peer)
        if end is not None and not end.dead:
            self._network.begin_cut(end, "the link is broken")

    def close(self) -> None:
        with self._network.lock:
            for end in self._ends.values():
                end.asked = True
                self._network.cut(end, "the peer is closed")
                self._network.forget(end)
            self._ends.clear()

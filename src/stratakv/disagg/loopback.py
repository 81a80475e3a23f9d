"""The reference transport: both sides in one process, each link a thread that copies.

Owns the copy. Addresses are this process's own, so no bytes go by any wire.
"""

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from stratakv.core.clock import Clock
from stratakv.core.errors import TransportError
from stratakv.core.wakeup import Wake
from stratakv.disagg.link import DEFAULT_LINK, LinkOptions
from stratakv.disagg.transport import Memory
from stratakv.disagg.wire import Ranges
from stratakv.disagg.wire_transport import WiredTransport
from stratakv.transfer.range_copy import copy_ranges

_RANGES = 64
"""Copied under the lock at once: a fence waits for no more."""


@dataclass(slots=True, eq=False)
class _End:
    """Where a link's other end writes to. Nobody writes without the lock, nor after ``open`` is
    false. ``keeps``: the memory, which lives as long as somebody may know its address."""

    keeps: Sequence[Memory]
    lock: threading.Lock = field(default_factory=threading.Lock)
    open: bool = True
    inbox: deque[bytes] = field(default_factory=deque[bytes])


class _Ends:
    """Every open end of this process, by its number."""

    def __init__(self) -> None:
        self._open: dict[int, _End] = {}
        self._numbers = itertools.count()

    def add(self, end: _End) -> int:
        number = next(self._numbers)
        self._open[number] = end
        return number

    def lookup(self, name: bytes) -> _End:
        end = self._open.get(int(name))
        if end is None:
            raise TransportError("it has ended")
        return end

    def remove(self, number: int) -> None:
        self._open.pop(number, None)


_ENDS = _Ends()


class LoopbackWire:
    def __init__(self, memories: Sequence[Memory]) -> None:
        self._end = _End(memories)
        self._number = _ENDS.add(self._end)
        self._peer: _End | None = None

    def describe(self) -> bytes:
        return str(self._number).encode()

    def connect(self, description: bytes) -> None:
        self._peer = _ENDS.lookup(description)

    def write(self, ranges: Ranges, message: bytes | None, given_up: threading.Event) -> None:
        peer = self._connected()
        for at in range(0, len(ranges.sizes), _RANGES):
            with peer.lock:
                if given_up.is_set() or not peer.open:
                    raise TransportError("it has ended")
                part = slice(at, at + _RANGES)
                copy_ranges(ranges.sources[part], ranges.targets[part], ranges.sizes[part])
        if message is not None:
            self.notify(message)

    def notify(self, message: bytes) -> None:
        peer = self._connected()
        with peer.lock:
            if not peer.open:
                raise TransportError("it has ended")
            peer.inbox.append(message)

    def notifications(self) -> Sequence[bytes]:
        inbox = self._end.inbox
        return [inbox.popleft() for _ in range(len(inbox))]

    def sever(self) -> bool:
        with self._end.lock:
            self._end.open = False
        _ENDS.remove(self._number)
        return True

    def _connected(self) -> _End:
        assert self._peer is not None, "not connected"
        return self._peer


class LoopbackTransport(WiredTransport):
    """A ``Transport`` to others of this process."""

    def __init__(
        self,
        memories: Sequence[Memory],
        options: LinkOptions = DEFAULT_LINK,
        clock: Clock | None = None,
        wake: Wake | None = None,
    ) -> None:
        super().__init__("loopback", memories, LoopbackWire, options, clock, wake)

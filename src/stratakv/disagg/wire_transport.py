"""A ``Transport`` whose peers have a wire and a thread each. Owns the names of peers and transfers,
and the queue of what has happened. Must not know what a wire is made of.
"""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

from stratakv.core.clock import Clock, MonotonicClock
from stratakv.core.errors import TransportError
from stratakv.core.wakeup import Wake
from stratakv.disagg.description import Description, decode
from stratakv.disagg.link import Link, LinkOptions
from stratakv.disagg.ranges import Regions, located
from stratakv.disagg.transport import (
    NOTIFICATION_BYTES,
    Disconnected,
    Done,
    Event,
    Memory,
    PeerId,
    TransferId,
    Writes,
)
from stratakv.disagg.wire import OpenWire

_CLOSE_S = 30.0
"""How long ``close`` waits for the fences. A wire that blocks does so for less."""


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class _Peer:
    link: Link
    regions: Regions | None = None


class WiredTransport:
    """``name``: what both sides must agree on. ``memories``: the regions, by index. ``wake``:
    called from any thread when ``poll`` has something to return; of writes that are done, when
    their link has nothing more to write: whoever is woken wants the interpreter's lock, which the
    next write needs too."""

    def __init__(
        self,
        name: str,
        memories: Sequence[Memory],
        open_wire: OpenWire,
        options: LinkOptions,
        clock: Clock | None = None,
        wake: Wake | None = None,
    ) -> None:
        assert all(each.flags.c_contiguous for each in memories), "a region with gaps"
        self._name, self._memories, self._open_wire = name, tuple(memories), open_wire
        self._options, self._clock = options, clock or MonotonicClock()
        self._regions = Regions.of([(each.ctypes.data, each.nbytes) for each in memories])
        self._peers: dict[PeerId, _Peer] = {}
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._wake = wake or _nothing
        self._transfers = count()
        self._closed = False

    def describe(self, peer: PeerId) -> bytes:
        with ExitStack() as undo:
            try:
                wire = self._open_wire(self._memories)
                undo.callback(wire.sever)
                described = Description(self._name, self._regions, wire.describe()).encode()
                link = Link(peer, wire, self._options, self._clock, self._report, self._wake)
            except TransportError:
                raise
            except Exception as error:  # a library's own, or the system's: no file or thread left
                raise TransportError(f"{self._name}: no link for {peer}: {error!r}") from error
            undo.pop_all()
        with self._lock:
            assert not self._closed, "the transport is closed"
            assert peer not in self._peers, f"{peer} is described already"
            self._peers[peer] = _Peer(link)
        return described

    def connect(self, peer: PeerId, description: bytes) -> None:
        found = decode(description, self._name)
        with self._lock:
            entry = self._peers[peer]
            assert entry.regions is None, f"{peer} is connected already"
            entry.regions = found.regions
        entry.link.connect(found.wire)

    def post(self, peer: PeerId, writes: Writes, notification: bytes | None = None) -> TransferId:
        size = len(notification or b"")
        assert size <= NOTIFICATION_BYTES, f"a notification of {size} bytes"
        with self._lock:
            there = self._peers[peer].regions
        assert there is not None, f"{peer} was not connected"
        ranges = located(writes, self._regions, there)
        with self._lock:  # ``poll`` has not yet returned that it is disconnected
            transfer = TransferId(next(self._transfers))
            self._peers[peer].link.post(transfer, ranges, notification)
        return transfer

    def _report(self, event: Event) -> None:
        self._events.append(event)
        if not isinstance(event, Done):
            self._wake()

    def poll(self) -> Sequence[Event]:
        with self._lock:
            for entry in self._peers.values():
                entry.link.look()
            found = [self._events.popleft() for _ in range(len(self._events))]
            # The last of a peer, also where something was posted after its link had ended.
            found.sort(key=lambda event: isinstance(event, Disconnected))
            for event in found:
                if isinstance(event, Disconnected):
                    del self._peers[event.peer]
        return found

    def disconnect(self, peer: PeerId) -> None:
        with self._lock:
            entry = self._peers.get(peer)
        if entry is not None:
            entry.link.disconnect()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            entries = dict(self._peers)
        for entry in entries.values():
            entry.link.disconnect()
        until_s = self._clock.now_s() + _CLOSE_S
        left = [
            peer
            for peer, entry in entries.items()
            if not entry.link.join(max(0.0, until_s - self._clock.now_s()))
        ]
        if left:
            raise TransportError(f"{self._name}: {', '.join(left)} may still write here")
        self._memories = ()
        with self._lock:
            self._peers.clear()
            self._events.clear()

"""One peer: what is posted to it, what comes from it, and the thread that runs its wire.

Owns when a peer counts as lost, and the order of its last events. Must not know other peers.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from math import inf
from queue import Empty, SimpleQueue
from typing import Final

from stratakv.core.clock import Clock
from stratakv.core.errors import TransportError
from stratakv.disagg.ranges import joined, slices
from stratakv.disagg.transport import (
    Disconnected,
    Done,
    Event,
    Failed,
    Lost,
    Notified,
    PeerId,
    TransferId,
)
from stratakv.disagg.wire import Ranges, Wire

_PAUSE_S = 0.002
SHORTEST_PAUSE_S = 0.0001
_LONGER = 1.1
"""Between two looks at a wire on which nothing happens: short at first, since a proof is rarely
alone, and then longer, up to the first of these. What comes after some silence is seen within a
tenth of that more."""
WORK_S = 0.0001
_WORK_TIMES = 8
"""A look that keeps the processor for so long, and for so many times the shortest one, has moved
bytes: over TCP NIXL takes them only while it is looked at. An idle look takes 10 to 20 us, on a
slow processor as long as another one's work."""
_WRITING_S = 0.01
"""Between two looks while there is more to write: a look costs what 2 % of a write of 17 MiB does,
and on busy cores it is where another thread gets its turn."""
_STALL = 0.25
"""Of the time after which a silent peer is lost: what may pass between two looks and count. Where
more has, this process was stopped, or without a processor, and what the peer has sent meanwhile
was not read yet."""
_CONNECTING_S = 1.0
"""How long an end waits for a peer that never sent anything."""


def pause_after(pause_s: float, *, busy: bool) -> float:
    """The pause before the next look at a wire, after one that followed on ``pause_s``."""
    return SHORTEST_PAUSE_S if busy else min(_LONGER * pause_s, _PAUSE_S)


def _nothing() -> None:
    pass


class WorkSeen:
    """Which looks at a wire have moved bytes, by the processor's seconds that each took."""

    def __init__(self) -> None:
        self._least_s = inf

    def busy(self, took_s: float) -> bool:
        self._least_s = min(self._least_s, took_s)
        return took_s >= max(WORK_S, _WORK_TIMES * self._least_s)


class _Kind(Enum):
    """First byte of a message."""

    BEAT = b"B"
    NOTIFICATION = b"N"
    END = b"E"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """A peer that neither sends nor takes a slice for ``lost_after_s`` is lost; each side
    says every ``beat_s`` that it is there. A slice is what a wire is given at once: the fence
    waits for one, at most."""

    beat_s: float = 1.0
    lost_after_s: float = 10.0
    slice_bytes: int = 32 << 20
    slice_ranges: int = 4096


DEFAULT_LINK: Final = LinkOptions()


@dataclass(slots=True)
class _Post:
    """``part``: what is to be written next, None where nothing is left; ``parts``: what follows."""

    transfer: TransferId
    part: Ranges | None
    parts: Iterator[Ranges]
    notification: bytes | None


class Link:
    """``report``: takes the peer's events, from any thread; ``Disconnected`` is the last.
    ``written``: called when nothing is left to write. ``work_s``: processor seconds of the calling
    thread."""

    def __init__(
        self,
        peer: PeerId,
        wire: Wire,
        options: LinkOptions,
        clock: Clock,
        report: Callable[[Event], None],
        written: Callable[[], None] = _nothing,
        work_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._peer, self._wire, self._options = peer, wire, options
        self._clock, self._work_s = clock, work_s
        self._report, self._written = report, written
        self._looks = WorkSeen()
        self._posts: deque[_Post] = deque()
        self._description: bytes | None = None
        self._silent_s = 0.0  # as far as it was looked for, the last time at ``_counted_s``
        self._counted_s = 0.0
        self._looked_s = -inf
        self._beaten_s: float | None = None
        self._met = False
        self._ended_s: float | None = None
        self._lock = threading.Lock()
        self._given_up = threading.Event()
        self._lost: str | None = None
        self._wake = SimpleQueue[None]()  # an event's wait is ten lines of Python
        self._thread = threading.Thread(target=self._run, name=f"transport {peer}", daemon=True)
        self._thread.start()

    def connect(self, description: bytes) -> None:
        self._is_there()
        self._description = description
        self._wake.put(None)

    def post(self, transfer: TransferId, ranges: Ranges, notification: bytes | None) -> None:
        assert self._description is not None, f"{self._peer} was not connected"
        parts = slices(joined(ranges), self._options.slice_bytes, self._options.slice_ranges)
        with self._lock:
            if not self._given_up.is_set():
                self._posts.append(_Post(transfer, next(parts, None), parts, notification))
                self._wake.put(None)
                return
        self._report(Failed(transfer, self._lost or "the peer was disconnected"))

    def look(self) -> None:
        """Whether the peer is still there, also while its thread waits for it."""
        if self._description is None:
            return
        most_s = self._options.lost_after_s
        with self._lock:
            now_s = self._clock.now_s()
            self._silent_s += min(now_s - self._counted_s, _STALL * most_s)
            self._counted_s, silent_s = now_s, self._silent_s
        if silent_s > most_s:
            self._lose(f"nothing came from it for {silent_s:.1f} s")

    def _is_there(self) -> None:
        with self._lock:
            self._silent_s, self._counted_s = 0.0, self._clock.now_s()

    def disconnect(self) -> None:
        with self._lock:
            self._given_up.set()
        self._wake.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether the fence holds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._given_up.is_set():
                return
            self._given_up.set()
            self._lost = reason
            self._report(Lost(self._peer, reason))
        self._wake.put(None)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - a thread must not raise into the void
            self._lose(str(error) or repr(error))
        self._end()

    def _end(self) -> None:
        """The wire goes first: until then a failed write may still read what it was given."""
        fenced = self._wire.sever()
        for post in self._posts:  # nobody adds to it any more
            self._report(Failed(post.transfer, self._lost or "the peer was disconnected"))
        while not fenced:
            self._pause(_PAUSE_S)
            fenced = self._wire.sever()
        self._report(Disconnected(self._peer))

    def _serve(self) -> None:
        while self._description is None:
            if self._given_up.is_set():
                return
            self._pause(None)
        self._wire.connect(self._description)
        pause_s = SHORTEST_PAUSE_S
        while not self._given_up.is_set() or self._is_connecting():
            busy = self._must_look() and self._receive()
            self._beat()
            if not self._given_up.is_set():
                busy |= self._write()
                self.look()
            if not busy:
                self._pause(pause_s)
            pause_s = pause_after(pause_s, busy=busy)
        if self._lost is None:
            with suppress(TransportError):  # so that it need not find out
                self._wire.notify(_Kind.END.value)

    def _is_connecting(self) -> bool:
        """Whether to stay for a peer that is just connecting: of one that leaves meanwhile, UCX may
        abort the other's process."""
        if self._lost is not None or self._met:
            return False
        if self._ended_s is None:
            self._ended_s = self._clock.now_s()
        return self._clock.now_s() - self._ended_s < _CONNECTING_S

    def _pause(self, timeout_s: float | None) -> None:
        with suppress(Empty):
            self._wake.get(timeout=timeout_s)
        while not self._wake.empty():
            self._wake.get()

    def _must_look(self) -> bool:
        if not self._posts or not self._met:
            return True
        return self._clock.now_s() - self._looked_s >= _WRITING_S

    def _receive(self) -> bool:
        """Whether anything has come, or is coming."""
        self._looked_s = self._clock.now_s()
        begun_s = self._work_s()
        messages = self._wire.notifications()
        worked = self._looks.busy(self._work_s() - begun_s)
        if messages:
            self._is_there()
            self._met = True
        for message in messages:
            match _Kind(message[:1]):
                case _Kind.BEAT:
                    pass
                case _Kind.NOTIFICATION:
                    self._report(Notified(self._peer, message[1:]))
                case _Kind.END:
                    raise TransportError("it has disconnected")
        return bool(messages) or worked

    def _beat(self) -> None:
        now_s = self._clock.now_s()
        if self._beaten_s is None or now_s - self._beaten_s >= self._options.beat_s:
            self._beaten_s = now_s
            self._wire.notify(_Kind.BEAT.value)

    def _write(self) -> bool:
        """One slice, or a notification alone. Whether there was anything to do. Nothing before the
        peer has sent something: it must know whom it has to fence."""
        if not self._posts or not self._met:
            return False
        post = self._posts[0]
        part, post.part = post.part, next(post.parts, None)
        message = None
        if post.part is None and post.notification is not None:
            message = _Kind.NOTIFICATION.value + post.notification
        if part is not None:
            self._wire.write(part, message, self._given_up)
            self._is_there()  # who takes bytes is
        elif message is not None:
            self._wire.notify(message)
        if message is not None:
            self._beaten_s = self._clock.now_s()
        if post.part is None:
            with self._lock:
                self._posts.popleft()
                last = not self._posts
            self._report(Done(post.transfer))
            if last:
                self._written()
        return True

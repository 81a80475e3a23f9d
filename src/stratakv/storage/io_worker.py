"""Storage work off the engine's thread: bounded queues in, answers out, in order per kind.

Owns the threads, the bounds, the tickets, and every buffer of a job that is not answered yet: also
after ``cancel``, which only stops what was not begun. A buffer is the caller's again when its job's
answer is taken. Must not choose what to fetch or store, nor hold a page: pins are the caller's.

Reads have a thread of their own where there is an open backend for it; with one backend for both,
one thread works, and reads wait for one batch of writes at most. A backend that fails is left alone
for a second, then two, then four, up to 64: jobs then end at once, and the first one after that
tries it again.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Final, Protocol

from stratakv.core.clock import Clock, MonotonicClock
from stratakv.core.errors import StorageError
from stratakv.core.ids import TicketId
from stratakv.storage.backend import StorageBackend, StoreFormat
from stratakv.storage.io_jobs import Answer, Job, Kind, kind_of, pages_of
from stratakv.storage.io_lane import IoLane
from stratakv.storage.io_task import Batching, IoTask

_logger = logging.getLogger(__name__)

READS: Final = frozenset({Kind.QUERY, Kind.FETCH})


@dataclass(frozen=True, slots=True, kw_only=True)
class IoLimits:
    """``queue_pages``: the most pages of one kind that are submitted and not yet taken; a larger
    job goes alone rather than never. A batch is what runs between two looks at ``cancel``."""

    queue_pages: int = 8192
    batch_pages: int = 128
    batch_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class IoStats:
    """In pages, by kind. ``dropped``: refused because the queue was full. ``failed``: not tried, or
    not with success, because the backend failed. ``trips``: how often a backend failed."""

    queued: dict[Kind, int]
    dropped: dict[Kind, int]
    failed: dict[Kind, int]
    reading_off: bool
    writing_off: bool
    trips: int


@dataclass(frozen=True, slots=True, eq=False)
class Backends:
    """Open backends of one store; the worker closes them. They may be one and the same."""

    reading: StorageBackend
    writing: StorageBackend


class Hand(Protocol):
    """What works a lane until it is closed and drained: a thread, or a simulation's schedule."""

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


def thread_for(lane: IoLane, name: str) -> Hand:
    """A thread that has begun."""
    # A daemon: a process that dies without close() must not hang in its last moment.
    thread = Thread(target=lane.run, name=name, daemon=True)
    thread.start()
    return thread


class IoWorker:
    """All methods belong to one owner thread, and none waits for storage but ``close``, which
    belongs to whoever the last owner is.

    AssertionError out of any of them: a thread of ours has died.
    """

    def __init__(
        self,
        backends: Backends,
        form: StoreFormat,
        limits: IoLimits,
        clock: Clock,
        hand_for: Callable[[IoLane, str], Hand] = thread_for,
    ) -> None:
        batching = Batching(form, limits.batch_pages, limits.batch_bytes)
        self._limits = limits
        self._tickets = 0
        self._closed = False
        self._closing = Lock()
        self._tasks: dict[TicketId, IoTask] = {}  # submitted and not yet taken
        self._queued = dict.fromkeys(Kind, 0)
        self._dropped = dict.fromkeys(Kind, 0)
        self._backends = [backends.reading]
        if backends.writing is not backends.reading:
            self._backends.append(backends.writing)
        names = ("stratakv-storage-read", "stratakv-storage-write")
        if len(self._backends) == 1:
            names = ("stratakv-storage",)
        self._lanes = [IoLane(backend, batching, clock) for backend in self._backends]
        self._hands = [hand_for(lane, name) for lane, name in zip(self._lanes, names, strict=True)]

    def submit(self, job: Job) -> TicketId | None:
        """Queue ``job``, whose sequences must not change any more. None, and counted, where the
        queue of its kind is full: nothing was taken then."""
        self._check()
        kind = kind_of(job)
        task = IoTask(TicketId(self._tickets), job)
        if self._queued[kind] and self._queued[kind] + task.weight > self._limits.queue_pages:
            self._dropped[kind] += pages_of(job)
            return None
        self._tickets += 1
        self._queued[kind] += task.weight
        self._tasks[task.ticket] = task
        self._lane(kind).put(task)
        return task.ticket

    def cancel(self, ticket: TicketId) -> None:
        """Begin no more batches of a job. Its answer still comes, and only then are its buffers
        free. AssertionError for a ticket that was taken."""
        self._task(ticket).cancel()

    def left(self, kind: Kind) -> int:
        """How many keys of all jobs of ``kind`` have not been tried by now; those of a batch under
        way are among them."""
        return sum(task.left for task in self._tasks.values() if task.kind is kind)

    def progress(self, ticket: TicketId) -> int:
        """How many keys of a job, the first ones, have been tried by now."""
        return self._task(ticket).done

    @property
    def closed(self) -> bool:
        """Whether it takes no more jobs."""
        return self._closed

    @property
    def idle(self) -> bool:
        """Whether every answer was taken."""
        return not self._tasks

    def ready(self, kind: Kind) -> int:
        """How many jobs of ``kind``, oldest first, are answered and not yet taken."""
        self._check()
        return len(self._lane(kind).finished[kind])

    def peek(self, kind: Kind, count: int) -> Iterator[Answer]:
        """The oldest ``count`` answers, which stay where they are, and their buffers the jobs';
        ``count`` <= ``ready(kind)``."""
        finished = self._lane(kind).finished[kind]
        return (finished[at] for at in range(count))  # the lane's thread may add behind them

    def take(self, kind: Kind, count: int) -> list[Answer]:
        """Remove the oldest ``count`` answers; ``count`` <= ``ready(kind)``. The buffers of their
        jobs are the caller's again."""
        ready = self.ready(kind)
        assert 0 <= count <= ready, f"take({count}) with {ready} jobs answered"
        finished = self._lane(kind).finished[kind]
        answers = [finished.popleft() for _ in range(count)]
        for answer in answers:
            self._queued[kind] -= self._tasks.pop(answer.ticket).weight
        return answers

    def close(self, timeout_s: float) -> bool:
        """Cancel reads, give writes ``timeout_s`` to be done, cancel the rest, and wait as long
        again for what had begun; then close the backends. Answers can still be taken.

        False where a backend still has not come back: the thread, the buffers and the backend are
        left as they are, and another call may find it done.
        """
        self._closed = True
        with self._closing:
            self._end(timeout_s, READS)
            ended = self._end(timeout_s, frozenset(Kind))
            for hand, backend in zip(self._hands, self._backends, strict=True):
                if not hand.is_alive():
                    _close(backend)  # twice is once
        self._check()
        return ended

    @property
    def stats(self) -> IoStats:
        lanes = self._lanes
        return IoStats(
            queued=dict(self._queued),
            dropped=dict(self._dropped),
            failed={kind: self._lane(kind).failed_pages[kind] for kind in Kind},
            reading_off=lanes[0].off,
            writing_off=lanes[-1].off,
            trips=sum(lane.trips for lane in lanes),
        )

    def _end(self, timeout_s: float, cancelled: frozenset[Kind]) -> bool:
        clock = MonotonicClock()  # threads take real time, whatever clock back-off is measured on
        deadline_s = clock.now_s() + timeout_s
        for lane in self._lanes:
            lane.close(cancelled)
        for hand in self._hands:
            hand.join(max(0.0, deadline_s - clock.now_s()))
        return not any(hand.is_alive() for hand in self._hands)

    def _lane(self, kind: Kind) -> IoLane:
        return self._lanes[0] if kind in READS else self._lanes[-1]

    def _task(self, ticket: TicketId) -> IoTask:
        assert ticket in self._tasks, f"ticket {ticket} is no job under way"
        return self._tasks[ticket]

    def _check(self) -> None:
        for lane in self._lanes:
            lane.check()


def _close(backend: StorageBackend) -> None:
    try:
        backend.close()
    except StorageError as error:
        _logger.warning("storage could not be closed: %s", error)

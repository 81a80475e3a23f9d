"""The work for one open backend: what waits, in which order it is done, and what has finished.

Owns the queues and the back-off; ``run`` is the whole life of the thread that calls the backend,
and the rest is for the owner's thread. Must not know what a job means, nor refuse one.
"""

import logging
import threading
from collections import deque
from typing import Final

from stratakv.core.clock import Clock
from stratakv.core.errors import StorageError
from stratakv.storage.backend import StorageBackend
from stratakv.storage.breaker import Breaker
from stratakv.storage.io_jobs import Answer, Ending, Kind
from stratakv.storage.io_task import Batching, IoTask

_logger = logging.getLogger(__name__)

_QUERIES: Final = 0
_FETCHES: Final = 1
_WRITES: Final = 2
_RANK: Final = {
    Kind.QUERY: _QUERIES,
    Kind.FETCH: _FETCHES,
    Kind.STORE: _WRITES,
    Kind.TOUCH: _WRITES,
    Kind.REMOVE: _WRITES,
}
"""Jobs that change the store stay in the order of their submission, whatever their kind."""


class IoLane:
    """Batches of a fetch and of writes take turns, and a query goes before either, so that whatever
    comes waits for one batch at most. ``finished[kind]`` is in the order of submission."""

    def __init__(self, backend: StorageBackend, batching: Batching, clock: Clock) -> None:
        self._backend = backend
        self._batching = batching
        self._breaker = Breaker(clock)
        self._failing: Kind | None = None
        self._changed = threading.Condition()
        self._queues: tuple[deque[IoTask], ...] = (deque(), deque(), deque())
        self._last = _WRITES
        self._closed = False
        self._fatal: BaseException | None = None
        self.finished: dict[Kind, deque[Answer]] = {kind: deque() for kind in Kind}
        self.failed_pages = dict.fromkeys(Kind, 0)

    @property
    def off(self) -> bool:
        """Whether jobs fail at once because the backend has failed lately."""
        return not self._breaker.closed

    @property
    def trips(self) -> int:
        return self._breaker.trips

    def put(self, task: IoTask) -> None:
        with self._changed:
            assert not self._closed, "submit() after close()"
            self._queues[_RANK[task.kind]].append(task)
            self._changed.notify()

    def check(self) -> None:
        """AssertionError if ``run`` has died, which only a fault of ours makes it do."""
        if self._fatal is not None:
            raise AssertionError("a thread of the storage tier failed") from self._fatal

    def close(self, cancelled: frozenset[Kind]) -> None:
        """Take no more jobs, and begin no more batches of those of the ``cancelled`` kinds."""
        with self._changed:
            self._closed = True
            for queue in self._queues:
                for task in queue:
                    if task.kind in cancelled:
                        task.cancel()
            self._changed.notify()

    # -- the lane's own thread -------------------------------------------------------------------

    def run(self) -> None:
        """Work until the lane is closed and drained. Raises nothing: ``check`` does."""
        try:
            while (task := self._next()) is not None:
                self._do(task)
                del task  # an idle thread must not keep buffers alive
        except BaseException as error:  # kept for the owner, whose next call raises it
            _logger.exception("a thread of the storage tier has died")
            self._fatal = error

    def once(self) -> bool:
        """Do one batch, for an owner that works without a thread; False, and nothing done, where
        there is none."""
        if not any(self._queues):
            return False
        task = self._next()
        assert task is not None
        self._do(task)
        return True

    def _do(self, task: IoTask) -> None:
        ending = self._work(task)
        if ending is not None:
            self._finish(task, ending)

    def _next(self) -> IoTask | None:
        """The task whose batch comes next, still in its queue; None when closed and drained."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._queues) or self._closed)
            # Whoever of fetches and writes went last lets the other go first.
            order = (_QUERIES, _WRITES, _FETCHES)
            if self._last == _WRITES:
                order = (_QUERIES, _FETCHES, _WRITES)
            for rank in order:
                if self._queues[rank]:
                    self._last = self._last if rank == _QUERIES else rank
                    return self._queues[rank][0]
            return None

    def _work(self, task: IoTask) -> Ending | None:
        """One batch of ``task``; how it ended, or None when there is more."""
        if task.whole:
            return Ending.DONE
        if task.cancelled:
            return Ending.CANCELLED
        if self.off:
            return Ending.OFF
        try:
            task.advance(self._backend, self._batching.stop(task.job, task.done))
        except StorageError as error:
            self._stumbled(task, error)
            return Ending.FAILED
        except Exception as error:
            # A client library may raise anything; what it could not do is only not done.
            _logger.exception("a backend broke its promise to raise nothing but StorageError")
            self._stumbled(task, error)
            return Ending.FAILED
        if task.kind is self._failing:  # that others work, touches above all, is no sign of it
            self._breaker.worked()
            self._failing = None
        return Ending.DONE if task.whole else None

    def _stumbled(self, task: IoTask, error: Exception) -> None:
        level = logging.INFO if self._failing else logging.WARNING  # once until it works again
        self._breaker.failed()
        self._failing = task.kind
        _logger.log(level, "storage %s failed, %s", task.kind.name.lower(), error)

    def _finish(self, task: IoTask, ending: Ending) -> None:
        if ending in {Ending.FAILED, Ending.OFF}:
            self.failed_pages[task.kind] += task.left
        with self._changed:
            self._queues[_RANK[task.kind]].popleft()
        # Last: who sees the answer owns the buffers.
        self.finished[task.kind].append(task.answer(ending))

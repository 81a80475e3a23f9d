"""Calls of one open backend whose callers wait only so long.

Owns the thread that calls the backend, the turns, and the back-off: a backend that fails is left
alone for a while, and one that hangs until it comes back. What a call has in hand is its own: who
gave up on it must neither change nor read that.
"""

import logging
from collections.abc import Callable
from enum import Enum, auto
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Final, Generic, TypeAlias, TypeVar

from stratakv.core.clock import Clock
from stratakv.storage.backend import StorageBackend
from stratakv.storage.breaker import Breaker

log = logging.getLogger(__name__)
T = TypeVar("T")
BackendWork: TypeAlias = Callable[[StorageBackend], T]


MOST_POSTED: Final = 64
"""Most calls that wait and nobody waits for."""


class NoAnswer(Enum):
    """Why there is no answer."""

    FAILED = auto()  # the backend did, or is left alone
    LATE = auto()  # it has not come back in time, now or for an earlier caller


class _Call(Generic[T]):
    def __init__(self, work: BackendWork[T]) -> None:
        self._work = work
        self._answers: list[T] = []
        self._error: Exception | None = None
        self.ended = Event()

    def run(self, backend: StorageBackend) -> None:
        try:
            self._answers.append(self._work(backend))
        except Exception as error:  # noqa: BLE001 - a client library may raise anything
            self._error = error
        self.ended.set()

    def answer(self) -> T:
        """Of one that has ended. Raises what the backend did."""
        if self._error is not None:
            raise self._error
        return self._answers[0]


class BoundedCalls:
    """``patience_s``: how long a caller waits for its turn, and then for its answer. From any
    thread."""

    def __init__(self, backend: StorageBackend, clock: Clock, patience_s: float) -> None:
        self._backend: Final = backend
        self._breaker = Breaker(clock)
        self._patience_s = patience_s
        self._turn = Lock()
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._hanging: _Call[Any] | None = None
        self._closed = False
        # A daemon: a process must end although its store hangs.
        Thread(target=self._run, name="stratakv-pages", daemon=True).start()

    @property
    def off(self) -> bool:
        """Whether the backend is left alone for now."""
        hanging = self._hanging
        return not self._breaker.closed or (hanging is not None and not hanging.ended.is_set())

    def call(self, work: BackendWork[T], progress: Callable[[], int] = lambda: 0) -> T | NoAnswer:
        """What ``work`` says of the backend. It is late when neither its end nor another
        ``progress`` has come in time."""
        if not self._turn.acquire(timeout=self._patience_s):
            return NoAnswer.LATE
        try:
            if self._closed or not self._breaker.closed:
                return NoAnswer.FAILED
            return self._ask(work, progress)
        finally:
            self._turn.release()

    def post(self, work: BackendWork[object]) -> None:
        """Have it done in its turn, and do not wait: what fails, and what comes while the backend
        is left alone or much waits, is not done. ``work`` holds no buffer."""
        if not self._closed and not self.off and self._calls.qsize() < MOST_POSTED:
            self._calls.put(_Call(work))

    def close(self) -> None:
        """Close the backend, after whatever it does now; wait only so long for it."""
        if not self._turn.acquire(timeout=self._patience_s):
            log.warning("the store has not come back: it is not closed")
            return
        try:
            if not self._closed:
                self._closed = True
                if self._ask(lambda backend: backend.close(), lambda: 0) is NoAnswer.LATE:
                    log.warning("the store has not come back: it is closed when it does")
                self._calls.put(None)
        finally:
            self._turn.release()

    def _ask(self, work: BackendWork[T], progress: Callable[[], int]) -> T | NoAnswer:
        """In the caller's turn."""
        call = _Call(work)
        if self._hanging is not None and not self._hanging.ended.is_set():
            if self._closed:  # it is done once the other has ended
                self._calls.put(call)
            return NoAnswer.LATE
        self._calls.put(call)
        seen = progress()
        while not call.ended.wait(self._patience_s):
            if (now := progress()) != seen:
                seen = now
                continue
            self._hanging = call
            log.warning("the store has not answered in %g s", self._patience_s)
            return NoAnswer.LATE
        self._hanging = None
        try:
            answer = call.answer()
        except Exception as error:  # noqa: BLE001 - a client library may raise anything
            self._breaker.failed()
            log.warning("the store failed: %s: %s", type(error).__name__, error)
            return NoAnswer.FAILED
        self._breaker.worked()
        return answer

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run(self._backend)
            del call  # an idle thread must not keep buffers alive

"""An open store; and work in the background, for who must not wait while one opens or closes.

Owns the thread, and what has come of it until somebody takes it. Must not know what opens, or how.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from stratakv.storage.io_worker import IoWorker

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenStore:
    """An open store. ``shown``: its URL without a password. ``figures``: what the store reports of
    itself, as JSON values; from any thread, while it is open."""

    worker: IoWorker
    shown: str
    figures: Callable[[], Mapping[str, object]]


def on_a_thread(work: Callable[[], None]) -> None:
    """Begin it. A daemon: a store that never comes back must not keep the process alive."""
    threading.Thread(target=work, name="stratakv-storage-background", daemon=True).start()


class Background(Generic[T]):
    """``work`` begins at once. ``unwanted``: what is done, beside its owner too, with what has come
    of it and nobody wants. ``begin``: how both run. The rest is for one owner thread."""

    def __init__(
        self,
        work: Callable[[], T],
        unwanted: Callable[[T], object],
        begin: Callable[[Callable[[], None]], None] = on_a_thread,
    ) -> None:
        self._work = work
        self._unwanted = unwanted
        self._begin = begin
        self._lock = threading.Lock()
        self._wanted = True
        self._answer: Future[T] = Future()
        begin(self._run)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._answer.done()

    @property
    def failure(self) -> BaseException | None:
        """What it has raised; None where it ended well. Only once it is ``done``."""
        return self._answer.exception(0)

    def wait(self, timeout_s: float) -> None:
        """Until it is done, ``timeout_s`` at most."""
        wait([self._answer], timeout_s)

    def take(self) -> T:
        """What has come of it, which is the caller's from now on; raises its failure."""
        assert self._wanted, "what was abandoned or taken is taken"
        self._wanted = False
        return self._answer.result(0)

    def abandon(self) -> None:
        """Do away with what has come of it, or will. Nothing of what was taken, and twice is
        once."""
        with self._lock:
            wanted, self._wanted = self._wanted, False
            if not wanted or not self.done or self.failure is not None:
                return
        found = self._answer.result(0)
        self._begin(lambda: self._do_away(found))

    def _do_away(self, found: T) -> None:
        self._unwanted(found)

    def _run(self) -> None:
        try:
            found = self._work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the owner asks for it
            self._answer.set_exception(error)
            return
        with self._lock:
            if self._wanted:
                self._answer.set_result(found)
                return
        self._unwanted(found)

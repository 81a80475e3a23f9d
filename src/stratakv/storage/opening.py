"""An open store; and one that opens on a thread of its own, for those who must not wait for it.

Owns the thread, and what has opened until somebody takes it. Must not know what opens, or how.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from stratakv.storage.io_worker import IoWorker

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenStore:
    """An open store. ``shown``: its URL without a password. ``figures``: what the store says of
    itself, as JSON values; from any thread, while it is open."""

    worker: IoWorker
    shown: str
    figures: Callable[[], Mapping[str, object]]


class Opening(Generic[T]):
    """``opening`` begins at once. ``closing``: what is done, on a thread too, with what has opened
    and nobody wants. The rest is for one owner thread."""

    def __init__(self, opening: Callable[[], T], closing: Callable[[T], object]) -> None:
        self._opening = opening
        self._closing = closing
        self._lock = threading.Lock()
        self._wanted = True
        self._answer: Future[T] = Future()
        # A daemon: a store that never opens must not keep the process alive.
        threading.Thread(target=self._run, name="stratakv-storage-open", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether it has opened, or failed to."""
        return self._answer.done()

    @property
    def failure(self) -> BaseException | None:
        """Why it did not open; None where it did. Only once it is ``done``."""
        return self._answer.exception(0)

    def take(self) -> T:
        """What has opened, which is the caller's to close from now on; raises its failure."""
        assert self._wanted, "what was abandoned or taken is taken"
        self._wanted = False
        return self._answer.result(0)

    def abandon(self) -> None:
        """Close what has opened, or will. Nothing of what was taken, and twice is once."""
        with self._lock:
            wanted, self._wanted = self._wanted, False
            if not wanted or not self.done or self.failure is not None:
                return
        opened = self._answer.result(0)
        threading.Thread(target=self._closing, args=(opened,), daemon=True).start()

    def _run(self) -> None:
        try:
            opened = self._opening()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the owner asks for it
            self._answer.set_exception(error)
            return
        with self._lock:
            if self._wanted:
                self._answer.set_result(opened)
                return
        self._closing(opened)

"""Which storage a running server uses: attach, detach, clear, inspect.

Owns the open store, from when it was opened until it is closed, and the lock: one change at a time,
the second one is refused. Its calls block and belong on threads that may, never on an event loop or
the engine's thread; the engine is told through the driver. Must not know HTTP or backends.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias

from stratakv.core.clock import Clock
from stratakv.core.errors import ConfigError, StorageError
from stratakv.serve.driver import EngineDriver, Health
from stratakv.serve.errors import (
    ApiError,
    conflict,
    invalid,
    nothing_attached,
    unavailable,
    unreachable,
)
from stratakv.serve.ports import StoragePort
from stratakv.storage.io_jobs import Kind
from stratakv.storage.io_worker import IoStats
from stratakv.storage.opening import OpenStore

log = logging.getLogger(__name__)

POLL_S: Final = 0.01
"""Between two looks at whether everything is written."""
CLOSE_S: Final = 10.0
"""What a batch that has begun, and the backends, get to come back."""


Opener: TypeAlias = Callable[[str], OpenStore]
"""A URL to an open store. ConfigError for one that is not allowed, StorageError for one that does
not answer; either way nothing is left open."""


@dataclass(frozen=True, slots=True)
class Detached:
    """Up to ``dropped_pages`` were not written: a batch that had begun may have been."""

    shown: str
    dropped_pages: int


class StorageAdmin:
    """``opener``: or why none can be attached. ``attached``: what the engine has already."""

    def __init__(
        self,
        driver: EngineDriver,
        engine: StoragePort,
        clock: Clock,
        opener: Opener | str,
        attached: OpenStore | None = None,
    ) -> None:
        self._driver = driver
        self._engine = engine
        self._clock = clock
        self._opener = opener
        self._open = attached
        self._lock = threading.Lock()

    def attach(self, url: str) -> str:
        """Use the store at ``url`` from now on; the URL as it may be shown. ApiError: nothing has
        changed, and nothing is left open."""
        with self._changing():
            if isinstance(self._opener, str):
                raise conflict(self._opener, "cannot_attach")
            if self._open is not None:
                message = f"{self._open.shown} is attached; detach it first"
                raise conflict(message, "storage_attached")
            try:
                store = self._opener(url)
            except ConfigError as error:
                raise invalid("url", str(error)) from error
            except StorageError as error:
                raise unreachable(str(error)) from error
            try:
                self._check_ready()  # opening took its time
                self._driver.ask(lambda: self._engine.attach_storage(store.worker)).result()
            except BaseException:
                _close(store)
                raise
            self._open = store
            log.info("storage attached: %s", store.shown)
            return store.shown

    def detach(self, wait_s: float, *, force: bool) -> Detached:
        """Wait until what is queued is written, ``wait_s`` at most, and close the store. ``force``:
        drop what is queued. ApiError: it is attached as before, but what was dropped is lost."""
        with self._changing():
            store = self._attached()
            dropped, done = self._first_try(store, force=force)
            deadline_s = self._clock.now_s() + wait_s
            while not done and self._clock.now_s() < deadline_s:
                if self._driver.health is not Health.READY:
                    break
                time.sleep(POLL_S)
                done = self._try_detach()
            if not done:
                raise self._given_up(store, wait_s, dropped)
            self._open = None
            log.info("storage detached: %s, %d pages were not written", store.shown, dropped)
            _close(store)
            return Detached(store.shown, dropped)

    def clear(self) -> str:
        """Begin to forget every object of the store; the URL as it may be shown."""
        with self._changing():
            store = self._attached()
            if not self._driver.ask(self._engine.clear_storage).result():
                raise conflict("too much is queued for the store; try again", "busy")
            return store.shown

    def inspect(self) -> Mapping[str, object]:
        """What is attached and how it does, as JSON values."""
        store = self._open
        if store is None:
            return {"attached": False}
        asked = self._driver.ask(lambda: (self._engine.storage_stats(), store.worker.stats))
        stats, io = asked.result()
        if stats is None:  # detached since
            return {"attached": False}
        figures: Mapping[str, object] = {}
        # Since the engine was asked, it may have been detached and closed.
        with suppress(OSError, ValueError, StorageError):
            figures = store.figures()
        return {
            "attached": True,
            "url": store.shown,
            **asdict(stats),
            "queue": _queue(io),
            "backend": figures,
        }

    # -- the server's end --------------------------------------------------------------------------

    def settle(self, timeout_s: float) -> None:
        """Before the driver stops: let the engine write what is queued. Takes no changes."""
        deadline_s = self._clock.now_s() + timeout_s
        if self._open is None or not self._lock.acquire(timeout=timeout_s):
            return
        try:
            with suppress(ApiError):  # a dead engine writes nothing
                while not self._try_detach() and self._clock.now_s() < deadline_s:
                    time.sleep(POLL_S)
        finally:
            self._lock.release()

    def close(self) -> None:
        """After the driver has stopped: write what is still queued, for a while, and close."""
        store, self._open = self._open, None
        if store is not None:
            _close(store)

    @contextmanager
    def _changing(self) -> Generator[None, None, None]:
        self._check_ready()
        if not self._lock.acquire(blocking=False):
            raise conflict("another change of the storage is under way", "busy")
        try:
            yield
        finally:
            self._lock.release()

    def _check_ready(self) -> None:
        if self._driver.health is not Health.READY:
            raise unavailable(self._driver.health.value)

    def _attached(self) -> OpenStore:
        if self._open is None:
            raise nothing_attached()
        return self._open

    def _try_detach(self) -> bool:
        return self._driver.ask(self._engine.detach_storage).result() is not None

    def _first_try(self, store: OpenStore, *, force: bool) -> tuple[int, bool]:
        """How many pages are given up, and whether that was all."""

        def attempt() -> tuple[int, bool]:
            left = store.worker.left(Kind.STORE) if force else 0
            return left, self._engine.detach_storage(force=force) is not None

        return self._driver.ask(attempt).result()

    def _given_up(self, store: OpenStore, wait_s: float, dropped: int) -> ApiError:
        """The detach is called off; why."""

        def keep() -> tuple[int, int]:
            self._engine.keep_storage()
            return store.worker.left(Kind.STORE), store.worker.left(Kind.FETCH)

        writes, reads = self._driver.ask(keep).result()
        if self._driver.health is not Health.READY:
            return unavailable(self._driver.health.value)
        message = (
            f"after {wait_s:g} s, {writes} pages are still to be written and {reads} to be read"
        )
        message += f"; up to {dropped} that were queued are dropped" if dropped else ""
        message += "; the storage stays attached. Wait longer with wait_s, or drop with force=true"
        return conflict(message, "storage_busy")


def _close(store: OpenStore) -> None:
    if not store.worker.close(CLOSE_S):
        log.error("%s does not come back; it is left to itself", store.shown)


def _queue(io: IoStats) -> Mapping[str, object]:
    """By kind of work, in pages."""
    counts = {"queued": io.queued, "dropped": io.dropped, "failed": io.failed}
    named = {
        name: {kind.name.lower(): count for kind, count in found.items()}
        for name, found in counts.items()
    }
    return {**named, "trips": io.trips}

"""Which storage a running server uses: attach, detach, clear, inspect.

Owns the order of a change on all ranks, its limits and whose error a client gets, and the lock: one
change at a time, the second one is refused. Its calls block and belong on threads that may, never
on an event loop or the engine's thread; the engine is called through the driver. Must not know HTTP
or backends.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Final

from stratakv.core.clock import Clock
from stratakv.core.errors import ConfigError, StorageError
from stratakv.engine.attachment import AttachmentReport, AttachmentState, StorageCall, Verb
from stratakv.serve.driver import EngineDriver, Health
from stratakv.serve.engine_protocols import StoragePort
from stratakv.serve.errors import (
    ApiError,
    conflict,
    invalid,
    nothing_attached,
    unavailable,
    unreachable,
)
from stratakv.storage.io_jobs import Kind
from stratakv.storage.io_worker import IoStats
from stratakv.storage.opening import OpenStore

log = logging.getLogger(__name__)

POLL_S: Final = 0.01
"""Between two looks at whether everything is written, and two at whether a store has opened, at
first."""
LAST_POLL_S: Final = 0.25
OPEN_S: Final = 60.0
"""What ranks get to open a store: each look is a step of all of them."""
DETACH: Final = StorageCall(Verb.DETACH)
LOOK: Final = StorageCall(Verb.LOOK)
CLOSE_S: Final = 10.0
"""What a batch that has begun, and the backends, get to come back."""


@dataclass(frozen=True, slots=True)
class Detached:
    """Up to ``dropped_pages`` were not written: a batch that had begun may have been."""

    shown: str
    dropped_pages: int


class StorageAdmin:
    """``check``: ConfigError for a URL that no engine need try; or why none can be attached.
    ``attached``: what the engine has already. ``open_s``: what every rank gets to open its store;
    what opens later is closed at once."""

    def __init__(
        self,
        driver: EngineDriver,
        engine: StoragePort,
        clock: Clock,
        check: Callable[[str], None] | str,
        attached: OpenStore | None = None,
        open_s: float = math.inf,
    ) -> None:
        self._driver = driver
        self._engine = engine
        self._clock = clock
        self._check = check
        self._open = attached
        self._open_s = open_s
        self._lock = threading.Lock()

    def attach(self, url: str) -> str:
        """Use the store at ``url`` from now on, on every rank; the URL as it may be shown.
        ApiError, the first rank's that has one: nothing has changed, and nothing is left open."""
        with self._changing():
            if isinstance(self._check, str):
                raise conflict(self._check, "cannot_attach")
            if self._open is not None:
                message = f"{self._open.shown} is attached; detach it first"
                raise conflict(message, "storage_attached")
            try:
                self._check(url)
                store = self._attach(url)
            except ConfigError as error:
                raise invalid("url", str(error)) from error
            except StorageError as error:
                raise unreachable(str(error)) from error
            self._open = store
            log.info("storage attached: %s", store.shown)
            return store.shown

    def _attach(self, url: str) -> OpenStore:
        """Once all ranks have opened it, all use it. ConfigError or StorageError, or ApiError where
        the server ends."""
        try:
            self._call(StorageCall(Verb.OPEN, url=url))
            self._wait_until_opened()
            self._call(StorageCall(Verb.ATTACH))
        except BaseException:
            with suppress(ApiError):  # an engine that has ended has closed it
                self._call(StorageCall(Verb.CANCEL))
            raise
        store = self._engine.store
        assert isinstance(store, OpenStore), "the engine has opened something else"
        return store

    def _wait_until_opened(self) -> None:
        deadline_s, pause_s = self._clock.now_s() + self._open_s, POLL_S
        while True:
            reports = self._call(LOOK)
            self._check_ready()  # opening takes its time
            if all(report.state is AttachmentState.OPENED for report in reports):
                return
            _raise_first(reports)
            if self._clock.now_s() >= deadline_s:
                raise StorageError(
                    f"after {self._open_s:g} s, {_late(reports)} not opened it; it is attached "
                    "nowhere"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)

    def detach(self, wait_s: float, *, force: bool) -> Detached:
        """Wait until what is queued is written, ``wait_s`` at most, and close the store. ``force``:
        drop what is queued. ApiError: it is attached as before, but what was dropped is lost."""
        with self._changing():
            store = self._attached()
            dropped, reports = self._first_try(store, force=force)
            deadline_s = self._clock.now_s() + wait_s
            while _drains(reports) and self._clock.now_s() < deadline_s:
                if self._driver.health is not Health.READY:
                    break
                time.sleep(POLL_S)
                reports = self._call(DETACH)
            if _drains(reports):
                raise self._given_up(store, wait_s, dropped)
            self._open = None
            log.info("storage detached: %s, %d pages were not written", store.shown, dropped)
            self._wait_until_closed(store)
            return Detached(store.shown, dropped)

    def _wait_until_closed(self, store: OpenStore) -> None:
        """Every rank closes its own, and gives a store that hangs up after some seconds."""
        try:
            while any(report.state is AttachmentState.CLOSING for report in self._call(LOOK)):
                time.sleep(POLL_S)
        except ApiError:  # the engine has ended
            _close(store)

    def clear(self) -> str:
        """Begin to forget every object of the store; the URL as it may be shown."""
        with self._changing():
            store = self._attached()
            if not all(report.done for report in self._call(StorageCall(Verb.CLEAR))):
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
                while _drains(self._call(DETACH)):
                    if self._clock.now_s() >= deadline_s:
                        return
                    time.sleep(POLL_S)
                store, self._open = self._open, None
                self._wait_until_closed(store)
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

    def _call(self, call: StorageCall) -> Sequence[AttachmentReport]:
        if call.verb in self._engine.beside_steps:
            return self._engine.call_storage(call)
        return self._driver.ask(lambda: self._engine.call_storage(call)).result()

    def _first_try(
        self, store: OpenStore, *, force: bool
    ) -> tuple[int, Sequence[AttachmentReport]]:
        """How many pages are given up, and how the detach stands."""

        def attempt() -> tuple[int, Sequence[AttachmentReport]]:
            left = store.worker.left(Kind.STORE) if force else 0
            return left, self._engine.call_storage(StorageCall(Verb.DETACH, force=force))

        return self._driver.ask(attempt).result()

    def _given_up(self, store: OpenStore, wait_s: float, dropped: int) -> ApiError:
        """The detach is called off; why."""

        def keep() -> tuple[int, int]:
            self._engine.call_storage(StorageCall(Verb.RESUME))
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


def _drains(reports: Sequence[AttachmentReport]) -> bool:
    return any(report.state is AttachmentState.DRAINING for report in reports)


def _raise_first(reports: Sequence[AttachmentReport]) -> None:
    """The error of the first rank that has one; rank 0's reads as if there were no others."""
    for rank, report in enumerate(reports):
        why = report.why if rank == 0 else f"rank {rank}: {report.why}"
        if report.state is AttachmentState.REFUSED:
            raise ConfigError(why)
        if report.state is AttachmentState.FAILED:
            raise StorageError(why)


def _late(reports: Sequence[AttachmentReport]) -> str:
    late = [
        str(rank) for rank, report in enumerate(reports) if report.state is AttachmentState.OPENING
    ]
    return f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(late)} have"


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

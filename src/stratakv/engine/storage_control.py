"""Which store an engine uses while it runs: what a call asks for is done here, on every rank.

Owns a rank's attachment. Must not wait: stores open and close beside the steps. What then
follows, once all ranks have opened theirs, is decided beside rank 0 (``serve.admin``).
"""

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias, assert_never

from stratakv.core.errors import ConfigError, StorageError
from stratakv.engine.attachment import (
    AttachmentReport,
    AttachmentState,
    Outcome,
    StorageCall,
    Verb,
    after,
)
from stratakv.storage.io_worker import IoWorker
from stratakv.storage.opening import Background, on_a_thread
from stratakv.storage.urls import hidden
from stratakv.tiers.storage import StorageTier

log = logging.getLogger(__name__)

CLOSE_S: Final = 10.0
"""What a batch that has begun, and the backends, get to come back."""


class Openable(Protocol):
    """An open store, and perhaps more than an engine wants of it."""

    @property
    def worker(self) -> IoWorker: ...


StoreOpener: TypeAlias = Callable[[str], Openable]
"""A URL to an open store; ConfigError where it is not allowed, StorageError where it cannot be
reached; either way nothing is left open. It blocks."""


class BackgroundStores:
    """Opens and closes stores beside the steps of an engine. ``begin``: how that runs."""

    def __init__(
        self, opener: StoreOpener, begin: Callable[[Callable[[], None]], None] = on_a_thread
    ) -> None:
        self._opener = opener
        self._begin = begin

    def open(self, url: str) -> Background[Openable]:
        def close_unwanted(store: Openable) -> None:
            _close(store.worker)

        return Background(lambda: self._opener(url), close_unwanted, self._begin)

    def close(self, worker: IoWorker) -> Background[None]:
        return Background(lambda: _close(worker), _nothing, self._begin)


def _close(worker: IoWorker) -> None:
    if not worker.close(CLOSE_S):
        log.error("a store does not come back; it is left to itself")


def _nothing(done: None) -> None:
    del done


def no_store(url: str) -> Openable:
    raise ConfigError(
        f"--storage {hidden(url)}: this engine has nothing that opens stores; allowed is none"
    )


NO_STORES: Final = BackgroundStores(no_store)


class StorageControl:
    """At most one store at a time. What is not ``BESIDE_STEPS`` is the engine's thread's alone."""

    def __init__(self, tier: StorageTier, stores: BackgroundStores) -> None:
        self._tier = tier
        self._stores = stores
        self._lock = threading.Lock()
        self._state = AttachmentState.DETACHED
        self._why = ""
        self._opening: Background[Openable] | None = None
        self._closing: Background[None] | None = None
        self._url = ""
        self._store: Openable | None = None

    @property
    def store(self) -> Openable | None:
        """What a call has attached, until it is used no more."""
        return self._store

    def given(self, worker: IoWorker) -> None:
        """Use an open store from now on. AssertionError if there is one."""
        self._go(Outcome.GIVEN)
        self._tier.attach(worker)

    def call(self, call: StorageCall) -> AttachmentReport:
        """Do it. AssertionError where it cannot follow on what was done before."""
        with self._lock:
            self._look()
            self._go(call.verb)
            done = self._do(call)
            return AttachmentReport(self._state, self._why, done)

    def _do(self, call: StorageCall) -> bool:
        match call.verb:
            case Verb.OPEN:
                self._url, self._opening = call.url, self._stores.open(call.url)
            case Verb.CANCEL:
                self._cancel()
            case Verb.ATTACH:
                self._attach()
            case Verb.DETACH:
                self._drain(force=call.force)
            case Verb.RESUME:
                self._tier.keep()
            case Verb.CLEAR:
                return self._tier.clear()
            case Verb.LOOK:
                pass
            case _:
                assert_never(call.verb)
        return True

    def close(self, timeout_s: float) -> None:
        """The engine ends, and lets go of what it uses itself: close what nobody uses."""
        with self._lock:
            self._cancel()
        if self._closing is not None:
            self._closing.wait(timeout_s)

    def _go(self, event: Verb | Outcome, why: str = "") -> None:
        state = after(self._state, event)
        if state is not self._state:
            self._state, self._why = state, why

    def _look(self) -> None:
        """What has ended beside the steps, since the last call."""
        if (
            self._state is AttachmentState.OPENING
            and self._opening is not None
            and self._opening.done
        ):
            self._opened(self._opening)
        if self._closing is not None and self._closing.done:
            if (error := self._closing.failure) is not None:
                log.error("a store could not be closed", exc_info=error)
            self._closing = None
            self._go(Outcome.CLOSED)

    def _opened(self, opening: Background[Openable]) -> None:
        match opening.failure:
            case None:
                self._go(Outcome.OPENED)
            case ConfigError() as error:
                self._go(Outcome.REFUSED, self._hidden(error))
            case StorageError() as error:
                self._go(Outcome.FAILED, self._hidden(error))
            case error:
                log.error("%s could not be opened", hidden(self._url), exc_info=error)
                self._go(Outcome.FAILED, f"{type(error).__name__} while it was opened")

    def _hidden(self, error: Exception) -> str:
        return str(error).replace(self._url, hidden(self._url))

    def _cancel(self) -> None:
        """Close what has opened or will, if it was not attached."""
        if self._opening is not None:
            self._opening.abandon()
            self._opening = None

    def _attach(self) -> None:
        assert self._opening is not None
        self._store, self._opening = self._opening.take(), None
        self._tier.attach(self._store.worker)

    def _drain(self, *, force: bool) -> None:
        worker = self._tier.detach(force=force)
        if worker is not None:
            self._store = None
            self._go(Outcome.DRAINED)
            self._closing = self._stores.close(worker)
            self._look()

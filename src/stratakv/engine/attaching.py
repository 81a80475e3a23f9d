"""A store that a rank opens beside its steps, so that all ranks can begin to use theirs in one.

Owns what is being opened, and what a rank says of it. Whether it is used is agreed elsewhere
(``ranked``). Must not wait, nor know how a store is opened.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypeAlias

from stratakv.core.errors import ConfigError, StorageError
from stratakv.storage.io_worker import IoWorker
from stratakv.storage.opening import Opening
from stratakv.storage.urls import hidden

log = logging.getLogger(__name__)

CLOSE_S: Final = 10.0


class Openable(Protocol):
    """An open store, and perhaps more than an engine wants of it."""

    @property
    def worker(self) -> IoWorker: ...


Opener: TypeAlias = Callable[[str], Openable]
"""A URL to an open store; ConfigError where it is not allowed, StorageError where it cannot be
reached. It blocks."""


class Stage(Enum):
    OPENING = "opening"
    OPEN = "open"
    REFUSED = "refused"  # a ConfigError
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of its store. ``told``: why it did not open, without a password."""

    stage: Stage
    told: str = ""

    def pack(self) -> str:
        return f"{self.stage.value} {self.told}"

    @classmethod
    def unpack(cls, text: str) -> "Report":
        stage, _, told = text.partition(" ")
        return cls(Stage(stage), told)


def no_store(url: str) -> Openable:
    raise ConfigError(f"--storage {hidden(url)}: this engine has nothing that opens stores")


class Attaching:
    """At most one store at a time."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._opening: Opening[Openable] | None = None
        self._url = ""

    def prepare(self, url: str) -> None:
        """Begin to open a store; one that was not taken is closed."""
        self.call_off()
        self._url = url
        self._opening = Opening(lambda: self._opener(url), _close)

    def report(self) -> Report:
        """Where it stands."""
        assert self._opening is not None, "nothing is being opened"
        if not self._opening.done:
            return Report(Stage.OPENING)
        match self._opening.failure:
            case None:
                return Report(Stage.OPEN)
            case ConfigError() as error:
                return Report(Stage.REFUSED, self._hidden(error))
            case StorageError() as error:
                return Report(Stage.FAILED, self._hidden(error))
            case error:
                log.error("%s could not be opened", hidden(self._url), exc_info=error)
                return Report(Stage.FAILED, f"{type(error).__name__} while it was opened")

    def take(self) -> Openable:
        """What has opened; the caller closes it. AssertionError where nothing has."""
        assert self._opening is not None, "nothing was opened"
        opening, self._opening = self._opening, None
        return opening.take()

    def call_off(self) -> None:
        """Close what has opened or will, if it was not taken."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.abandon()

    def _hidden(self, error: Exception) -> str:
        return str(error).replace(self._url, hidden(self._url))


def _close(store: Openable) -> None:
    store.worker.close(CLOSE_S)

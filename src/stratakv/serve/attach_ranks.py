"""Opening a store on every rank of a server that runs: all of them have it open, or none keeps it.

Owns the wait for the slowest rank, its limit, and whose error a client gets. Blocks, on a thread
that may; the engine never waits. Must not know HTTP, nor what a store is.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol, TypeVar

from stratakv.core.clock import Clock
from stratakv.core.errors import ConfigError, StorageError
from stratakv.engine.attaching import Openable, Report, Stage
from stratakv.serve.admin import OpenStore
from stratakv.serve.driver import EngineDriver, Health
from stratakv.serve.errors import ApiError, unavailable

T = TypeVar("T")

OPEN_S: Final = 60.0
"""What every rank gets to open its store; what opens later is closed at once."""
FIRST_POLL_S: Final = 0.01
LAST_POLL_S: Final = 0.25
"""Between two questions, of which each is a step of all ranks."""


class RanksPort(Protocol):
    """What an engine of several ranks does to open a store; calls come from the driver's thread,
    and none waits for a store."""

    def prepare_storage(self, url: str) -> None:
        """Have every rank begin to open it."""
        ...

    def storage_reports(self) -> Sequence[Report]:
        """How far each is."""
        ...

    def take_storage(self) -> Openable:
        """What rank 0 has opened; where all have."""
        ...

    def call_off_storage(self) -> None:
        """Have every rank close what it has opened, or will."""
        ...


class RankedOpener:
    """An ``admin.Opener``. ``check``: a ConfigError for a URL that no rank need try."""

    def __init__(
        self,
        driver: EngineDriver,
        engine: RanksPort,
        clock: Clock,
        check: Callable[[str], None],
        open_s: float = OPEN_S,
    ) -> None:
        self._driver = driver
        self._engine = engine
        self._clock = clock
        self._check = check
        self._open_s = open_s

    def __call__(self, url: str) -> OpenStore:
        """What rank 0 has opened, once all ranks have; attach it, and the others attach theirs.

        The error of the first rank that could not: ConfigError or StorageError, also after
        ``open_s`` seconds; ApiError where the server ends. No rank keeps anything open then.
        """
        self._check(url)
        try:
            self._ask(lambda: self._engine.prepare_storage(url))
            self._wait()
            store = self._ask(self._engine.take_storage)
        except BaseException:
            with suppress(ApiError):  # an engine that has ended has closed it
                self._ask(self._engine.call_off_storage)
            raise
        assert isinstance(store, OpenStore), "rank 0 has opened something else"
        return store

    def _wait(self) -> None:
        deadline_s, pause_s = self._clock.now_s() + self._open_s, FIRST_POLL_S
        while True:
            reports = self._ask(self._engine.storage_reports)
            if all(report.stage is Stage.OPEN for report in reports):
                return
            _raise_first(reports)
            if self._driver.health is not Health.READY:
                raise unavailable(self._driver.health.value)
            if self._clock.now_s() >= deadline_s:
                raise StorageError(
                    f"after {self._open_s:g} s, {_late(reports)} not opened it; it is attached "
                    "nowhere"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)

    def _ask(self, work: Callable[[], T]) -> T:
        return self._driver.ask(work).result()


def _raise_first(reports: Sequence[Report]) -> None:
    """The error of the first rank that has one; rank 0's reads as if there were no others."""
    for rank, report in enumerate(reports):
        told = report.told if rank == 0 else f"rank {rank}: {report.told}"
        match report.stage:
            case Stage.REFUSED:
                raise ConfigError(told)
            case Stage.FAILED:
                raise StorageError(told)
            case Stage.OPENING | Stage.OPEN:
                pass


def _late(reports: Sequence[Report]) -> str:
    late = [str(rank) for rank, report in enumerate(reports) if report.stage is Stage.OPENING]
    return f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(late)} have"

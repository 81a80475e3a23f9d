"""What both halves of the suite for transfer engines stand on. Owns no test. Needs the ``testing``
extra."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import CacheSpec
from stratakv.testing.patience import wait_until
from stratakv.testing.transfer_ends import BeforeCopy, Ends, Hold, run_free
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.engine import Completion, TransferEngine

GLIMPSE_S: Final = 0.02
"""How long a test watches for what must not happen."""


def finish(engine: TransferEngine, direction: Direction, count: int) -> list[Completion]:
    """Wait for the oldest ``count`` plans and take them."""
    wait_until(lambda: engine.ready(direction) >= count, f"the end of {count} plans of {direction}")
    return engine.take(direction, count)


class Background:
    """Steps on a thread of their own, for whatever may have to wait."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = steps
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def done_within(self, patience_s: float) -> bool:
        """Whether the steps have ended; raises what they raised."""
        done = self._done.wait(patience_s)
        if self._error is not None:
            raise self._error
        return done

    def _run(self) -> None:
        try:
            for step in self._steps:
                step()
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            self._error = error
        self._done.set()


class TransferSuite(ABC):
    """``engine`` is what a subclass implements."""

    @abstractmethod
    def engine(
        self,
        spec: CacheSpec,
        pools: DevicePools,
        arenas: Sequence[HostArena],
        before_copy: BeforeCopy,
    ) -> TransferEngine:
        """A fresh engine over these two ends that calls ``before_copy`` as it says."""

    @contextmanager
    def running(
        self, ends: Ends, before_copy: BeforeCopy = run_free
    ) -> Generator[TransferEngine, None, None]:
        engine = self.engine(ends.spec, ends.pools, ends.arenas, before_copy)
        try:
            yield engine
        finally:
            if isinstance(before_copy, Hold):
                before_copy.allow(max(ends.layers(), default=0))
            engine.close()

"""Device work on a thread of its own, which takes as long as it likes: what copies come after, and
what waits for copies, in the conformance suite of transfer engines. Owns the thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final

from stratakv.testing.patience import PATIENCE_S

MOST_S: Final = 0.002


class ManualFence:
    """A ``Fence`` that somebody opens."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def open(self) -> None:
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(PATIENCE_S), "nobody opened the fence"

    def passed(self) -> bool:
        return self._event.is_set()


class ComputeQueue:
    """Runs what it is given, in order, each after a moment that ``random`` chooses."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], object]] = deque()
        self._closed = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], object]) -> None:
        with self._changed:
            self._queue.append(work)
            self._changed.notify_all()

    def fence(self) -> ManualFence:
        """All that was launched so far."""
        fence = ManualFence()
        self.launch(fence.open)
        return fence

    def close(self) -> None:
        """Finish what is queued; raises what the work raised."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the work does not end"
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        while (work := self._next()) is not None:
            time.sleep(self._random.random() * MOST_S)
            try:
                work()
            except BaseException as fault:  # noqa: BLE001 - handed to whoever closes
                self._fault = self._fault or fault

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return self._queue.popleft() if self._queue else None

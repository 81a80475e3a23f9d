"""A wait that ends early where something has come. Owns no time and knows nothing of what came."""

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

Wake: TypeAlias = Callable[[], None]
"""Called from any thread; returns at once."""


class Wakeup:
    """One thread waits. What came while it did not ends its next wait at once."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[None]()  # waits as an event does, with less Python

    def set(self) -> None:
        """From any thread, when what came can be seen."""
        if self._calls.empty():
            self._calls.put(None)

    def wait(self, wait_s: float) -> bool:
        """For so many seconds at most. Whether anything came."""
        with suppress(Empty):
            self._calls.get(timeout=wait_s)
            while not self._calls.empty():
                self._calls.get()
            return True
        return False

"""Time. Owns the only reading of a clock that decisions may see; must never sleep."""

import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

NowS: TypeAlias = Callable[[], float]
"""Seconds of some clock, for figures alone."""


def never() -> float:
    """``NowS`` where nobody asks when something was."""
    return 0.0


class Clock(Protocol):
    """Monotonic seconds."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that a test or a simulation moves."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        if by_s < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-by_s} s")
        self._now_s += by_s


class BroadcastClock:
    """The time that somebody else has read: the same for a whole step, on every rank."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def set(self, now_s: float) -> None:
        self._now_s = now_s


class WallClock:
    """The machine's date: for what outlives the process. May be set back."""

    def now_s(self) -> float:
        return time.time()

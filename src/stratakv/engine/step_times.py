"""Where the time of steps goes. Owns the sums; a part lasts until the next one begins.

Local figures, which no decision reads: ranks need not agree on them.
"""

import time
from collections.abc import Callable, Mapping
from enum import IntEnum


class StepPart(IntEnum):
    SCHEDULE = 0  # who computes what next, retractions, and the batch
    TREE = 1  # admission, pages for what is computed, and what enters the tree
    COPIES = 2  # submitted, ended ones taken, the same with storage, and ranks that agree
    FORWARD = 3  # the model, and what its layers wait for pages that are loaded
    SAMPLE = 4  # tokens chosen and answered


class StepTimes:
    """``now_s``: precise, as a part may take microseconds."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._sums_s = [0.0] * len(StepPart)
        self._part: StepPart | None = None
        self._since_s = 0.0

    def enter(self, part: StepPart) -> None:
        """What goes on from now on is of ``part``."""
        now_s = self._now_s()
        if self._part is not None:
            self._sums_s[self._part] += now_s - self._since_s
        self._part, self._since_s = part, now_s

    def pause(self) -> None:
        """What goes on from now on is no part of a step."""
        if self._part is not None:
            self._sums_s[self._part] += self._now_s() - self._since_s
            self._part = None

    def sums_s(self) -> Mapping[str, float]:
        return {part.name.lower(): self._sums_s[part] for part in StepPart}

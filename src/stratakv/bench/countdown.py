"""How far a long bench is, and how long it will take, on standard error.

Owns that line. Must not know what is counted.
"""

import sys
import time
from collections.abc import Callable
from typing import Final

ON_A_TERMINAL_S: Final = 0.5
IN_A_LOG_S: Final = 10.0
"""How often, at most, it is printed."""


BAR: Final = 20


class Countdown:
    """Of ``total`` units of work. ``what``: things that take a unit each, and are shown as such;
    without, there is but a bar. ``clock``: seconds."""

    def __init__(
        self, total: float, what: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._what, self._clock = total, what, clock
        self._terminal = sys.stderr.isatty()
        self._pause_s = ON_A_TERMINAL_S if self._terminal else IN_A_LOG_S
        self._begun_s = self._shown_s = clock()
        self._done, self._shown, self._now = 0.0, 0, ""

    def at(self, text: str) -> None:
        """What comes next is part of ``text``."""
        self._now = text

    def one_more(self, units: float = 1.0) -> None:
        self._done = min(self._total, self._done + units)
        now_s = self._clock()
        if now_s - self._shown_s < self._pause_s:
            return
        self._shown_s = now_s
        left_s = (now_s - self._begun_s) / self._done * (self._total - self._done)
        line = f"{self._now}: {self._part()}, about {left_s:.0f} s left"
        self.clear()
        self._shown = len(line)
        print(line, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def _part(self) -> str:
        if self._what:
            return f"{self._done:,.0f} of {self._total:,.0f} {self._what}"
        part = self._done / self._total
        return f"[{'#' * int(BAR * part):{BAR}s}] {part:.0%}"

    def clear(self) -> None:
        """Make room for a line of the report, where both are on one screen."""
        if self._terminal and self._shown:
            print(f"\r{' ' * self._shown}\r", end="", file=sys.stderr, flush=True)
            self._shown = 0

"""How long a test waits. Owns the one limit, and the wait for what must come about.

A limit guards against a hang; it proves nothing about speed. It holds on a machine that is ten
times slower and does other things too, so it is minutes long and costs nothing where nothing hangs.
"""

import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 300.0
"""How long a test waits for what must happen."""
_SHORTEST_S: Final = 0.0002
_LONGEST_S: Final = 0.02


def wait_until(condition: Callable[[], object], what: str = "what was waited for") -> None:
    """Return once ``condition`` holds; AssertionError that names ``what`` where it never does."""
    deadline_s, pause_s = time.monotonic() + PATIENCE_S, _SHORTEST_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come about within {PATIENCE_S:g} s"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)  # who waits long must not take time from who works

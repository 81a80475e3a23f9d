"""How far the weights of a model are: Hugging Face's bar on a terminal, else lines of the log.

Owns which of both it is. Must not load anything.
"""

import logging
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Final

from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from stratakv.core.logs import DETAILS
from stratakv.core.units import format_bytes

log = logging.getLogger(__name__)

PERIOD_S: Final = 10.0


@contextmanager
def load_progress(weights_bytes: int, period_s: float = PERIOD_S) -> Generator[None]:
    """While the block loads weights of that size. A bar that rewrites its line would fill a log
    with pieces of it, which are no objects either where others are."""
    shown = is_progress_bar_enabled()
    if not shown or sys.stderr.isatty():
        yield
        return
    disable_progress_bar()
    ended = threading.Event()
    lines = threading.Thread(
        target=_log_until, args=(ended, weights_bytes, period_s), name="stratakv-load-progress"
    )
    lines.start()
    try:
        yield
    finally:
        ended.set()
        lines.join()
        enable_progress_bar()


def _log_until(ended: threading.Event, weights_bytes: int, period_s: float) -> None:
    begun_s, before = monotonic(), _resident_bytes()
    while not ended.wait(period_s):
        found = min(weights_bytes, max(0, _resident_bytes() - before))
        passed_s = monotonic() - begun_s
        log.info(
            "loading: about %s of %s in memory after %.0f s",
            format_bytes(found), format_bytes(weights_bytes), passed_s,
            extra={DETAILS: {
                "loaded_bytes": found, "weights_bytes": weights_bytes, "seconds": passed_s,
            }},
        )  # fmt: skip


def _resident_bytes() -> int:
    """Pages of files that are mapped count as soon as they have been read."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

"""Keeps a log readable while somebody attacks: what is logged again and again is logged seldom.

Owns which loggers are kept short. Must not drop what was not logged lately.
"""

import logging
from typing import Final

from stratakv.core.clock import Clock, MonotonicClock

PERIOD_S: Final = 60.0
LOGGERS: Final = (
    "uvicorn.error", "asyncio", "stratakv.serve.bodies", "stratakv.serve.connection_limits",
    "stratakv.serve.generate", "stratakv.engine.loop", "stratakv.engine.steps",
    "stratakv.engine.endings", "stratakv.engine.sampling",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal",
)  # fmt: skip
"""Those whose lines a client can cause, or a collector that is away."""


class Seldom(logging.Filter):
    """Lets the same line pass once in ``PERIOD_S``, with how many were left out since."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._until_s: dict[tuple[str, str], float] = {}
        self._left_out: dict[tuple[str, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[0] if record.exc_info else None
        kind = (str(record.msg).partition("\n")[0], "" if error is None else error.__name__)
        now_s = self._clock.now_s()
        if now_s < self._until_s.get(kind, now_s):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._until_s[kind] = now_s + PERIOD_S
        if missed := self._left_out.pop(kind, 0):
            record.msg = f"{record.msg} (and {missed} times more since it was last logged)"
        return True


def quieten() -> None:
    """Shorten what clients can cause; for the whole process."""
    seldom = Seldom(MonotonicClock())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for old in [one for one in logger.filters if isinstance(one, Seldom)]:
            logger.removeFilter(old)
        logger.addFilter(seldom)

"""How a line of the log looks, and which request it is of.

Owns the two forms, text and JSON, and the name of the request that the running code serves. Must
not decide what is logged, nor know HTTP.
"""

import json
import logging
import time
from contextvars import ContextVar
from typing import Final

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")
REQUEST: Final[ContextVar[str]] = ContextVar("stratakv_request", default="")
"""Of what runs on an event loop for one request: its X-Request-Id."""
DETAILS: Final = "details"
"""The attribute of a record with fields of its own, which JSON has beside the message."""


class TextLines(logging.Formatter):
    """``2026-01-31 12:00:00,123 INFO stratakv.x: what happened [request]``"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        request = REQUEST.get()
        text = super().formatMessage(record)
        return f"{text} [{request}]" if request else text


class JsonLines(logging.Formatter):
    """An object a line: time in UTC, level, logger, message, and what else there is."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := REQUEST.get():
            found["request_id"] = request
        found |= vars(record).get(DETAILS, {})
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, default=str)


def set_up(level: str, form: str) -> None:
    """For the whole process, and again once settings are known. Nothing where a program around this
    one has handlers of its own."""
    root = logging.getLogger()
    ours = [one for one in root.handlers if isinstance(one.formatter, TextLines | JsonLines)]
    if root.handlers and not ours:
        return
    if not ours:
        ours = [logging.StreamHandler()]
        root.addHandler(ours[0])
    root.setLevel(level.upper())
    for handler in ours:
        handler.setFormatter(_formatter(form))


def _formatter(form: str) -> logging.Formatter:
    return JsonLines() if form == "json" else TextLines()

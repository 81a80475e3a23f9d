"""How a line of the log looks, and which request it is of.

Owns the two forms, text and JSON, the name of the request that the running code serves, and where
what a person reads at a start goes. Must not decide what is logged, nor know HTTP.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Final

log = logging.getLogger("stratakv")

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
    one has handlers of its own. In JSON, what Python warns of and dies of are lines of the log too:
    whoever collects them reads nothing else."""
    root = logging.getLogger()
    ours = _ours()
    if root.handlers and not ours:
        return
    if not ours:
        ours = [logging.StreamHandler()]
        root.addHandler(ours[0])
    root.setLevel(level.upper())
    for handler in ours:
        handler.setFormatter(_formatter(form))
    logging.captureWarnings(form == "json")
    if form == "json":
        sys.excepthook = _log_death
    elif sys.excepthook is _log_death:  # that of a program around this one stays
        sys.excepthook = sys.__excepthook__


def announce(text: str, about: str, details: Mapping[str, object]) -> None:
    """For who has started this: ``text`` on standard output, or where the log is JSON a line of it,
    which says what it is ``about`` and has ``details`` in place of columns."""
    if _in_json():
        log.info("%s", about, extra={DETAILS: details})
        return
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def last_words(text: str) -> None:
    """Why this process ends, on standard error."""
    if _in_json():
        log.error("%s", text)
    else:
        sys.stderr.write(f"stratakv: {text}\n")


def _in_json() -> bool:
    return any(isinstance(one.formatter, JsonLines) for one in _ours())


def _ours() -> list[logging.Handler]:
    handlers = logging.getLogger().handlers
    return [one for one in handlers if isinstance(one.formatter, TextLines | JsonLines)]


def _log_death(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    log.critical("the process ends", exc_info=(kind, error, trace))


def _formatter(form: str) -> logging.Formatter:
    return JsonLines() if form == "json" else TextLines()

"""Lines of the log: when, how bad, of which request; as text and as JSON."""

import json
import logging
import re
import subprocess
import sys

import pytest

from stratakv.core.logs import DETAILS, REQUEST, JsonLines, TextLines


def record(message="it took %d s", *args, **more):
    made = logging.LogRecord("stratakv.x", logging.WARNING, "x.py", 1, message, args or (2,), None)
    made.__dict__.update(more)
    return made


@pytest.fixture
def request_id():
    entered = REQUEST.set("r-1")
    yield "r-1"
    REQUEST.reset(entered)


def test_a_line_of_text_has_its_time_and_the_request(request_id):
    line = TextLines().format(record())
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING stratakv.x: it took 2 s \[r-1\]", line
    )


def test_a_line_outside_of_requests_names_none():
    assert TextLines().format(record()).endswith(": it took 2 s")
    assert "request_id" not in json.loads(JsonLines().format(record()))


def test_a_line_of_json_is_one_object_with_the_details_and_the_error(request_id):
    try:
        raise ValueError("line\nbreak")
    except ValueError:
        made = record(**{DETAILS: {"running": 3}})
        made.exc_info = sys.exc_info()
    line = JsonLines().format(made)
    assert "\n" not in line
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found.pop("exception").endswith("ValueError: line\nbreak")
    assert found == {
        "level": "warning", "logger": "stratakv.x", "message": "it took 2 s", "request_id": "r-1",
        "running": 3,
    }  # fmt: skip


SET_UP = """
import logging
from stratakv.core.logs import set_up
log = logging.getLogger("stratakv.x")
set_up("info", "text"); log.info("one"); log.debug("none")
set_up("debug", "json"); log.debug("two")
set_up("error", "text"); log.warning("none")
"""


def test_the_level_and_the_form_are_those_of_the_last_settings():
    done = subprocess.run(
        [sys.executable, "-c", SET_UP], capture_output=True, text=True, check=True
    )
    first, second = done.stderr.splitlines()
    assert first.endswith(" INFO stratakv.x: one")
    assert json.loads(second)["message"] == "two"

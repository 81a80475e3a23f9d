"""A server whose log is JSON: whoever collects its lines reads objects, and nothing else."""

import json
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from stratakv.testing.patience import PATIENCE_S
from tests.real_server import COMPLETIONS, SMALL_FLAGS, completion

SERVE = (sys.executable, "-m", "stratakv", "serve")
JSON = ("--log-format", "json")


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_all_that_a_server_says_is_an_object_a_line(directory, tmp_path, ranks):
    errors = tmp_path / "errors"
    command = [*SERVE, str(directory), "--port", "0", *SMALL_FLAGS, *JSON, "--tp", ranks]
    with errors.open("w+") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            url = _url(server, errors)
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
                body, headers = completion([5] * 40, 4), {"X-Request-Id": "mine"}
                assert http.post(COMPLETIONS, json=body, headers=headers).status_code == 200
        finally:
            server.send_signal(signal.SIGTERM)
            printed, _ = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == 0, errors.read_text()
    assert printed == ""
    lines = [json.loads(line) for line in errors.read_text().splitlines()]
    (memory,) = (line["memory"] for line in lines if "memory" in line)
    assert memory["device_bytes"] == sum(group["device_bytes"] for group in memory["groups"]) > 0
    (served,) = (line for line in lines if line.get("status") == 200)
    assert (served["logger"], served["request_id"]) == ("stratakv.access", "mine")
    for line in lines:
        assert line.keys() >= {"time", "level", "logger", "message"}


def _url(server, errors):
    """Where it listens, once a line says so."""
    while server.poll() is None:
        if found := re.search(r'"url": "([^"]+)"', errors.read_text()):
            return found[1]
    raise AssertionError(errors.read_text())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--max-model-len", "999999"), "--max-model-len"),
        (("--kv-events", "tcp://127.0.0.1:99999"), "--kv-events"),
    ],
)
def test_why_a_server_does_not_start_is_an_object_too(directory, flags, named):
    done = _ran([*SERVE, str(directory), *JSON, *flags])
    assert (done.returncode, done.stdout) == (2, "")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines[-1]["level"] == "error"
    assert named in lines[-1]["message"]


def test_so_is_what_python_warns_of_and_dies_of():
    code = (
        "import warnings; from stratakv.core.logs import set_up; set_up('info', 'json');"
        "warnings.warn('odd'); raise ValueError('line\\nbreak')"
    )
    done = _ran([sys.executable, "-W", "always", "-c", code])
    warned, died = (json.loads(line) for line in done.stderr.splitlines())
    assert warned["level"] == "warning"
    assert "odd" in warned["message"]
    assert died["level"] == "critical"
    assert died["exception"].endswith("ValueError: line\nbreak")
    assert done.returncode == 1


def test_a_text_log_leaves_a_program_s_own_hook_alone():
    code = (
        "import sys; from stratakv.core.logs import set_up; mine = sys.excepthook = lambda *_: 0;"
        "set_up('info', 'text'); assert sys.excepthook is mine;"
        "set_up('info', 'json'); set_up('info', 'text');"
        "assert sys.excepthook is sys.__excepthook__"
    )
    done = _ran([sys.executable, "-c", code])
    assert (done.returncode, done.stderr) == (0, "")


def _ran(command):
    environment = {name: value for name, value in os.environ.items() if "STRATAKV" not in name}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False
    )

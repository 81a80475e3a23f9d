"""A server whose log is JSON: whoever collects its lines reads objects, and nothing else."""

import json
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.rank_processes import forked
from tests.real_server import COMPLETIONS, SMALL_FLAGS, completion

JSON = ("--log-format", "json")


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_all_that_a_server_says_is_an_object_a_line(directory, tmp_path, ranks):
    log = tmp_path / "log"
    server = forked(["serve", directory, "--port", "0", *SMALL_FLAGS, *JSON, "--tp", ranks], log)
    try:
        url = _url(server, log)
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            body, headers = completion([5] * 40, 4), {"X-Request-Id": "mine"}
            assert http.post(COMPLETIONS, json=body, headers=headers).status_code == 200
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait()
    assert code == 0, log.read_text()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (memory,) = (line["memory"] for line in lines if "memory" in line)
    assert memory["device_bytes"] == sum(group["device_bytes"] for group in memory["groups"]) > 0
    (served,) = (line for line in lines if line.get("status") == 200)
    assert (served["logger"], served["request_id"]) == ("stratakv.access", "mine")
    for line in lines:
        assert line.keys() >= {"time", "level", "logger", "message"}


def _url(server, log):
    """Where it listens, once a line says so."""
    found = []

    def listens():
        assert server.poll() is None, log.read_text()
        found[:] = re.findall(r'"url": "([^"]+)"', log.read_text())
        return bool(found)

    wait_until(listens, "a server that listens")
    return found[0]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--max-model-len", "999999"), "--max-model-len"),
        (("--kv-events", "tcp://127.0.0.1:99999"), "--kv-events"),
    ],
)
def test_why_a_server_does_not_start_is_an_object_too(directory, tmp_path, flags, named):
    log = tmp_path / "log"
    assert forked(["serve", directory, *JSON, *flags], log).wait() == 2
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(line["level"] == "error" and named in line["message"] for line in lines), lines


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

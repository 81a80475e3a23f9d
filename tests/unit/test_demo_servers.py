"""Servers of the demo are stopped whatever happens; shell scripts stand in for ``stratakv``."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from demo import servers as demo_servers
from demo.servers import DemoError, Servers
from stratakv.testing.patience import PATIENCE_S

READY = "echo 'stratakv: listening on http://127.0.0.1:1234'"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Set what runs in place of ``stratakv``."""
    script = tmp_path / "stratakv"

    def write(body: str) -> None:
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)

    monkeypatch.setattr(demo_servers, "executable", lambda: script)
    return write


def test_a_server_that_listens_and_ends_cleanly(command, tmp_path):
    command(f"trap 'exit 0' TERM; echo \"$@\"; {READY}; while :; do sleep 0.05; done")
    with Servers(tmp_path) as servers:
        server = servers.start("with cache", Path("models/x"), "--port", "0")
        assert server.wait_ready() == "http://127.0.0.1:1234"
        assert server.text().startswith("serve models/x --port 0\n")
    assert servers.exit_codes == {"with cache": 0}


def test_a_server_that_ends_badly_is_noted(command, tmp_path):
    command(f"trap 'exit 3' TERM; {READY}; while :; do sleep 0.05; done")
    with Servers(tmp_path) as servers:
        servers.start("a", tmp_path).wait_ready()
    assert servers.exit_codes == {"a": 3}


def test_a_server_that_is_ended_before_the_others(command, tmp_path):
    command(f"trap 'exit $3' TERM; {READY}; while :; do sleep 0.05; done")
    with Servers(tmp_path) as servers:
        first, other = (servers.start(name, tmp_path, name) for name in ("3", "4"))
        for server in (first, other):
            server.wait_ready()
        servers.end(first)
        assert first.process.poll() == 3
        assert other.process.poll() is None
    assert servers.exit_codes == {"3": 3, "4": 4}


def test_a_server_that_dies_at_its_start(command, tmp_path):
    command("echo no room >&2; exit 2")
    with Servers(tmp_path) as servers:
        server = servers.start("a", tmp_path)
        with pytest.raises(DemoError, match="ended with exit code 2 at its start"):
            server.wait_ready()
        assert "no room" in server.text()
    assert servers.exit_codes == {"a": 2}


def test_a_server_that_never_listens(command, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_servers, "START_S", 0.2)
    command("trap 'exit 0' TERM; while :; do sleep 0.05; done")
    with (
        Servers(tmp_path) as servers,
        pytest.raises(DemoError, match="did not listen"),
    ):
        servers.start("a", tmp_path).wait_ready()


def test_a_server_that_does_not_end_is_killed(command, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_servers, "STOP_S", 0.2)
    command(f"trap '' TERM; {READY}; while :; do sleep 0.05; done")
    with Servers(tmp_path) as servers:
        server = servers.start("a", tmp_path)
        server.wait_ready()
    assert servers.exit_codes == {"a": -signal.SIGKILL}
    assert server.process.poll() is not None


def test_all_servers_are_stopped_when_the_demo_fails(command, tmp_path):
    command(f"trap 'exit 0' TERM; {READY}; while :; do sleep 0.05; done")
    servers = Servers(tmp_path)

    def fail() -> None:
        with servers:
            for name in ("a", "b"):
                servers.start(name, tmp_path).wait_ready()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert servers.exit_codes == {"a": 0, "b": 0}


def test_an_interruption_during_a_start_comes_after_it(command, tmp_path, monkeypatch, request):
    """Else a server would run that nobody knows of."""
    command(f"trap 'exit 0' TERM; {READY}; while :; do sleep 0.05; done")
    popen = subprocess.Popen

    def interrupted(*arguments, **more):
        process = popen(*arguments, **more)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    servers = Servers(tmp_path)
    with pytest.raises(KeyboardInterrupt), servers:
        servers.start("a", tmp_path)
    (server,) = servers.started
    assert server.process.poll() is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_demo_stops_its_servers(tmp_path, number):
    """The whole program, with a server that never listens."""
    environment = tmp_path / "bin"
    environment.mkdir()
    (environment / "stratakv").write_text(
        f"#!/bin/sh\ntrap 'echo > {tmp_path}/ended-$$; exit 0' TERM\n"
        f"echo > {tmp_path}/started-$$; while :; do sleep 0.05; done\n"
    )
    (environment / "stratakv").chmod(0o755)
    (environment / "python").symlink_to(sys.executable)
    demo = subprocess.Popen(
        [environment / "python", "-m", "demo.run"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        while len(list(tmp_path.glob("started-*"))) < 2:
            assert demo.poll() is None
        demo.send_signal(number)
        out, _ = demo.communicate(timeout=PATIENCE_S)
    finally:
        demo.kill()
    assert demo.returncode == 130
    assert "the servers were stopped" in out
    assert len(list(tmp_path.glob("ended-*"))) == 2

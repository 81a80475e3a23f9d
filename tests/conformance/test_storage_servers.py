"""The servers that the other tests here start: none is left behind, and none is a must."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stratakv.testing.patience import wait_until
from tests.fixtures import servers
from tests.fixtures.servers import (
    REDIS_SERVERS,
    answers,
    mooncake_master,
    redis_programs,
    redis_server,
    s3_server,
)

START = """
import signal
from tests.fixtures.servers import redis_server
with redis_server() as server:
    print(server.port, flush=True)
    signal.pause()
"""


@pytest.fixture
def nothing_can_be_installed(monkeypatch):
    servers.apt_install.cache_clear()
    monkeypatch.setattr(
        "shutil.which", lambda name: None if name in REDIS_SERVERS else f"/bin/{name}"
    )
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    yield
    servers.apt_install.cache_clear()


def test_a_run_that_is_killed_takes_its_servers_with_it():
    redis_programs()
    words = [sys.executable, "-c", START]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as run:
        assert run.stdout is not None
        port = int(run.stdout.readline())
        assert answers(port)
        run.send_signal(signal.SIGKILL)
    wait_until(lambda: not answers(port), "the end of the server after who started it")


@pytest.mark.usefixtures("nothing_can_be_installed")
def test_without_root_a_missing_server_is_a_skip_that_says_what_mends_it():
    with pytest.raises(pytest.skip.Exception, match="apt-get install redis-server"):
        redis_server().__enter__()


@pytest.mark.usefixtures("nothing_can_be_installed")
def test_an_install_that_fails_is_a_skip_and_is_tried_once(monkeypatch):
    asked = []
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(servers, "_apt", lambda *words: asked.append(words) or 100)
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match="apt-get install redis-server"):
            redis_server().__enter__()
    assert [words[0] for words in asked] == ["install", "update"]


@pytest.mark.parametrize(("start", "package"), [(s3_server, "moto"), (mooncake_master, "mooncake")])
def test_without_its_python_package_a_server_is_a_skip(monkeypatch, start, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(servers, "is_library", lambda name: True)
    with pytest.raises(pytest.skip.Exception, match=package):
        start().__enter__()


def test_a_missing_library_of_the_wheel_is_a_skip(monkeypatch):
    monkeypatch.setattr(servers, "is_library", lambda name: name != "libnuma.so.1")
    monkeypatch.setattr(servers, "apt_install", lambda package: f"apt-get install {package}")
    with pytest.raises(pytest.skip.Exception, match="apt-get install libnuma1"):
        mooncake_master().__enter__()

"""Connections that ask for nothing, for too little, too slowly or for two things at once: they end,
and whoever else is connected does not notice.
"""

import json
import resource
import signal
import socket
import sys
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest

from stratakv.serve.connection_limits import SPARE, ConnectionLimits
from stratakv.serve.tokenizer import Tokenizer
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.serving import (
    FOX,
    EchoEngine,
    error_of,
    make_service,
    process,
    running,
    size_of,
    train_tokenizer,
)

MOST = 4
SHORT = 0.2
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
HALF = b" HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer(directory)


@contextmanager
def serving(tokenizer, **limits):
    engine = EchoEngine()
    with running(
        make_service(tokenizer, engine), engine, limits=ConnectionLimits(**limits)
    ) as live:
        yield live


def connect(url: str, data: bytes = b"") -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    connection.sendall(data)
    return connection


def asking(prompt: object, **more: object) -> bytes:
    data = json.dumps({"prompt": prompt, "max_tokens": 2, "temperature": 0} | more).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def answer_to(url: str, data: bytes = b"") -> bytes:
    return rest(connect(url, data))


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    with connection, suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def first(connection: socket.socket) -> int:
    """The status that comes; its whole answer is read."""
    found = HTTPResponse(connection)
    found.begin()
    found.read()
    return found.status


# -- framing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", ["chunked", "Chunked"])
def test_a_request_with_two_lengths_is_refused_and_its_rest_is_no_request(tokenizer, chunked):
    """What a proxy in front may take for one body, we would take for a body and a request."""
    smuggled = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {5 + len(smuggled)}\r\n"
    head += f"Transfer-Encoding: {chunked}\r\n\r\n"
    with serving(tokenizer) as live, connect(live.url, HEALTH) as other:
        assert first(other) == 200
        answer = answer_to(live.url, head.encode() + b"0\r\n\r\n" + smuggled)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert body["error"]["code"] == "invalid_http"
        other.sendall(HEALTH)
        assert first(other) == 200


def test_a_broken_chunk_ends_its_connection_and_no_other(tokenizer):
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(tokenizer) as live, connect(live.url, HEALTH) as other:
        assert first(other) == 200
        answer = answer_to(live.url, head.encode() + b"zz\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        other.sendall(HEALTH)
        assert first(other) == 200


# -- how many --------------------------------------------------------------------------------------


def test_idle_connections_make_room_for_new_ones_the_longest_idle_first(tokenizer):
    with serving(tokenizer, most=MOST) as live, ExitStack() as all_of_them:
        idle = []
        for data in (b"", b"POST /v1/comp", HEALTH, HEALTH):
            idle.append(all_of_them.enter_context(connect(live.url, data)))
            wait_until(lambda: len(live.server.server_state.connections) == len(idle))
        assert [first(idle[2]), first(idle[3])] == [200, 200]
        for gone in idle:
            new = all_of_them.enter_context(connect(live.url, asking(FOX)))
            assert first(new) == 200
            assert rest(gone) == b""


def test_who_comes_when_all_are_being_answered_gets_an_error_and_probes_are_answered(tokenizer):
    with serving(tokenizer, most=MOST) as live:
        live.engine.gate.clear()
        running_ones = [connect(live.url, asking(f"{FOX} {i}")) for i in range(MOST)]
        wait_until(lambda: live.service.driver.open_requests == MOST)
        refused = httpx.post(live.url + COMPLETIONS, json={"prompt": FOX}, timeout=PATIENCE_S)
        assert error_of(refused, 503)["code"] == "overloaded"
        assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
        assert httpx.get(live.url + "/health", timeout=PATIENCE_S).status_code == 200
        live.engine.gate.set()
        assert [first(one) for one in running_ones] == [200] * MOST
        # They are idle now, and make room.
        again = httpx.post(live.url + COMPLETIONS, json={"prompt": FOX}, timeout=PATIENCE_S)
        assert again.status_code == 200
        for one in running_ones:
            one.close()


def test_a_server_is_never_full_for_a_probe(tokenizer):
    """However many more come and stay, idle or asking."""
    with serving(tokenizer, most=MOST) as live, ExitStack() as all_of_them:
        live.engine.gate.clear()
        for i in range(MOST + SPARE + 40):
            data = asking(f"{FOX} {i}") if i < MOST or i % 2 else b""
            all_of_them.enter_context(connect(live.url, data))
        with connect(live.url, HEALTH) as probe:
            assert first(probe) == 200
        assert len(live.server.server_state.connections) <= MOST + SPARE
        live.engine.gate.set()


# -- how long --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"POST /v1/comp", b"HTTP/1.1 408 "),
        (b"POST /v1/completions" + HALF, b"HTTP/1.1 408 "),
        (b"POST /nothing" + HALF, b"HTTP/1.1 404 "),
    ],
)
def test_a_request_that_does_not_come_to_its_end_is_not_waited_for(tokenizer, sent, status):
    with serving(tokenizer, request_s=SHORT) as live:
        answer = answer_to(live.url, sent)
        assert answer[: len(status)] == status
        assert answer.count(b"HTTP/1.1") == bool(status)
        if status.startswith(b"HTTP/1.1 408"):
            assert (
                json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
            )
        wait_until(lambda: not live.server.server_state.connections)
        wait_until(lambda: not live.server.server_state.tasks)


def test_an_answer_is_waited_for_however_long_it_takes(tokenizer):
    """Many times what a request may take; the slow ones that have gone meanwhile show it."""
    with serving(tokenizer, request_s=SHORT, keep_alive_s=SHORT) as live:
        live.engine.gate.clear()
        slow = received(live)
        for _ in range(3):
            assert answer_to(live.url) == b""
        live.engine.gate.set()
        assert first(slow) == 200
        rest(slow)  # idle now, and closed for it


def received(live) -> socket.socket:
    """A connection whose request is running; a busy machine may not get it through in time."""
    while True:
        found = connect(live.url, asking(FOX))
        wait_until(lambda one=found: live.service.driver.open_requests or _closed(one))
        if live.service.driver.open_requests:
            return found
        found.close()


def _closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(PATIENCE_S)


def test_idle_connections_end_after_their_time(tokenizer):
    with serving(tokenizer, keep_alive_s=SHORT) as live, connect(live.url, HEALTH) as idle:
        assert rest(idle).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: not live.server.server_state.connections)


def test_a_connection_serves_one_request_after_the_other_and_pipelined_ones(tokenizer):
    """Its clock starts anew with each."""
    with serving(tokenizer) as live, connect(live.url) as one:
        for _ in range(3):
            one.sendall(asking(FOX))
            assert first(one) == 200
        one.sendall(HEALTH * 3 + HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert rest(one).count(b"HTTP/1.1 200") == 4


# -- the process -----------------------------------------------------------------------------------


def crowd_in(directory: Path, log: Path, *, files: int, clients: int) -> None:
    """More open requests than a process may open files, three times: it answers probes, says so
    once, is as before when they have gone, and no larger. The soft limit is raised to the hard
    one."""
    sizes = []
    with process(directory, log, soft=300, hard=files) as (server, url):
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (files, files)
        for _ in range(3):
            come_and_go(url, clients)
            sizes.append(size_of(server.pid))
        _, second, third = sizes
        assert third.resident_bytes <= 1.05 * second.resident_bytes, sizes
        assert third.threads <= second.threads, sizes
        wait_until(lambda: size_of(server.pid).handles <= second.handles)
        server.send_signal(signal.SIGTERM)
    logged = log.read_text()
    assert "Traceback" not in logged
    assert len(logged) < 4000, logged[:4000]


def come_and_go(url: str, clients: int) -> None:
    with ExitStack() as all_of_them:
        for i in range(clients):
            with suppress(ConnectionError):
                all_of_them.enter_context(connect(url, asking(f"{FOX} {i}", max_tokens=1)))
            if i % 100 == 99:
                assert httpx.get(url + "/health", timeout=PATIENCE_S).status_code == 200
        asked = httpx.post(url + COMPLETIONS, json={"prompt": FOX}, timeout=PATIENCE_S)
        assert error_of(asked, 503)["code"] == "overloaded"
        assert httpx.get(url + "/health", timeout=PATIENCE_S).status_code == 200

    def open_requests() -> int:
        return httpx.get(url + "/server_info", timeout=PATIENCE_S).json()["open_requests"]

    wait_until(lambda: open_requests() == 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_more_clients_than_open_files(directory, tmp_path):
    crowd_in(directory, tmp_path / "log", files=450, clients=500)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_1300_clients_under_a_limit_of_1024_files(directory, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("the clients themselves need 1,300 open files: ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    crowd_in(directory, tmp_path / "log", files=1024, clients=1300)

"""Bad input, overload, clients that leave, the end of a server: what must not hurt anyone else."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from stratakv.core.errors import ConfigError
from stratakv.serve.server import bound_socket
from stratakv.serve.tokenizer import Tokenizer
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.serving import (
    FOX,
    MAX_MODEL_LEN,
    EchoEngine,
    error_of,
    make_service,
    running,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def shared(tokenizer):
    engine = EchoEngine()
    with running(make_service(tokenizer, engine), engine) as server:
        yield server


@pytest.fixture
def live(shared):
    """The shared server, idle, its engine as new."""
    yield shared
    shared.engine.gate.set()
    wait_until(lambda: shared.service.driver.open_requests == 0 and not shared.engine.requests)
    shared.engine.forget()


@pytest.fixture
def http(live):
    with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as found:
        yield found


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"", None, "invalid_json"),
        (b'{"prompt": "a"', None, "invalid_json"),
        (b'{"prompt": "\xff"}', None, "invalid_json"),
        (b'{"prompt": "a", "temperature": NaN}', None, "invalid_json"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature", "invalid_value"),
        (b"[" * 60_000, None, "too_deep"),
        (b"[]", None, None),
        (b"{}", "prompt", "missing_required_parameter"),
        (b'{"prompt": ""}', "prompt", "invalid_value"),
        (b'{"prompt": []}', "prompt", "invalid_value"),
        (b'{"prompt": {"a": 1}}', "prompt", "invalid_type"),
        (b'{"prompt": [1, 400]}', "prompt", "invalid_value"),
        (b'{"prompt": "\\ud800"}', "prompt", "invalid_value"),
        (b'{"prompt": "a", "n": 100000}', "n", "invalid_value"),
        (b'{"prompt": "a", "n": 100}', "n", "invalid_value"),
        (b'{"prompt": "a", "suffix": "b"}', "suffix", "unsupported_parameter"),
        (b'{"prompt": "a", "max_tokens": 600}', "max_tokens", "context_length_exceeded"),
    ],
)
def test_malformed_requests(http, live, body, param, code):
    error = error_of(http.post("/v1/completions", content=body), 400)
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert live.engine.submitted == []


def test_prompts_that_are_too_long(http):
    body = {"prompt": [1] * MAX_MODEL_LEN}
    error = error_of(http.post("/v1/completions", json=body), 400)
    assert error["code"] == "context_length_exceeded"
    # Shorter than the model allows, larger than the engine's pools.
    for stream in (False, True):
        body = {"prompt": [1] * 450, "stream": stream}
        error = error_of(http.post("/v1/completions", json=body), 400)
        assert error["code"] == "request_refused"
    body = {"messages": [{"role": "user", "content": "word " * 2000}]}
    error = error_of(http.post("/v1/chat/completions", json=body), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_a_body_that_is_too_large(http):
    error = error_of(http.post("/v1/completions", content=b"x" * ((1 << 16) + 1)), 413)
    assert error["code"] == "body_too_large"
    assert http.get("/health").status_code == 200


def test_a_body_that_is_announced_as_far_too_large_is_refused_before_it_comes(http):
    url = http.base_url
    with socket.create_connection((url.host, url.port), PATIENCE_S) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n"
        client.sendall(head)
        assert client.recv(1 << 10).startswith(b"HTTP/1.1 413 ")


def test_unknown_paths_methods_and_models(http):
    assert error_of(http.get("/v1/nothing"), 404)["code"] == "not_found"
    wrong = http.get("/v1/completions")
    assert error_of(wrong, 405)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"
    assert error_of(http.get("/v1/models/gpt"), 404)["code"] == "model_not_found"
    wrong = http.post("/v1/completions", json={"model": "gpt", "prompt": "x"})
    assert error_of(wrong, 404)["param"] == "model"


def test_request_ids_go_out_as_they_came_in(http):
    assert http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = [http.get("/nothing").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    wild = http.get("/health", headers={"X-Request-Id": "x" * 200}).headers["x-request-id"]
    assert len(wild) == 32


def test_an_api_key_guards_all_but_probes(tokenizer):
    engine = EchoEngine()
    service = make_service(tokenizer, engine, api_key="secret")
    with running(service, engine) as live, httpx.Client(base_url=live.url) as http:
        assert error_of(http.get("/v1/models"), 401)["code"] == "invalid_api_key"
        assert error_of(http.post("/flush_cache"), 401)
        for key, status in (("sécret", 401), ("secre", 401), ("secret", 200)):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert http.get("/v1/models", headers=headers).status_code == status
        for probe in ("/health", "/ping", "/metrics", "/version"):
            assert http.get(probe).status_code == 200


# -- load, clients that leave, the end -------------------------------------------------------------


def test_200_tiny_requests_at_once(live):
    def one(i):
        body = {"prompt": f"request {i} of many", "max_tokens": 1 + i % 5, "temperature": 0}
        if i % 3 == 0:
            body["stream"] = True
        return http.post("/v1/completions", json=body).status_code

    limits = httpx.Limits(max_connections=32)
    client = httpx.Client(base_url=live.url, timeout=PATIENCE_S, limits=limits)
    with client as http, ThreadPoolExecutor(32) as pool:
        assert set(pool.map(one, range(200))) == {200}
    assert live.service.driver.open_requests == 0
    assert live.engine.requests == {}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_requests(live, stream):
    live.engine.gate.clear()
    # Slow enough that the client leaves in the middle, endless enough that only an abort ends it.
    body = {"prompt": FOX, "max_tokens": 400, "n": 2, "stream": stream, "temperature": 0}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(live.url.removeprefix("http://").split(":")) as client:
        client.sendall(head.encode() + data)
        wait_until(lambda: len(live.engine.requests) == 2)
        live.engine.batch = 0
        live.engine.gate.set()
        if stream:
            assert b"200 OK" in client.recv(100)
    wait_until(lambda: live.service.driver.open_requests == 0)
    wait_until(lambda: len(live.engine.aborted) == 2)
    assert live.engine.requests == {}


def test_too_many_waiting_requests_are_sent_away(tokenizer):
    engine = EchoEngine()
    service = make_service(tokenizer, engine, max_waiting=2)
    with (
        running(service, engine) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
    ):
        engine.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(http.post, "/v1/completions", json={"prompt": FOX, "n": 2})
            wait_until(lambda: service.driver.open_requests == 1)
            refused = http.post("/v1/completions", json={"prompt": FOX})
            assert error_of(refused, 503)["type"] == "overloaded"
            assert refused.headers["retry-after"] == "1"
            engine.gate.set()
            assert first.result(PATIENCE_S).status_code == 200
        assert http.post("/v1/completions", json={"prompt": FOX}).status_code == 200


def test_a_signal_drains(tokenizer):
    engine = EchoEngine()
    service = make_service(tokenizer, engine)
    with (
        running(service, engine) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
    ):
        engine.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            running_one = pool.submit(http.post, "/v1/completions", json={"prompt": FOX})
            wait_until(lambda: engine.requests)
            live.server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: http.get("/health").status_code == 503)
            error = error_of(http.post("/v1/completions", json={"prompt": FOX}), 503)
            assert error["code"] == "draining"
            engine.gate.set()
            answer = running_one.result(PATIENCE_S)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 16
        live.thread.join(PATIENCE_S)
        assert not live.thread.is_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_what_outlives_the_drain_is_aborted_and_reported(tokenizer, stream):
    engine = EchoEngine()
    service = make_service(tokenizer, engine)
    serving = running(service, engine, drain_s=0.0)
    with serving as live, httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http:
        body = {"prompt": FOX, "max_tokens": 400, "stream": stream}
        engine.batch = 0
        with ThreadPoolExecutor(1) as pool:
            endless = pool.submit(http.post, "/v1/completions", json=body)
            wait_until(lambda: engine.requests)
            live.server.handle_exit(signal.SIGTERM, None)
            answer = endless.result(PATIENCE_S)
        if stream:
            event = json.loads(answer.text.splitlines()[0].removeprefix("data: "))
            assert event["error"]["code"] == "draining"
        else:
            assert error_of(answer, 503)["code"] == "draining"
        live.thread.join(PATIENCE_S)
        assert engine.requests == {}


@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_death_is_reported_and_shown(tokenizer, stream):
    engine = EchoEngine(failure=ValueError("seeded"))
    service = make_service(tokenizer, engine)
    with (
        running(service, engine) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
    ):
        engine.gate.clear()
        body = {"prompt": FOX, "stream": stream}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(http.post, "/v1/completions", json=body)
            wait_until(lambda: engine.requests)
            if stream:
                wait_until(lambda: service.driver.open_requests == 1)
            engine.gate.set()
            answer = waiting.result(PATIENCE_S)
        if stream and answer.status_code == 200:
            event = json.loads(answer.text.splitlines()[0].removeprefix("data: "))
            assert event["error"]["code"] == "engine_failed"
        else:
            assert error_of(answer, 500)["code"] == "engine_failed"
        assert "seeded" not in answer.text
        assert error_of(http.get("/health"), 503)["code"] == "failed"
        assert error_of(http.post("/v1/completions", json=body), 503)
        live.thread.join(PATIENCE_S)
        assert not live.thread.is_alive()


def test_an_address_in_use_is_the_operators_fault():
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            bound_socket("127.0.0.1", taken.getsockname()[1])


def spawn(directory, argument):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.serving", str(directory), argument],
        cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def url_of(process):
    line = process.stdout.readline()
    url = re.fullmatch(r"stratakv: listening on (http://127\.0\.0\.1:[1-9]\d*)\n", line)
    assert url is not None, process.communicate()
    return url[1]


def test_a_process_exits_0_after_sigterm_and_1_after_the_engines_death(directory):
    with spawn(directory, "serve") as healthy, spawn(directory, "fail") as failing:
        body = {"prompt": FOX}
        url = url_of(healthy)
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
        healthy.send_signal(signal.SIGTERM)
        url = url_of(failing)
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 500
        errors = [process.communicate(timeout=PATIENCE_S)[1] for process in (healthy, failing)]
    assert (healthy.returncode, failing.returncode) == (0, 1), errors
    assert ["seeded failure" in stderr for stderr in errors] == [False, True]

"""A real engine behind a real server, small pools, and clients that do their worst.

The model has random weights whose greedy output depends on every page, so that a page that a bad
client's request left behind shows in everybody else's answers.
"""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
import torch

from stratakv.engine.loop import Engine
from stratakv.engine.stats import EngineStats
from stratakv.serve.server import bound_socket
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.real_server import (
    CHAT,
    COMPLETIONS,
    SMALL_FLAGS,
    SMALL_POOLS,
    RealServer,
    completion,
    real_server,
    tokens,
)
from tests.scraped import scraped
from tests.serving import error_of

PAGE = 16
MAX_MODEL_LEN = 512
"""What the device's pages hold; the model itself has 4,096 positions."""


def settled(live: RealServer) -> None:
    """Every client is gone, and every page of every pool is free or holds an idle prefix."""
    live.settled()
    wait_until(lambda: accounted(live))  # the last backups hold their pages until they have ended


def accounted(live: RealServer) -> bool:
    return all(pool.free + pool.evictable == pool.total for pool in live.stats().pages)


def verify_before_stats(engine: Engine) -> None:
    """Let every report begin with ``check()``, on the engine's own thread, also under load."""
    plain = engine.stats

    def stats() -> EngineStats:
        engine.check()
        return plain()

    engine.stats = stats  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def shared(directory):
    torch.set_num_threads(1)
    with real_server(directory, SMALL_POOLS) as live:
        verify_before_stats(live.parts.engine)
        yield live


@pytest.fixture
def live(shared):
    yield shared
    settled(shared)


@pytest.fixture
def http(live):
    with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as found:
        yield found


def ask(http: httpx.Client, prompt: list[int] | str, count: int) -> str:
    answer = http.post(COMPLETIONS, json=completion(prompt, count))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def post(port: int, body: dict[str, object]) -> socket.socket:
    """A connection that has sent a request and read nothing."""
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    connection.sendall(head.encode() + data)
    return connection


def kill(connection: socket.socket) -> None:
    """Close with a reset, as a killed process's kernel may."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def killed_client(port: int, seed: int, *, stream: bool, patience: int) -> None:
    """Ask for a long answer and leave: at once, or after ``patience`` bytes of it."""
    connection = post(port, completion(tokens(200, seed), 300, stream=stream))
    read = 0
    while read < patience:
        piece = connection.recv(4096)
        assert piece, "the server hung up"
        read += len(piece)
    if seed % 2:
        kill(connection)
    else:
        connection.close()


def tries(http: httpx.Client, cases: list[tuple[str, bytes, str]]) -> None:
    for path, body, code in cases:
        assert error_of(http.post(path, content=body), 400)["code"] == code, body[:80]


def body_of(prompt: object, **more: object) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 4} | more).encode()


BAD_REQUESTS = [
    (COMPLETIONS, b'{"prompt": "a", ', "invalid_json"),
    (COMPLETIONS, b"\xff\xfe", "invalid_json"),
    (COMPLETIONS, b"", "invalid_json"),
    (COMPLETIONS, body_of(""), "invalid_value"),
    (COMPLETIONS, body_of([]), "invalid_value"),
    (COMPLETIONS, body_of([[]]), "invalid_value"),
    (COMPLETIONS, body_of(7), "invalid_type"),
    (COMPLETIONS, body_of([1, "a"]), "invalid_type"),
    (COMPLETIONS, body_of([1, -1]), "invalid_value"),
    (COMPLETIONS, body_of([1, 1 << 40]), "invalid_value"),
    (COMPLETIONS, body_of("a", max_tokens="many"), "invalid_type"),
    (COMPLETIONS, body_of("a", max_tokens=0), "invalid_value"),
    (COMPLETIONS, body_of("a", n=-1), "invalid_value"),
    (COMPLETIONS, body_of("a", temperature=[]), "invalid_type"),
    (COMPLETIONS, body_of(tokens(MAX_MODEL_LEN, 1)), "context_length_exceeded"),
    (COMPLETIONS, body_of(tokens(9_000, 1)), "context_length_exceeded"),
    (COMPLETIONS, body_of("a", max_tokens=MAX_MODEL_LEN), "context_length_exceeded"),
    (CHAT, b'{"messages": []}', "invalid_value"),
    (CHAT, b'{"messages": [{"role": "user", "content": 7}]}', "invalid_type"),
]


def test_the_pools_are_small_enough_to_matter(live):
    """The other tests mean what they say."""
    pools = {(pool.group, pool.tier): pool.total for pool in live.stats().pages}
    assert pools["anchor", "device"] * PAGE == MAX_MODEL_LEN


@pytest.mark.parametrize("stream", [True, False])
def test_clients_killed_before_the_answer(live, http, stream):
    before = ask(http, tokens(200, 9), 40)
    for seed in range(12):
        killed_client(live.port, seed, stream=stream, patience=0)
    settled(live)
    assert ask(http, tokens(200, 9), 40) == before


def test_clients_killed_in_mid_stream(live, http):
    before = ask(http, tokens(200, 9), 40)
    with ThreadPoolExecutor(8) as pool:
        for future in [
            pool.submit(killed_client, live.port, seed, stream=True, patience=1 + 300 * seed)
            for seed in range(16)
        ]:
            future.result()
    settled(live)
    assert ask(http, tokens(200, 9), 40) == before
    assert scraped(http.get("/metrics").text)["stratakv_requests_aborted_total",] >= 8


def test_half_a_request_and_then_nothing(live, http):
    connections = []
    for head in (
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{",
    ):
        connection = socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE_S)
        connection.sendall(head)
        connections.append(connection)
    assert ask(http, "hello", 2)
    for connection in connections:
        kill(connection)
    assert ask(http, "hello", 2)


def test_requests_that_cannot_be_served_are_refused(http):
    tries(http, BAD_REQUESTS)


def test_two_thousand_tiny_requests(live):
    def some(worker: int) -> None:
        connection = HTTPConnection("127.0.0.1", live.port, timeout=PATIENCE_S)
        for i in range(worker, 2000, 16):
            body = completion([i % 400, i // 400, 5], 1 + i % 2)
            connection.request("POST", COMPLETIONS, json.dumps(body))
            answer = connection.getresponse()
            whole = json.load(answer)
            assert answer.status == 200, whole
            usage = whole["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 1 + i % 2)
        connection.close()

    steps = live.stats().steps
    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(some, worker) for worker in range(16)]:
            future.result()
    settled(live)
    # Batched, not one after the other: 3,000 tokens in far fewer steps.
    assert live.stats().steps - steps < 2000


def test_everything_at_once(live, http):
    """Good answers stay the same among killed clients, refused requests and full pools."""
    prompts = [tokens(60 + 37 * i, 100 + i % 3) for i in range(12)]
    alone = [ask(http, prompt, 24) for prompt in prompts]
    evicted = live.stats().counters["evicted_device_pages"]

    def good(i: int) -> None:
        with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client:
            assert ask(client, prompts[i % 12], 24) == alone[i % 12]

    def bad() -> None:
        with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client:
            tries(client, BAD_REQUESTS)

    with ThreadPoolExecutor(12) as pool:
        futures = [pool.submit(good, i) for i in range(24)]
        futures += [
            pool.submit(killed_client, live.port, seed, stream=True, patience=90 * seed)
            for seed in range(12)
        ]
        futures.append(pool.submit(bad))
        for future in futures:
            future.result()
    settled(live)
    assert live.stats().counters["evicted_device_pages"] > evicted
    assert live.stats().counters["load_pages"] > 0


def test_a_flush_gives_every_page_back(live, http):
    ask(http, tokens(100, 3), 4)
    settled(live)
    assert http.post("/flush_cache").json() == {"flushed": True}
    assert all(pool.free == pool.total for pool in live.stats().pages)


# -- the process -----------------------------------------------------------------------------------


@contextmanager
def process(directory: Path, log: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """``stratakv serve`` as a user starts it."""
    command = [Path(sys.executable).with_name("stratakv"), "serve", directory]
    with log.open("wb") as errors:
        running = subprocess.Popen(
            [*command, *SMALL_FLAGS, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        assert running.stdout is not None
        for line in running.stdout:
            if found := re.fullmatch(r"stratakv: listening on (http://\S+)\n", line):
                yield running, found[1]
                break
        else:
            pytest.fail(f"no server: {log.read_text()}")
    finally:
        running.kill()
        running.communicate()


def test_sigterm_drains_and_the_port_is_free_again(directory, tmp_path):
    log = tmp_path / "log"
    with process(directory, log) as (running, url), httpx.Client(timeout=PATIENCE_S) as http:
        port = int(url.rpartition(":")[2])
        alone = http.post(url + COMPLETIONS, json=completion(tokens(60, 1), 300)).json()
        with http.stream(
            "POST", url + COMPLETIONS, json=completion(tokens(60, 1), 300, stream=True)
        ) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            running.send_signal(signal.SIGTERM)
            with httpx.Client(timeout=PATIENCE_S) as other:
                wait_until(lambda: other.get(url + "/health").status_code == 503)
                refused = other.post(url + COMPLETIONS, json=completion("a", 1))
                assert error_of(refused, 503)["code"] == "draining"
                assert int(refused.headers["retry-after"]) >= 1
            events = [line.removeprefix("data: ") for line in (first, *lines) if line]
        assert events[-1] == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert "".join(choice["text"] for choice in choices) == alone["choices"][0]["text"]
        assert choices[-1]["finish_reason"] == "length"
        assert running.wait(PATIENCE_S) == 0, log.read_text()
    assert "Traceback" not in log.read_text()
    bound_socket("127.0.0.1", port).close()  # as the next server does

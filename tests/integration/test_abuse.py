"""A campaign of abuse against a server as a user starts it: clients that are slow, leave, are many,
send hostile bodies and ask for strange paths, three rounds of all of it, then SIGTERM under load,
SIGKILL under load, and the same store again.

The rule: after each round greedy answers are Hugging Face's; from the second round to the third no
thread and no handle is added, and memory grows by 5% at most.
"""

import json
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPConnection
from itertools import cycle, islice
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.rank_processes import started
from tests.real_server import COMPLETIONS, SMALL_FLAGS, completion, tokens
from tests.request_fuzzer import judge, mixed
from tests.scraped import scraped
from tests.serving import ProcessSize, size_of

ROUNDS, TINY, CONNECTIONS, HOSTILE, LEAVING = 3, 10_000, 1_000, 600, 60
WORKERS = 16
LIVES_S = 12 * PATIENCE_S
ANSWER = 24
PROMPTS = [tokens(30 + 45 * at, 900 + at) for at in range(6)]
PATHS = (
    "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//health", "/./health", "/health/", "/%00",
    "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/" + "a" * 4000, "/v1//completions",
    "/;/health", "/cache/storage/../why_miss", "/docs/..", "/\\..\\..\\windows", "/%ff%fe",
    "http://elsewhere.example/health", "*", "/v1/models/\u00e9", "/health%0d%0aX-A: b",
    "/" + "a/" * 900,
)  # fmt: skip
REFUSED = {400, 403, 404, 405, 408, 413, 414, 431}


class Served:
    """A server, its process and its one port. ``expected``: what Hugging Face answers."""

    def __init__(self, process, url: str, expected: list[list[int]]) -> None:
        self.process, self.url, self.expected = process, url, expected
        self.port = int(url.rpartition(":")[2])

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        connection.sendall(data)
        return connection

    def settled(self) -> None:
        def idle() -> bool:
            found = scraped(httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text)
            return not any(
                value for key, value in found.items() if key[0] == "stratakv_requests_by_phase"
            )

        wait_until(idle)

    def answers_are_hugging_faces(self) -> None:
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http:
            for prompt, expected in zip(PROMPTS, self.expected, strict=True):
                body = completion(prompt, ANSWER) | {"return_token_ids": True}
                answer = http.post(COMPLETIONS, json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == expected

    def size(self) -> ProcessSize:
        """But for open segments of its store, which are as many as that has."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        segments = sum(link.endswith(".seg") for link in map(target, folder.iterdir()))
        found = size_of(self.process.pid)
        return replace(found, handles=found.handles - segments)


def target(handle: Path) -> str:
    try:
        return str(handle.readlink())
    except FileNotFoundError:  # closed meanwhile
        return ""


@pytest.fixture(scope="module")
def expected(directory) -> list[list[int]]:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(ANSWER):
                ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


@contextmanager
def served(directory: Path, folder: Path, expected: list[list[int]]) -> Iterator[Served]:
    store = f"file://{folder / 'store'}?quota=64MiB"
    words = ["serve", directory, *SMALL_FLAGS, "--port", "0", "--storage", store]
    words += ["--max-waiting", 8192]
    with started(words, folder / "log", lives_s=LIVES_S) as found:
        yield Served(found.process, found.listen().url, expected)


# -- what clients do -------------------------------------------------------------------------------


def request(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def end(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def tiny_requests(server: Served, at: int) -> None:
    def some(worker: int) -> None:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        for i in range(at * WORKERS + worker, TINY, ROUNDS * WORKERS):
            connection.request("POST", COMPLETIONS, json.dumps(completion([i % 390, i // 390], 1)))
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == 200, body
        connection.close()

    with ThreadPoolExecutor(WORKERS) as pool:
        for future in [pool.submit(some, worker) for worker in range(WORKERS)]:
            future.result()


def many_connections(server: Served) -> None:
    """Some ask for nothing, some for half of something, some stay when they have been answered."""
    starts = (b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    starts += (request({"prompt": "a"})[:-1],)
    with ExitStack() as all_of_them:
        for data in islice(cycle(starts), CONNECTIONS):
            all_of_them.enter_context(server.connect(data))
        server.answers_are_hugging_faces()


def slow_clients(server: Served, at: int) -> None:
    """One sends a byte at a time, one reads nothing while its answer comes."""
    body = request(completion(tokens(200, at), 200, stream=True))
    with server.connect() as dripping, server.connect(body) as deaf:
        for byte in request(completion([1, 2], 1)):
            dripping.sendall(bytes([byte]))
        assert dripping.recv(12) == b"HTTP/1.1 200"
        server.answers_are_hugging_faces()
        assert deaf.recv(12) == b"HTTP/1.1 200"


def leaving_clients(server: Served, at: int) -> None:
    """Before and in the body, as they wait, in a prompt, in an answer, and at its end."""

    def leave(seed: int) -> None:
        stream = bool(seed & 1)
        data = request(completion(tokens(300, seed), 100, stream=stream))
        phase = seed % 6
        sent = (20, len(data) - 40)[phase] if phase < 2 else len(data)
        connection = server.connect(data[:sent])
        patience = (0, 0, 0, 200, 2_000, 1 << 30)[phase]
        while patience > 0 and (piece := connection.recv(4096)):
            patience -= len(piece)
            if b"[DONE]" in piece or (not stream and b'"usage"' in piece):
                break
        end(connection, reset=bool(seed & 2))

    with ThreadPoolExecutor(12) as pool:
        for future in [pool.submit(leave, at * 1000 + seed) for seed in range(LEAVING)]:
            future.result()


def hostile_bodies(server: Served, at: int) -> None:
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
        ThreadPoolExecutor(WORKERS) as pool,
    ):
        attempts = mixed(70 + at, HOSTILE)
        asked = [pool.submit(http.post, one.path, content=one.body()) for one in attempts]
        for one, answer in zip(attempts, asked, strict=True):
            judge(one, answer.result(PATIENCE_S))


def strange_paths(server: Served) -> None:
    for method in ("GET", "POST", "BREW"):
        for path in PATHS:
            with server.connect(f"{method} {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()) as asked:
                status = int(asked.recv(1 << 16).split()[1])
            assert status in REFUSED, (method, path, status)


@contextmanager
def loaded(server: Served) -> Iterator[None]:
    """Within the block eight clients stream and others come; whatever becomes of them."""
    enough = threading.Event()

    def stream(seed: int) -> None:
        with suppress(OSError), server.connect() as connection:
            connection.sendall(request(completion(tokens(100, seed), 300, stream=True)))
            while connection.recv(4096):
                enough.set()

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(stream, seed) for seed in range(8)]
        assert enough.wait(PATIENCE_S)
        yield
        for future in futures:
            future.result(PATIENCE_S)


@contextmanager
def open_files() -> Iterator[None]:
    """For as many connections from here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_three_rounds_of_abuse_then_its_end_and_its_kill_under_load(directory, expected, tmp_path):
    sizes = list[ProcessSize]()
    with open_files(), served(directory, tmp_path, expected) as server:
        server.answers_are_hugging_faces()
        for at in range(ROUNDS):
            tiny_requests(server, at)
            many_connections(server)
            slow_clients(server, at)
            leaving_clients(server, at)
            hostile_bodies(server, at)
            strange_paths(server)
            server.settled()
            server.answers_are_hugging_faces()
            wait_until(lambda: not sizes or server.size().handles <= sizes[0].handles)
            sizes.append(server.size())
        (tmp_path / "sizes").write_text("\n".join(map(str, sizes)))
        _, second, third = sizes
        assert third.threads <= second.threads, sizes
        assert third.resident_bytes <= 1.05 * second.resident_bytes, sizes
        with loaded(server):
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
    with served(directory, tmp_path, expected) as server:
        server.answers_are_hugging_faces()
        with loaded(server):
            server.process.kill()
        assert server.process.wait(PATIENCE_S) == -signal.SIGKILL
    with served(directory, tmp_path, expected) as server:
        server.answers_are_hugging_faces()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()

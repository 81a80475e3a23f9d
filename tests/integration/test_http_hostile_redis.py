"""A server whose Redis lies: requests are answered as without it, and what it said is one line."""

import itertools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.serve.server import Server, bound_socket
from stratakv.serve.wiring import build_service
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.fixtures.hostile_redis import Answer, HostileRedis, hostile_redis, unkind

CONFIG = EngineConfig(
    dtype="float32", page_tokens=16, device_memory="640KiB", host_memory="1280KiB",
    step_tokens=256, chunk_tokens=64, max_running=16, chat_tokens=256,
    prefetch_policy="wait-complete", prefetch_threshold=16,
)  # fmt: skip
PROMPT = [(i * i * 31 + i) % 400 for i in range(200)]
STORAGE = "/cache/storage"
CURSORS = itertools.count(1)
LIES: dict[str, dict[str, bytes | Answer]] = {
    "no number": {"EXISTS": b":abc\r\n"},
    "a huge answer": {"EXISTS": b":1\r\n", "GET": b"$99999999999999999\r\n"},
    "no reply at all": {"EXISTS": b"what?\r\n"},
    "pages that are none": {"EXISTS": b":1\r\n", "GET": b"$4\r\npage\r\n"},
}


@pytest.fixture(scope="module")
def http(directory) -> Iterator[httpx.Client]:
    service, parts = build_service(directory, CONFIG, ServerConfig(admin_key="k"))
    listener = bound_socket("127.0.0.1", 0)
    listener.listen()
    server = Server(service, drain_s=PATIENCE_S)
    service.driver.start()
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        headers = {"Authorization": "Bearer k"}
        with httpx.Client(base_url=url, timeout=PATIENCE_S, headers=headers) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        service.storage.settle(PATIENCE_S)
        assert service.driver.stop(PATIENCE_S)
        service.storage.close()
        parts.close()


@contextmanager
def attached(http: httpx.Client) -> Iterator[HostileRedis]:
    with hostile_redis() as redis:
        assert http.put(STORAGE, json={"url": f"{redis.url}?timeout=50"}).status_code == 200
        try:
            yield redis
        finally:
            assert http.delete(f"{STORAGE}?force=true").status_code == 200


def ask(http: httpx.Client) -> str:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def flushed(http: httpx.Client) -> bool:
    return http.post("/flush_cache").status_code == 200


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the server said of it, without a traceback anywhere."""
    ours = [record for record in caplog.records if record.name.startswith("stratakv")]
    assert not [record for record in ours if record.exc_info or record.levelno > logging.WARNING]
    return [record.getMessage() for record in ours if record.levelno == logging.WARNING]


@pytest.mark.parametrize("lie", LIES)
def test_whatever_it_says_of_pages_is_recomputed(http, caplog, lie):
    wanted = ask(http)
    caplog.clear()
    with attached(http) as redis:
        wait_until(lambda: flushed(http))
        redis.answer = unkind(**LIES[lie])
        assert ask(http) == wanted
        found = http.get(STORAGE).json()
        assert http.get("/health").status_code == 200
    logged = lines(caplog)
    if lie == "pages that are none":
        assert found["lost_tokens"]["corrupt"] > 0
        assert not logged
    else:
        assert sum(found["queue"]["failed"].values()) > 0
        assert len(logged) == len(set(logged)) > 0  # once for reading, once for writing
        assert all(line.startswith("storage ") and "redis: " in line for line in logged)


def never_ending(_words: list[bytes]) -> bytes:
    cursor = b"%d" % next(CURSORS)
    return b"*2\r\n$%d\r\n%b\r\n*0\r\n" % (len(cursor), cursor)


@pytest.mark.parametrize(
    "scan", [never_ending, b"*2\r\n$1\r\n7\r\n*0\r\n", b"*2\r\n$1\r\n0\r\n-ERR no\r\n"],
    ids=["a cursor without end", "a cursor that stays", "junk"],
)  # fmt: skip
def test_a_clear_ends_whatever_it_finds_while_others_are_answered(http, caplog, scan):
    wanted = ask(http)
    caplog.clear()
    with hostile_redis(unkind(SCAN=scan)) as redis:
        url = f"{redis.url}?timeout=0.2"
        assert http.put(STORAGE, json={"url": url}).status_code == 200
        assert http.post(f"{STORAGE}/clear").status_code == 202
        assert ask(http) == wanted
        wait_until(lambda: http.get(STORAGE).json()["queue"]["failed"]["remove"] == 1)
        assert http.delete(f"{STORAGE}?force=true").status_code == 200
    (line,) = lines(caplog)
    assert line.startswith("storage remove failed, redis: ")

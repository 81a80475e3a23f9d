"""Bodies that are cheap to send and dear to answer: others are answered while they are worked on,
and a server is as large after many of them as after some.
"""

import asyncio
import json
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from stratakv.serve.lanes import LONG_BYTES
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

MOST_BYTES = 8 << 20
"""Of a body, as servers have it."""
COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"


def attacks(size: int) -> dict[str, tuple[str, bytes, str]]:
    """Path, body of about ``size`` bytes, and the error's code."""
    room = size - 100
    message = b'{"role":"user","content":""}'
    chat = {"messages": [{"role": "user", "content": "é" * (room // 6)}]}
    texts = {"prompt": ["word " * (room // 60)] * 12}
    integers = b"1," * (room // 2)
    return {
        "one-token prompts": (
            COMPLETIONS, b'{"prompt": [' + b"[1]," * (room // 4) + b"[1]]}", "too_many_values",
        ),
        "empty messages": (
            CHAT,
            b'{"messages": [' + (message + b",") * (room // 29) + message + b"]}",
            "too_many_values",
        ),
        "a long text": (TOKENIZE, b'{"prompt": "%s"}' % (b"x" * room), "context_length_exceeded"),
        "long prompts": (COMPLETIONS, json.dumps(texts).encode(), "context_length_exceeded"),
        "a long chat": (CHAT, json.dumps(chat).encode(), "context_length_exceeded"),
        "many tokens": (
            COMPLETIONS, b'{"prompt": [' + integers + b"1]}", "context_length_exceeded",
        ),
        "many tokens to text": (
            "/detokenize", b'{"tokens": [' + integers + b"1]}", "context_length_exceeded",
        ),
        "long integers": (
            COMPLETIONS, b'{"prompt": [' + b",".join([b"1" * 4200] * (room // 4201)) + b"]}",
            "invalid_value",
        ),
        "tokens that are none": (
            "/detokenize", b'{"tokens": [' + integers + b"400]}", "invalid_value",
        ),
    }  # fmt: skip


ATTACKS = attacks(1 << 20)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@contextmanager
def serving(tokenizer, **more):
    engine = EchoEngine()
    with running(make_service(tokenizer, engine, body_bytes=MOST_BYTES, **more), engine) as live:
        yield live


@pytest.fixture(scope="module")
def shared(tokenizer):
    with serving(tokenizer) as live:
        yield live


@contextmanager
def occupied(live):
    """The thread for long work is busy until the block ends."""
    gate, begun = threading.Event(), threading.Event()

    async def hold():
        def work():
            begun.set()
            gate.wait(PATIENCE_S)

        await live.service.lanes.run("somebody", LONG_BYTES, work)

    loop = next(iter(live.server.servers)).get_loop()
    held = asyncio.run_coroutine_threadsafe(hold(), loop)
    assert begun.wait(PATIENCE_S)
    try:
        yield
    finally:
        gate.set()
        held.result(PATIENCE_S)


def ask(url: str, words: str = FOX) -> str:
    body = {"prompt": words, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(url + COMPLETIONS, json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("name", ATTACKS)
def test_others_are_answered_before_a_body_that_takes_long(shared, name):
    path, body, code = ATTACKS[name]
    before = ask(shared.url)
    with ThreadPoolExecutor(1) as pool:
        with occupied(shared):
            attack = pool.submit(httpx.post, shared.url + path, content=body, timeout=PATIENCE_S)
            wait_until(lambda: shared.service.lanes.long.waiting or attack.done())
            assert httpx.get(shared.url + "/health", timeout=PATIENCE_S).status_code == 200
            assert ask(shared.url) == before
            # Long enough to be worked on in a thread, and short.
            short = {"prompt": "word " * 3000}
            answer = httpx.post(shared.url + TOKENIZE, json=short, timeout=PATIENCE_S)
            assert answer.status_code in {200, 400}, answer.text
            assert not attack.done()
        refused = attack.result(PATIENCE_S)
    assert error_of(refused, 400)["code"] == code
    assert ask(shared.url) == before


SERVED = {
    "many short texts": {"prompt": ["The quick brown fox. " * 50] * 62, "max_tokens": 1},
    "many log-probabilities": {"prompt": FOX, "n": 60, "max_tokens": 20, "logprobs": 20},
}


@pytest.mark.parametrize("name", SERVED)
def test_others_are_answered_before_small_things_that_are_many(shared, name):
    """A text of a kilobyte is worked on where it is, and so is an answer; not so sixty of them."""
    body = SERVED[name] | {"temperature": 0}
    before = ask(shared.url)
    with ThreadPoolExecutor(1) as pool:
        with occupied(shared):
            attack = pool.submit(
                httpx.post, shared.url + COMPLETIONS, json=body, timeout=PATIENCE_S
            )
            wait_until(lambda: shared.service.lanes.long.waiting or attack.done())
            assert httpx.get(shared.url + "/health", timeout=PATIENCE_S).status_code == 200
            assert ask(shared.url) == before
            assert not attack.done()
        answer = attack.result(PATIENCE_S).json()
    one = {"n": 1, "prompt": body["prompt"][-1] if name == "many short texts" else FOX}
    alone = httpx.post(shared.url + COMPLETIONS, json=body | one, timeout=PATIENCE_S).json()
    choices = answer["choices"]
    assert len(choices) >= 60
    assert all(one["text"] == alone["choices"][0]["text"] for one in choices)
    assert all(one["logprobs"] == alone["choices"][0]["logprobs"] for one in choices)


@pytest.mark.skipif(sys.platform != "linux", reason="asks from 127.0.0.2")
def test_bodies_of_all_clients_together_are_bounded_and_one_client_leaves_room(tokenizer):
    large = {"prompt": "x" * 200_000}
    begun = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n" + b"x" * 199_000
    together = 1 << 20
    with serving(tokenizer, bodies_bytes=together) as live, ExitStack() as slow:
        before = ask(live.url)
        address = live.url.removeprefix("http://").split(":")

        def status(host: str) -> int:
            transport = httpx.HTTPTransport(local_address=host)
            with httpx.Client(transport=transport, timeout=PATIENCE_S) as http:
                return http.post(live.url + TOKENIZE, json=large).status_code

        for _ in range(12):
            connection = slow.enter_context(socket.create_connection(address, PATIENCE_S))
            connection.sendall(begun)
        wait_until(lambda: status("127.0.0.1") == 503)
        assert live.service.bodies.held_bytes <= together // 2
        assert httpx.get(live.url + "/health", timeout=PATIENCE_S).status_code == 200
        assert ask(live.url) == before
        assert status("127.0.0.2") == 400
        slow.close()
        wait_until(lambda: not live.service.bodies.held_bytes)
        assert status("127.0.0.1") == 400


def test_no_thread_is_made_for_an_error(tokenizer):
    with serving(tokenizer) as live, httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http:
        assert http.get("/health").status_code == 200
        before = set(threading.enumerate())
        assert http.post(COMPLETIONS, content=b"{").status_code == 400
        assert http.get("/nowhere").status_code == 404
        assert http.get(COMPLETIONS).status_code == 405
        assert not set(threading.enumerate()) - before


def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(shared, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    for path in (TOKENIZE, COMPLETIONS):
        body = {"prompt": "word " * 100_000}
        refused = httpx.post(shared.url + path, json=body, timeout=PATIENCE_S)
        assert error_of(refused, 400)["code"] == "context_length_exceeded"


def test_long_bodies_that_can_be_served_are_served(shared):
    """Texts and token ids that are read in pieces are what they were."""
    text = "word " * 100
    tokens = httpx.post(shared.url + TOKENIZE, json={"prompt": text}, timeout=PATIENCE_S).json()
    assert len(tokens["tokens"]) == tokens["count"]
    ignored = {"metadata": [1] * 70_000}  # with so many values, arrays are read by themselves
    back = {"tokens": tokens["tokens"]} | ignored
    answer = httpx.post(shared.url + "/detokenize", json=back, timeout=PATIENCE_S)
    assert answer.json()["prompt"] == text
    prompts = [[1 + (i + j) % 300 for j in range(300)] for i in range(300)]
    body = {"prompt": prompts[:60] * 5, "max_tokens": 1}
    refused = httpx.post(shared.url + COMPLETIONS, json=body, timeout=PATIENCE_S)
    assert "more than 64 requests" in error_of(refused, 400)["message"]
    body = {"prompt": prompts[:60], "max_tokens": 2, "temperature": 0} | ignored
    answer = httpx.post(shared.url + COMPLETIONS, json=body, timeout=PATIENCE_S).json()
    one = {"prompt": prompts[59], "max_tokens": 2, "temperature": 0}
    alone = httpx.post(shared.url + COMPLETIONS, json=one, timeout=PATIENCE_S).json()
    assert answer["choices"][59]["text"] == alone["choices"][0]["text"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("size", [1 << 20, pytest.param(MOST_BYTES, marks=pytest.mark.long)])
def test_a_server_is_as_large_after_three_rounds_as_after_two(tmp_path, size):
    directory = train_tokenizer(tmp_path / "tokenizer")
    with process(directory, tmp_path / "log", soft=512, hard=512) as (server, url):
        rounds = []
        for _ in range(3):
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
                for path, body, code in attacks(size).values():
                    answer = http.post(path, content=body)
                    assert error_of(answer, 400)["code"] == code
                    assert http.get("/health").status_code == 200
            rounds.append(size_of(server.pid))
        _, second, third = rounds
        assert third.resident_bytes <= 1.05 * second.resident_bytes, rounds
        assert third.threads <= second.threads, rounds
        # The server closes its end of a connection a moment after the client has closed its own.
        wait_until(lambda: size_of(server.pid).handles <= second.handles)

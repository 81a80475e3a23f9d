"""Requests that are retracted in a server that decodes and whose host is full: they go back to the
server that computed their prompts, as processes over NIXL's TCP, and answers are those of one
server that does both; also where the other one dies meanwhile.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count

import httpx
import pytest

from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.disagg_servers import Fleet, Started, metric, ready
from tests.fixtures.models import tiny_model
from tests.fixtures.servers import free_port
from tests.fixtures.transports import nixl_is_here
from tests.real_server import COMPLETIONS, completion, tokens
from tests.serving import train_tokenizer

CLIENTS = 8
SHORT = ("--device-memory", "160KiB", "--host-memory", "44KiB", "--reserve-tokens", "1")
"""Of pages, with which most requests run short when all of them have generated."""
FAILED = "<failed>"
UNSAVED = "stratakv_cache_retracted_unsaved_total"
SUCCEEDED = "stratakv_transfer_sessions_succeeded_total"


class Servers:
    """``asked``: what clients want, and ``right`` what one server alone answers."""

    def __init__(self, fleet: Fleet, directory) -> None:
        self.fleet, self.join_port, self.rooms = fleet, free_port(), count(1)
        join = ("--bootstrap-port", str(self.join_port))
        self.prefill = fleet.server(directory, "--role", "prefill", *join)
        self.decode = fleet.server(directory, "--role", "decode", *SHORT)
        unified = fleet.server(directory)
        ready(self.prefill, self.decode, unified)
        drawn = {"temperature": 0.9, "repetition_penalty": 1.2, "logit_bias": {"5": 1.0}}
        counted = {"temperature": 0.5, "frequency_penalty": 2.0, "presence_penalty": 2.0}
        self.asked = [
            completion(tokens(20 + 3 * n, n), 50, seed=n, logprobs=1, **more)
            for n, more in enumerate([{}, {}, drawn, drawn, counted, counted, counted, counted])
        ]
        self.right = [choice_of(post(unified, body)) for body in self.asked]
        unified.kill()

    def room(self) -> dict[str, object]:
        return {
            "bootstrap_host": "127.0.0.1", "bootstrap_port": self.join_port,
            "bootstrap_room": next(self.rooms), "cache_salt": "",
        }  # fmt: skip

    def ask_all(self, meanwhile=lambda: None, *, stream=False) -> list[httpx.Response]:
        """What decode answers all clients, who ask at once."""
        with ThreadPoolExecutor(2 * CLIENTS) as threads:
            asked = [body | self.room() for body in self.asked]
            for body in asked:
                threads.submit(post, self.prefill, body)
            wanted = [body | {"stream": stream} for body in asked]
            answers = [threads.submit(post, self.decode, body) for body in wanted]
            meanwhile()
            return [each.result(PATIENCE_S) for each in answers]


def post(server: Started, body: dict[str, object]) -> httpx.Response:
    return httpx.post(server.url + COMPLETIONS, json=body, timeout=PATIENCE_S)


def choice_of(answer: httpx.Response) -> dict[str, object]:
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 50
    (choice,) = answer.json()["choices"]
    return choice


def text_of(stream: httpx.Response) -> str:
    """Of one that has begun; an error in it ends the text."""
    events = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
    found = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(each["choices"][0]["text"] if "choices" in each else FAILED for each in found)


def assert_right(answer: httpx.Response, right: dict) -> None:
    found = choice_of(answer)
    assert found["text"] == right["text"]
    assert found["logprobs"]["tokens"] == right["logprobs"]["tokens"]
    theirs = right["logprobs"]["token_logprobs"]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(theirs, abs=1e-3)


def assert_all_right(servers: Servers) -> None:
    for answer, right in zip(servers.ask_all(), servers.right, strict=True):
        assert_right(answer, right)


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[Servers]:
    nixl_is_here()
    directory = train_tokenizer(tmp_path_factory.mktemp("model"))
    tiny_model("gemma3").save_pretrained(directory)
    with ExitStack() as undo:
        fleet = Fleet(tmp_path_factory.mktemp("logs"), undo)
        undo.enter_context(fleet.tails())
        yield Servers(fleet, directory)


def test_what_was_retracted_goes_back_and_the_answer_is_that_of_one(servers):
    """Wherever the request was when it lost its pages, and however its tokens are chosen."""
    assert_all_right(servers)
    unsaved = metric(servers.decode, UNSAVED)
    # Each was handed over once for its prompt, and those again that count nothing.
    assert CLIENTS < metric(servers.prefill, SUCCEEDED) <= CLIENTS + unsaved


def test_where_prefill_dies_who_has_generated_goes_on(servers):
    """Those alone fail whose prompts it had; and when it is back requests go back to it again."""
    before = metric(servers.decode, UNSAVED)

    def kill():
        wait_until(lambda: metric(servers.decode, UNSAVED) > before, "a retraction")
        servers.prefill.kill()

    streams = servers.ask_all(kill, stream=True)
    going = [
        (text, right["text"])
        for text, right in zip(map(text_of, streams), servers.right, strict=True)
        if text != FAILED
    ]
    assert going
    assert [text for text, _ in going] == [right for _, right in going]
    servers.prefill = servers.fleet.again(servers.prefill)
    ready(servers.prefill)
    assert_all_right(servers)
    assert metric(servers.prefill, SUCCEEDED) > CLIENTS


def test_nothing_is_left(servers):
    states = ("bootstrapping", "waiting_for_input", "transferring")

    def over() -> bool:
        names = [f'stratakv_transfer_sessions{{state="{state}"}}' for state in states]
        held = [metric(one, name) for one in (servers.prefill, servers.decode) for name in names]
        return not any([*held, metric(servers.decode, 'stratakv_transfer_pages{state="leased"}')])

    wait_until(over, "the end of every session")
    for one in (servers.prefill, servers.decode):
        assert httpx.post(f"{one.url}/flush_cache", timeout=PATIENCE_S).json() == {"flushed": True}

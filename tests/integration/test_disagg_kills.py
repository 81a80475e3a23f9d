"""Servers of both roles are killed again and again while clients ask: each answer is right or an
error that says why, the others serve on, and who is back is joined.
"""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from random import Random

import httpx
import pytest

from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.disagg_servers import Fleet, metric, ready
from tests.fixtures.models import tiny_model
from tests.fixtures.servers import free_port
from tests.fixtures.transports import nixl_is_here
from tests.real_server import COMPLETIONS, completion, tokens
from tests.serving import train_tokenizer

KILLS = 50
CLIENTS = 3
DECODE = ("--role", "decode", "--prefill-hosts", "127.0.0.1")
TIMEOUT = ("--transfer-timeout", "20")
STATES = ("bootstrapping", "waiting_for_input", "transferring")


@pytest.fixture
def directory(tmp_path) -> Path:
    path = train_tokenizer(tmp_path / "model")
    tiny_model("gemma3").save_pretrained(path)
    return path


class Crowd:
    """``servers``: the one that computes prompts, and those that decode; changed by who kills."""

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        nixl_is_here()
        self.fleet, self.join_port = fleet, free_port()
        join = ("--bootstrap-port", str(self.join_port))
        self.servers = [
            fleet.server(directory, "--role", "prefill", *join, *TIMEOUT),
            *(fleet.server(directory, *DECODE, *TIMEOUT) for _ in range(2)),
        ]
        unified = fleet.server(directory)
        ready(*self.servers, unified)
        self.asked = [completion(tokens(40 + 23 * n, n), 4 + 5 * n) for n in range(8)]
        self.right = [self.text(unified.url, body) for body in self.asked]
        unified.kill()
        self.rooms, self.outcomes = count(1), Counter()

    def text(self, url: str, body: dict[str, object]) -> str:
        """Of the answer, or of the error; "" where the server is gone."""
        try:
            answer = httpx.post(url + COMPLETIONS, json=body, timeout=PATIENCE_S)
        except httpx.TransportError:
            return ""
        if answer.status_code == 200:
            return answer.json()["choices"][0]["text"]
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (500, "request_failed_transfer"), error
        assert error["message"]
        return "failed"

    def ask(self, at: int, decode: int) -> str:
        """By both, as a router does."""
        room = {
            "bootstrap_host": "127.0.0.1", "bootstrap_port": self.join_port,
            "bootstrap_room": next(self.rooms), "cache_salt": "",
        }  # fmt: skip
        urls = [self.servers[each].url for each in (0, decode)]
        with ThreadPoolExecutor(2) as threads:
            _, answer = threads.map(lambda url: self.text(url, self.asked[at] | room), urls)
        return "right" if answer == self.right[at] else answer

    def client(self, seed: int, ended: threading.Event) -> None:
        rng = Random(seed)
        while not ended.is_set():
            found = self.ask(rng.randrange(len(self.asked)), rng.choice((1, 2)))
            assert found in ("right", "failed", ""), found
            self.outcomes[found] += 1

    def kill(self, who: int, rng: Random) -> None:
        """And look at the others, and at it when it is back."""
        wanted = self.outcomes["right"] + rng.randrange(4)
        wait_until(lambda: self.outcomes["right"] >= wanted, "answers under load")
        self.servers[who].kill()
        alive = 1 if who != 1 else 2
        at = rng.randrange(len(self.asked))
        if who:
            wait_until(lambda: self.ask(at, alive) == "right", "the other one that decodes")
        assert self.text(self.servers[alive].url, self.asked[at]) == self.right[at]
        self.servers[who] = self.fleet.again(self.servers[who])
        ready(self.servers[who])
        for decode in (1, 2):
            wait_until(lambda each=decode: self.ask(at, each) == "right", "who is joined again")

    def nothing_left(self) -> bool:
        prefill, *decodes = self.servers
        held = [
            metric(one, f'stratakv_transfer_sessions{{state="{state}"}}')
            for one in (prefill, *decodes)
            for state in STATES
        ]
        held += [metric(one, 'stratakv_transfer_pages{state="leased"}') for one in decodes]
        return not any(held)


@pytest.mark.long
def test_servers_are_killed_under_load(directory, tmp_path):
    rng, ended = Random(1), threading.Event()
    with ExitStack() as undo:
        fleet = Fleet(tmp_path, undo)
        undo.enter_context(fleet.tails())
        crowd = Crowd(fleet, directory)
        clients = undo.enter_context(ThreadPoolExecutor(CLIENTS))
        undo.callback(ended.set)
        asking = [clients.submit(crowd.client, seed, ended) for seed in range(CLIENTS)]
        for number in range(KILLS):
            crowd.kill((0, 1, 0, 2)[number % 4], rng)
            assert not any(each.done() for each in asking), [each.exception() for each in asking]
        ended.set()
        for each in asking:
            each.result(PATIENCE_S)
        assert crowd.outcomes["right"] > KILLS
        assert crowd.outcomes["failed"] > 0
        wait_until(crowd.nothing_left, "the end of every session")
        for one in crowd.servers:
            flushed = httpx.post(f"{one.url}/flush_cache", timeout=PATIENCE_S).json()
            assert flushed == {"flushed": True}

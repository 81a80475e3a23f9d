"""Two ranks that compute prompts and two that decode, and one of either, as processes over NIXL's
TCP, against one server that does both: what clients are told, also when one rank dies."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx
import pytest

from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.disagg_servers import Fleet
from tests.fixtures.models import random_prompt
from tests.fixtures.servers import free_port
from tests.fixtures.transports import nixl_is_here
from tests.parallel_models import build
from tests.rank_processes import COMPLETIONS, FLAGS, Launched, body, launched
from tests.routers import ROUTERS, answers_as_one_server_does, released_router
from tests.serving import error_of, train_tokenizer

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = train_tokenizer(tmp_path_factory.mktemp("model"))
    build("gemma3_text", **WIDE).save_pretrained(path)
    return path


def serve(model: Path, role: str, *more: object, ranks: int = 2) -> list[object]:
    of_ranks = ["--tp", ranks, "--tp-timeout", 60] if ranks > 1 else []
    return ["serve", model, *FLAGS, *of_ranks, "--role", role, *more]


@dataclass
class Pair:
    prefill: Launched
    decode: Launched
    join_port: int

    def asked(self, prompt: list[int], count: int, room: int) -> dict:
        return body(
            prompt, count, cache_salt="", bootstrap_host="127.0.0.1",
            bootstrap_port=self.join_port, bootstrap_room=room,
        )  # fmt: skip

    def at(self, server: Launched, asked: dict) -> httpx.Response:
        return httpx.post(server.url + COMPLETIONS, json=asked, timeout=PATIENCE_S)

    def both(self, prompt: list[int], count: int, room: int) -> list[httpx.Response]:
        """What both sides answer, as a router asks them."""
        asked = self.asked(prompt, count, room)
        with ThreadPoolExecutor(2) as threads:
            return list(
                threads.map(lambda server: self.at(server, asked), (self.prefill, self.decode))
            )


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def ranks_of(lines: list[object], folder: Path, undo: ExitStack, count: int = 2) -> Launched:
    folder.mkdir()
    return undo.enter_context(launched([lines] * count, folder))


def test_two_ranks_hand_over_to_two_and_a_rank_that_dies_fails_its_requests(model, tmp_path):
    nixl_is_here()
    port = free_port()
    line = serve(model, "prefill", "--bootstrap-port", port)
    prompts = [random_prompt(seed, 100 + 30 * seed) for seed in range(3)]
    with ExitStack() as undo:
        prefill = ranks_of(line, tmp_path / "prefill", undo)
        decode = ranks_of(serve(model, "decode"), tmp_path / "decode", undo)
        alone = ranks_of(["serve", model, *FLAGS], tmp_path / "alone", undo, count=1)
        for server in (prefill, decode, alone):
            server.listen()
        pair = Pair(prefill, decode, port)
        wanted = [alone.ask(prompt, 12)[0] for prompt in prompts]
        for at, prompt in enumerate([*prompts, prompts[0]]):
            first, answer = pair.both(prompt, 12, at)
            assert text(answer) == wanted[at % 3]
            assert wanted[at % 3].startswith(text(first))
            details = answer.json()["usage"]["prompt_tokens_details"]
            assert details["prefill"]["cached_tokens"] == (0, 0, 0, 96)[at]
        assert decode.ask(prompts[1], 12)[0] == wanted[1], "what names no session it computes"

        prefill.processes[1].kill()
        assert prefill.ends(0) == 1
        again = ranks_of(line, tmp_path / "again", undo).listen()
        pair = Pair(again, decode, port)
        rooms = count(10)

        def is_right():
            """Or it failed: decode may not know yet that the old links are dead."""
            _, answer = pair.both(prompts[2], 12, next(rooms))
            if answer.status_code != 200:
                assert error_of(answer, 500)["code"] == "request_failed_transfer"
                return False
            assert text(answer) == wanted[2]
            return True

        wait_until(is_right, "an answer by the ranks that were started again")
        for server in (decode, again):
            server.processes[0].terminate()
            assert [server.ends(rank) for rank in range(2)] == [0, 0], server.all_logged()


@pytest.mark.long
@pytest.mark.parametrize(("ranks_here", "ranks_there"), [(1, 2), (2, 1)])
def test_one_rank_works_with_two_once_its_flag_says_so(model, tmp_path, ranks_here, ranks_there):
    """Else it is refused with both values, and the flag that mends it."""
    nixl_is_here()
    sides = {"prefill": ranks_here, "decode": ranks_there}
    prompts = [random_prompt(seed, 100 + 30 * seed) for seed in range(3)]
    with ExitStack() as undo:
        line = ["serve", model, *FLAGS]
        alone = ranks_of(line, tmp_path / "alone", undo, count=1).listen()
        wanted = [alone.ask(prompt, 12)[0] for prompt in prompts]
        for flagged in (False, True):
            started, port = {}, free_port()
            for role, ranks in sides.items():
                more = ["--bootstrap-port", port] if role == "prefill" else []
                more += ["--peer-tp", 2] if flagged and ranks == 1 else []
                line = serve(model, role, *more, ranks=ranks)
                started[role] = ranks_of(line, tmp_path / f"{role}{flagged}", undo, count=ranks)
            pair = Pair(started["prefill"].listen(), started["decode"].listen(), port)
            if not flagged:
                answer = pair.at(pair.decode, pair.asked(prompts[0], 12, 0))
                reason = error_of(answer, 500)["message"]
                assert f"ranks is {ranks_here} here and {ranks_there} there" in reason
                assert "--peer-tp" in reason
            else:
                for at, prompt in enumerate([*prompts, prompts[0]]):
                    _, answer = pair.both(prompt, 12, at)
                    assert text(answer) == wanted[at % 3]
                    details = answer.json()["usage"]["prompt_tokens_details"]
                    assert details["prefill"]["cached_tokens"] == (0, 0, 0, 96)[at]
            for role, server in started.items():
                server.processes[0].terminate()
                ended = [server.ends(rank) for rank in range(sides[role])]
                assert ended == [0] * sides[role], server.all_logged()


@pytest.mark.long
def test_the_released_routers_stand_before_servers_of_two_ranks(model, tmp_path):
    """One that computes prompts and two that decode, as each asks them."""
    nixl_is_here()
    port, named = free_port(), ("--served-model-name", "tiny")
    with ExitStack() as undo:
        line = serve(model, "prefill", "--bootstrap-port", port, *named)
        prefill = ranks_of(line, tmp_path / "prefill", undo)
        decodes = [
            ranks_of(serve(model, "decode", *named), tmp_path / f"decode{n}", undo) for n in (0, 1)
        ]
        line = ["serve", model, *FLAGS, *named]
        alone = ranks_of(line, tmp_path / "alone", undo, count=1).listen()
        urls = [server.listen().url for server in (prefill, *decodes)]
        prompts = ["the quick brown fox", "jumps over the lazy dog " * 9]
        for name in ROUTERS:
            router = released_router(Fleet(tmp_path, undo), name, urls[0], port, urls[1:])
            more = {"cache_salt": name if name == "vllm" else "", "model": "tiny"}
            answers_as_one_server_does(router.url, alone.url, prompts, **more)
            router.kill()
        for server in (prefill, *decodes):
            server.processes[0].terminate()
            assert [server.ends(rank) for rank in range(2)] == [0, 0], server.all_logged()

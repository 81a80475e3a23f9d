"""Servers of a role each over a transport of the network, behind ``stratakv route``: what clients
get is what the model says, whatever they ask at once, and a server that was killed joins again.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import product

import httpx
import pytest

from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.fixtures.servers import free_port
from tests.hit_cases import prompt
from tests.pairs import PAGE, right
from tests.rank_processes import COMPLETIONS
from tests.real_server import Bystanders, tokens
from tests.request_fuzzer import judge, mixed
from tests.split_servers import SplitServers, begun, model_directory, split_servers

AT_ONCE = 30
FAMILIES = ("llama", "gemma3", "gpt_oss", "qwen3_next", "deepseek_v3")
QUICK = {("gemma3", "mooncake"), ("qwen3_next", "nixl")}
CASES = [
    pytest.param(each, id="-".join(each), marks=() if each in QUICK else pytest.mark.long)
    for each in product(FAMILIES, ("mooncake", "nixl"))
]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    family, transport = request.param
    model = model_directory(family, tmp_path_factory.mktemp("model"))
    with split_servers(model, transport, tmp_path_factory.mktemp("logs")) as servers:
        yield family, servers


def ids(answer: dict) -> list[int]:
    return answer["choices"][0]["token_ids"]


def test_what_two_servers_answer_is_what_the_model_says(case):
    """In one chunk and in several, at and off the end of a page; then as conversations go on, from
    what both sides have by then."""
    answers_as_the_model(*case)


@pytest.mark.parametrize("transport", ["nixl", pytest.param("mooncake", marks=pytest.mark.long)])
@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_deepseek_s_newest_models_are_handed_over_between_servers(family, transport, tmp_path):
    model = model_directory(family, tmp_path / "model")
    with split_servers(model, transport, tmp_path / "logs") as servers:
        answers_as_the_model(family, servers)


def answers_as_the_model(family: str, servers: SplitServers) -> None:
    prompts = [prompt(PAGE, 70 + n, n) for n in (1, 16, 48, 101, 200)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda each: servers.ask(each, 9), prompts))
    for asked, answer in zip(prompts, answers, strict=True):
        assert ids(answer) == right(family, asked, 9)
        assert "prefill" in answer["usage"]["prompt_tokens_details"], "it was handed over"
    cached = 0
    for asked, answer in zip(prompts, answers, strict=True):
        longer = [*asked, *ids(answer), 5, 9]
        again = servers.ask(longer, 4)
        assert ids(again) == right(family, longer, 4)
        details = again["usage"]["prompt_tokens_details"]
        cached += details["cached_tokens"] + details["prefill"]["cached_tokens"]
    assert cached > 0
    servers.settled()


def play(servers, tried) -> None:
    """All of them by the router, so many at a time, beside clients who must notice nothing."""
    with (
        httpx.Client(base_url=servers.router.url, timeout=PATIENCE_S) as http,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        bystanders = Bystanders(http, [tokens(20 + 17 * i, 50 + i) for i in range(2)])
        for at in range(0, len(tried), AT_ONCE):
            some = tried[at : at + AT_ONCE]
            with bystanders.running():
                asked = [pool.submit(http.post, one.path, content=one.body()) for one in some]
                for one, answer in zip(some, asked, strict=True):
                    judge(one, answer.result(PATIENCE_S))
    servers.settled()


def test_requests_of_every_kind_by_the_router(case):
    play(case[1], mixed(3, 120))


@pytest.mark.long
def test_thousands_of_requests_of_every_kind_by_the_router(case):
    play(case[1], mixed(4, 4000 if case[0] == "gemma3" else 400))


def test_where_one_prefill_server_is_not_there_another_one_is_asked(case, tmp_path):
    family, servers = case
    asked = prompt(PAGE, 80, 50)
    urls = [f"http://127.0.0.1:{free_port()}", servers.prefill.url]
    line = ["route", "--decode", servers.decode.url, "--port", "0"]
    with ExitStack() as undo:
        for url in urls:
            line += ["--prefill", url]
        servers = replace(servers, router=begun(line, tmp_path / "router", undo).listen())
        for _ in range(4):
            assert ids(servers.ask(asked, 5)) == right(family, asked, 5)


@pytest.mark.long
def test_a_prefill_server_that_hangs_is_noticed_and_goes_on(case):
    """Stopped when decode has joined it. Who asks meanwhile is given the reason."""
    family, servers = case
    asked = prompt(PAGE, 81, 50)
    pid = servers.prefill.processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        url = servers.router.url + COMPLETIONS
        lost = httpx.post(url, json={"prompt": asked, "max_tokens": 5}, timeout=PATIENCE_S)
        code = lost.json()["error"]["code"]
        assert (
            lost.status_code == {"prefill_unreachable": 502, "request_failed_transfer": 500}[code]
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: answers_right(servers, family, asked), "an answer by the one that goes on")


def test_a_prefill_server_that_was_killed_joins_again(case, tmp_path):
    family, servers = case
    asked = prompt(PAGE, 90, 60)
    assert ids(servers.ask(asked, 6)) == right(family, asked, 6)
    servers.prefill.processes[0].kill()
    servers.prefill.processes[0].join(PATIENCE_S)
    with httpx.Client(base_url=servers.router.url, timeout=PATIENCE_S) as http:
        lost = http.post(COMPLETIONS, json={"prompt": asked, "max_tokens": 6})
        assert lost.json()["error"]["code"] == "prefill_unreachable"
        assert lost.status_code == 502
    with ExitStack() as undo:
        servers.prefill = begun(servers.line, tmp_path / "again", undo).listen()
        wait_until(lambda: answers_right(servers, family, asked), "an answer by the new one")


def test_servers_with_keys_of_several_clients_join_each_other(tmp_path):
    """Whose key a client brings is another matter."""
    keys = tmp_path / "keys"
    keys.write_text("alice k1\nbob k2\n")
    keys.chmod(0o600)
    model, asked = model_directory("llama", tmp_path / "model"), prompt(PAGE, 91, 40)
    with split_servers(model, "nixl", tmp_path / "logs", "--api-key-file", keys) as servers:
        body = {"prompt": asked, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        for key, status in (("k1", 200), ("k2", 200), ("k3", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            url = servers.router.url + COMPLETIONS
            answer = httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S)
            assert answer.status_code == status, answer.text
            if status == 200:
                assert ids(answer.json()) == right("llama", asked, 4)


def answers_right(servers, family: str, asked: list[int]) -> bool:
    """Or it failed: a side may not know yet that the old link is dead."""
    body = {"prompt": asked, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(servers.router.url + COMPLETIONS, json=body, timeout=PATIENCE_S)
    if answer.status_code != 200:
        code = answer.json()["error"]["code"]
        assert code in ("request_failed_transfer", "prefill_unreachable"), answer.text
        return False
    assert ids(answer.json()) == right(family, asked, 6)
    return True

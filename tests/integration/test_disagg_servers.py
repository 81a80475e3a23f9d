"""A server that computes prompts and two that decode, as processes over NIXL's TCP, against one
that does both: what clients are told, what is refused, and who may die."""

import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest

from stratakv.serve.sockets import bound_socket
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.disagg_servers import Fleet, Started, metric, ready
from tests.fixtures.models import tiny_model
from tests.fixtures.servers import free_port
from tests.fixtures.transports import nixl_is_here
from tests.real_server import CHAT, COMPLETIONS, completion, tokens
from tests.routers import (
    HELLO,
    ROUTERS,
    answers_as_one_server_does,
    post,
    released_router,
    streamed,
    texts,
)
from tests.serving import error_of, train_tokenizer


@dataclass
class Servers:
    fleet: Fleet
    unified: Started
    prefill: Started
    decodes: list[Started]
    join_port: int
    router: Started

    def room(self, number: int) -> dict[str, object]:
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.join_port,
            "bootstrap_room": number,
        }


@pytest.fixture(scope="module")
def servers(directory, tmp_path_factory):
    nixl_is_here()
    with ExitStack() as undo:
        fleet = Fleet(tmp_path_factory.mktemp("logs"), undo)
        undo.enter_context(fleet.tails())
        port = free_port()
        prefill = fleet.server(directory, "--role", "prefill", "--bootstrap-port", str(port))
        decodes = [fleet.server(directory, "--role", "decode") for _ in range(2)]
        unified = fleet.server(directory)
        router = fleet.stratakv(free_port(), *route_line(prefill, decodes))
        ready(prefill, *decodes, unified, router)
        yield Servers(fleet, unified, prefill, decodes, port, router)


def route_line(prefill: Started, decodes: list[Started]) -> list[str]:
    line = ["route", "--prefill", prefill.url]
    return line + [part for each in decodes for part in ("--decode", each.url)]


def both(servers: Servers, at: int, body: dict[str, object], **more) -> list[httpx.Response]:
    """What both sides answer, as sglang-router asks them."""
    urls = (servers.prefill.url, servers.decodes[at].url)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda url: post(url, body, **more), urls))


def test_a_port_of_a_server_is_its_alone():
    """Also while it does not listen: servers are killed and started again there."""
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    bound_socket("127.0.0.1", port).close()


def test_a_room_brings_two_servers_together_and_the_answer_is_that_of_one(servers):
    asked = completion(tokens(150, 1), 20)
    expected = texts(post(servers.unified.url, asked))
    for number, at in enumerate((0, 1, 0)):
        body = asked | servers.room(100 + number) | {"cache_salt": ""}
        prefill, decode = both(servers, at, body)
        assert texts(decode) == expected
        assert expected[0].startswith(texts(prefill)[0])
        assert prefill.json()["usage"]["completion_tokens"] == 1
        details = decode.json()["usage"]["prompt_tokens_details"]
        assert details["prefill"]["cached_tokens"] == (0, 144, 144)[number]
        assert details["cached_tokens"] == (0, 0, 144)[number]


def test_a_prefill_server_of_two_names_is_joined_under_both(servers):
    """And each link lasts, whatever the other one does."""
    asked = completion(tokens(80, 40), 6)
    expected = texts(post(servers.unified.url, asked))

    def one(number: int) -> list[str]:
        named = {
            "bootstrap_host": ("127.0.0.1", "localhost")[number % 2],
            "cache_salt": f"{number}",
        }
        return texts(both(servers, 0, asked | servers.room(300 + number) | named)[1])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(24))) == [expected] * 24
    for server in (servers.decodes[0], servers.prefill):
        links = (f'stratakv_transfer_peers{{state="{state}"}}' for state in ("in_use", "idle"))
        assert sum(metric(server, name) for name in links) >= 2


def test_several_prompts_and_choices_of_one_body_have_a_session_each(servers):
    asked = completion([tokens(60, 2), tokens(40, 3)], 6, n=2, seed=3, temperature=1.0)
    expected = texts(post(servers.unified.url, asked))
    rooms = servers.room(0) | {
        "bootstrap_host": ["127.0.0.1"] * 2,
        "bootstrap_port": [servers.join_port] * 2,
        "bootstrap_room": [7, 8],
    }
    _, decode = both(servers, 0, asked | rooms | {"cache_salt": ""})
    assert texts(decode) == expected


def test_two_requests_that_choose_otherwise_never_meet_in_one_room(servers):
    """The first token of one would be the other's. Without a seed both sides draw alike."""
    asked = completion(tokens(70, 30), 4, temperature=1.0) | {"cache_salt": "", "logprobs": 2}
    body = asked | servers.room(200)
    _, decode = both(servers, 0, body)
    assert len(decode.json()["choices"][0]["logprobs"]["tokens"]) == 4
    for number, other in enumerate((
        {"seed": 1}, {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 3}, {"logprobs": 3},
        {"cache_salt": "alice"}, {"prompt": tokens(70, 31)},
    )):  # fmt: skip
        body = asked | servers.room(201 + number)
        calls = ((servers.prefill.url, body), (servers.decodes[0].url, body | other))
        with ThreadPoolExecutor(2) as threads:
            for answer in threads.map(lambda call: post(*call), calls):
                assert "is another prompt there" in error_of(answer, 500)["message"], other


def test_prefill_names_the_session_where_it_is_asked_first(servers):
    asked = completion(tokens(90, 4), 12)
    expected = texts(post(servers.unified.url, asked))
    nulls = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    params = {"do_remote_decode": True, "do_remote_prefill": False} | nulls
    first = asked | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": params}
    named = post(servers.prefill.url, first)
    assert texts(named) == [""]
    given = named.json()["kv_transfer_params"]
    assert given["remote_port"] == servers.join_port
    decode = post(servers.decodes[0].url, asked | {"kv_transfer_params": given})
    assert texts(decode) == expected
    assert "prefill" in decode.json()["usage"]["prompt_tokens_details"]


def test_a_room_that_is_used_again_ends_at_once(servers):
    """Asked of decode alone, and of both."""
    body = completion(tokens(60, 50), 4) | servers.room(400) | {"cache_salt": ""}
    assert all(answer.status_code == 200 for answer in both(servers, 0, body))
    for answer in (post(servers.decodes[1].url, body), *both(servers, 0, body)):
        error = error_of(answer, 500)
        assert error["code"] == "request_failed_transfer"
        assert "a session is one request" in error["message"]
        assert error["message"].endswith("needs a new name for that"), "the same fails again"


def test_decode_computes_what_names_no_session(servers):
    asked = completion(tokens(50, 5), 8)
    answer = post(servers.decodes[1].url, asked)
    assert texts(answer) == texts(post(servers.unified.url, asked))
    assert "prefill" not in answer.json()["usage"]["prompt_tokens_details"]


def test_what_is_not_of_a_role_is_refused_by_name(servers):
    asked = completion(tokens(20, 6), 4)
    room = asked | servers.room(9)
    for url, body, param in (
        (servers.prefill.url, asked, "bootstrap_room"),
        (servers.unified.url, room | {"cache_salt": ""}, "bootstrap_room"),
        (servers.unified.url, room, "bootstrap_room"),
        (servers.decodes[0].url, asked | {"bootstrap_host": "127.0.0.1"}, "bootstrap_room"),
        (servers.decodes[0].url, room, "cache_salt"),
        (servers.prefill.url, room, "cache_salt"),
        (servers.decodes[0].url, asked | {"kv_transfer_params": {"do_remote_decode": True}},
         "kv_transfer_params"),
        (servers.prefill.url, asked | {"kv_transfer_params": {"what": 1}},
         "kv_transfer_params.what"),
    ):  # fmt: skip
        assert error_of(post(url, body), 400)["param"] == param


def test_a_salt_in_a_header_keeps_tenants_apart(servers):
    asked = completion(tokens(100, 7), 4) | servers.room(11)
    header = {"X-Request-Id-Cache-Salt": "alice"}
    for number, headers, cached in ((11, header, 0), (12, header, 96), (13, {}, 0)):
        body = asked | {"bootstrap_room": number} | ({} if headers else {"cache_salt": "bob"})
        _, decode = both(servers, 0, body, headers=headers)
        details = decode.json()["usage"]["prompt_tokens_details"]
        assert (details["cached_tokens"], details["prefill"]["cached_tokens"]) == (cached, cached)


def test_a_prefill_server_that_cannot_be_reached_is_named(servers):
    body = completion(tokens(20, 8), 4) | servers.room(14) | {"cache_salt": ""}
    nobody = free_port()
    error = error_of(post(servers.decodes[0].url, body | {"bootstrap_port": nobody}), 500)
    assert error["code"] == "request_failed_transfer"
    assert f"127.0.0.1:{nobody} cannot be reached" in error["message"]


def test_another_model_is_refused_with_both_values(servers, tmp_path):
    path = train_tokenizer(tmp_path / "other")
    tiny_model("gemma3", seed=5).save_pretrained(path)
    with ExitStack() as undo:
        other = Fleet(tmp_path, undo).server(path, "--role", "decode")
        ready(other)
        body = completion(tokens(20, 8), 4) | servers.room(15) | {"cache_salt": ""}
        error = error_of(post(other.url, body), 500)
    assert "model is '" in error["message"]
    assert "' here and '" in error["message"]


# -- routers -------------------------------------------------------------------------------------


def test_our_router_answers_as_one_server_does(servers):
    prompts = [tokens(80, 20), tokens(40, 21), "the quick brown fox jumps"]
    answers_as_one_server_does(servers.router.url, servers.unified.url, prompts)
    assert streamed(servers.router.url, HELLO, CHAT) == streamed(servers.unified.url, HELLO, CHAT)
    models = httpx.get(f"{servers.router.url}/v1/models", timeout=PATIENCE_S)
    assert models.json()["data"][0]["object"] == "model"


def test_our_router_keeps_a_salt_and_passes_a_refusal_on(servers):
    asked = completion(tokens(100, 22), 4)
    for salt, cached in (("alice", 0), ("alice", 96), ("bob", 0)):
        details = post(servers.router.url, asked | {"cache_salt": salt}).json()["usage"]
        assert details["prompt_tokens_details"]["prefill"]["cached_tokens"] == cached
    for body in ({"prompt": "x", "what": 1}, {"prompt": "x", "temperature": 9}, {}):
        ours = error_of(post(servers.router.url, body), 400)
        assert ours == error_of(post(servers.unified.url, body), 400)
    url = servers.router.url + COMPLETIONS
    broken = httpx.post(url, content=b"[", timeout=PATIENCE_S)
    assert error_of(broken, 400)["code"] == "invalid_json"


def aborted(servers) -> tuple[float, float]:
    """Of the prefill server, and of those that decode."""
    name = "stratakv_requests_aborted_total"
    return metric(servers.prefill, name), sum(metric(one, name) for one in servers.decodes)


def test_a_client_that_leaves_in_the_middle_of_a_stream_ends_its_request(servers):
    before = aborted(servers)[1]
    asked = completion(tokens(60, 23), 300, n=4, stream=True)
    url = f"{servers.router.url}{COMPLETIONS}"
    with httpx.stream("POST", url, json=asked, timeout=PATIENCE_S) as answer:
        next(answer.iter_lines())
    wait_until(lambda: aborted(servers)[1] == before + 4, "its end")


def test_a_client_that_leaves_before_its_answer_ends_both_sides(servers):
    """Those that decode are stopped meanwhile, so that prefill waits for them."""
    before = aborted(servers)
    body = json.dumps(completion(tokens(60, 24), 4)).encode()
    for one in servers.decodes:
        one.process.send_signal(signal.SIGSTOP)
    try:
        port = int(servers.router.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: metric(servers.prefill, "stratakv_requests_waiting") == 1)
        name = "stratakv_requests_aborted_total"
        wait_until(lambda: metric(servers.prefill, name) == before[0] + 1, "its end at prefill")
    finally:
        for one in servers.decodes:
            one.process.send_signal(signal.SIGCONT)
    waits = 'stratakv_transfer_sessions{state="waiting_for_input"}'
    wait_until(lambda: not any(metric(one, waits) for one in servers.decodes), "its end")


@pytest.mark.parametrize("name", ROUTERS)
def test_a_released_router_in_front_answers_as_one_server_does(servers, name):
    decodes = [one.url for one in servers.decodes]
    router = released_router(servers.fleet, name, servers.prefill.url, servers.join_port, decodes)
    prompts = ["the quick brown fox", "jumps over the lazy dog " * 9]
    urls = router.url, servers.unified.url
    answers_as_one_server_does(*urls, prompts, cache_salt="", model="tiny")
    if name == "sglang":  # which drops a chat's salt
        refused = post(router.url, HELLO | {"cache_salt": "alice"}, CHAT)
        assert "needs its tenant's salt" in refused.text
        assert refused.status_code == 400
    router.kill()


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["decode", "prefill"])
def test_a_server_that_is_killed_fails_its_requests_and_joins_again(servers, who):
    """Those of the other server that decodes go on; a restart is all that is needed."""
    killed = servers.prefill if who == "prefill" else servers.decodes[0]
    asked = completion(tokens(70, 9), 10)
    expected = texts(post(servers.unified.url, asked))
    first, again = (23, 33) if who == "prefill" else (20, 30)
    _, decode = both(servers, 0, asked | servers.room(first) | {"cache_salt": ""})
    assert texts(decode) == expected
    if who == "prefill":  # decode waits for it, or writes are under way
        with ThreadPoolExecutor(1) as threads:
            body = asked | servers.room(21) | {"cache_salt": "", "prompt": tokens(200, 10)}
            waits = threads.submit(post, servers.decodes[0].url, body)
            held = 'stratakv_transfer_sessions{state="transferring"}'
            wait_until(lambda: metric(servers.decodes[0], held) == 1, "a session that waits")
            killed.kill()
            assert "is lost" in error_of(waits.result(PATIENCE_S), 500)["message"]
        error = error_of(post(servers.router.url, asked), 502)
        assert error["code"] == "prefill_unreachable"
        servers.prefill = servers.fleet.again(killed)
        ready(servers.prefill)
        # Whose join was refused meanwhile rests, and fails a request that comes before it has.
        wait_until(
            lambda: all(post(servers.router.url, asked).status_code == 200 for _ in range(4)),
            "answers over the prefill server that is there again",
        )
    else:
        killed.kill()
        _, other = both(servers, 1, asked | servers.room(22) | {"cache_salt": ""})
        assert texts(other) == expected
        for _ in range(2):
            assert texts(post(servers.router.url, asked)) == expected
        servers.decodes[0] = servers.fleet.again(killed)
        ready(servers.decodes[0])
    for number in range(2):
        _, decode = both(servers, number, asked | servers.room(again + number) | {"cache_salt": ""})
        assert texts(decode) == expected
        assert texts(post(servers.router.url, asked)) == expected


def test_nothing_is_left_of_any_session(servers):
    def over():
        names = [
            f'stratakv_transfer_sessions{{state="{state}"}}'
            for state in ("bootstrapping", "waiting_for_input", "transferring")
        ]
        held = [metric(one, name) for one in (servers.prefill, *servers.decodes) for name in names]
        pages = [metric(one, 'stratakv_transfer_pages{state="leased"}') for one in servers.decodes]
        names = [f'stratakv_transfer_peers{{state="{state}"}}' for state in ("joining", "in_use")]
        links = [metric(one, name) for one in (servers.prefill, *servers.decodes) for name in names]
        return not any(held + pages + links)

    wait_until(over, "the end of every session")
    for one in (servers.prefill, *servers.decodes):
        assert httpx.post(f"{one.url}/flush_cache", timeout=PATIENCE_S).json() == {"flushed": True}


def test_chats_are_handed_over_too(servers):
    body = {
        "messages": [{"role": "user", "content": "the quick brown fox"}],
        "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True,
    }  # fmt: skip
    expected = post(servers.unified.url, body, CHAT).json()["choices"]
    for number in range(2):
        asked = body | servers.room(40 + number) | {"cache_salt": ""}
        urls = (servers.prefill.url, servers.decodes[number].url)
        with ThreadPoolExecutor(2) as threads:
            _, decode = threads.map(lambda url, asked=asked: post(url, asked, CHAT), urls)
        assert decode.json()["choices"] == expected

"""Why a prompt was computed, asked of a real server: over HTTP, and from the command line."""

import json

import httpx
import pytest
import torch

from stratakv.cli import main
from stratakv.serve.tokenizer import Tokenizer
from stratakv.testing.patience import PATIENCE_S
from tests.real_server import CHAT, COMPLETIONS, SMALL_POOLS, completion, real_server, tokens
from tests.serving import EchoEngine, error_of, make_service, running, train_tokenizer

WHY = "/cache/why_miss"


@pytest.fixture(scope="module")
def live(directory):
    torch.set_num_threads(1)
    with real_server(directory, SMALL_POOLS) as found:
        yield found


@pytest.fixture
def http(live):
    with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as found:
        yield found


def sent(http, prompt, **more):
    answer = http.post(COMPLETIONS, json=completion(prompt, 1) | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def why(http, **body):
    answer = http.post(WHY, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["requests"]


def test_of_a_request_by_the_id_of_its_answer_and_by_its_clients_own(http):
    first = sent(http, tokens(100, 1), cache_salt="one")
    mine = sent(http, [*tokens(100, 1)[:50], 5, 6], cache_salt="one", rid="mine")
    (found,) = why(http, request=mine)
    assert found == {**why(http, request="mine")[0], **{name: found[name] for name in ("ago_s",)}}
    assert found["parting"] == {
        "other": f"{first}-0", "tokens": 50, "difference": "token",
    }  # fmt: skip
    assert found["prompt_tokens"] == 52
    assert sum(found["cached"].values()) + sum(one["tokens"] for one in found["lost"]) <= 48


def test_of_two_bodies_as_they_would_be_sent(http):
    chat = {"messages": [{"role": "user", "content": "The quick brown fox"}], "max_tokens": 1}
    assert http.post(CHAT, json=chat).status_code == 200
    (same,) = why(http, prompts=[chat, chat])
    (other,) = why(http, prompts=[chat, chat | {"cache_salt": "x"}])
    assert (same["parting"]["difference"], other["parting"]["difference"]) == ("end", "cache_salt")
    assert same["usable"] >= other["usable"] == 0
    assert same["request"] is same["cached"] is same["lost"] is None


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "request"),
        ({"request": "a", "prompts": [{}, {}]}, 400, "request"),
        ({"request": 7}, 400, "request"),
        ({"request": "nobody"}, 404, "request"),
        ({"prompts": [{"prompt": "a"}]}, 400, "prompts"),
        ({"prompts": [{"prompt": "a"}, 3]}, 400, "prompts"),
        ({"prompts": [{"prompt": "a"}, {"prompt": ["a", "b"]}]}, 400, "prompts"),
        ({"prompts": [{"prompt": "a"}, {"prompt": [5] * 9000}]}, 400, "prompts"),
        ({"prompts": [{"prompt": "a"}, {"prompt": "a", "model": "b"}]}, 404, "model"),
        ({"prompts": [{"prompt": "a"}, {"prompt": "a", "foo": 1}]}, 400, "foo"),
        ({"what": 1}, 400, "what"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(http, body, status, param):
    assert error_of(http.post(WHY, json=body), status)["param"] == param


def test_from_the_command_line(live, http, tmp_path, capsys, monkeypatch):
    earlier, later = completion(tokens(60, 7), 1), completion([*tokens(60, 7)[:40], 3], 1)
    name = sent(http, earlier["prompt"])
    found = tmp_path / "found.json"
    assert main(["why-miss", name, "--url", live.url, "--json", str(found)]) == 0
    assert f"request {name}-0, " in capsys.readouterr().out
    assert json.loads(found.read_text())["requests"][0]["prompt_tokens"] == 60
    for path, body in (("a", earlier), ("b", later)):
        (tmp_path / path).write_text(json.dumps(body))
    files = [str(tmp_path / path) for path in ("a", "b")]
    assert main(["why-miss", "--url", live.url, "--prompts", *files]) == 0
    shown = capsys.readouterr().out
    assert "a prompt of 41 tokens: 32 could be reused at this moment" in shown
    assert "for 40 tokens, which are 2 whole pages of 16; token 40 is another" in shown
    assert main(["why-miss", "nobody", "--url", live.url]) == 2
    assert "nothing is remembered of a request 'nobody'" in capsys.readouterr().err
    (tmp_path / "a").write_text("[")
    for wrong in ([], [name, "--prompts", *files], ["--prompts", *files], [name, "--url", "x"]):
        assert main(["why-miss", *wrong]) == 2
        assert "stratakv: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "given", "status"),
    [
        ({}, None, 404),
        ({"api_key": "a"}, "a", 403),
        ({"api_key": "a", "admin_key": "b"}, "a", 401),
        ({"api_key": "a", "admin_key": "b"}, "b", 404),
        ({"admin_key": "b"}, None, 401),
    ],
)
def test_it_shows_others_requests_so_it_is_the_operators(
    tmp_path, monkeypatch, capsys, keys, given, status
):
    engine = EchoEngine()
    service = make_service(Tokenizer(train_tokenizer(tmp_path)), engine, **keys)
    headers = {} if given is None else {"Authorization": f"Bearer {given}"}
    with running(service, engine) as live:
        answer = httpx.post(live.url + WHY, json={"request": "x"}, headers=headers)
        assert answer.status_code == status
        monkeypatch.setenv("STRATAKV_ADMIN_KEY", given or "")
        assert main(["why-miss", "x", "--url", live.url]) == 2
    named = "--admin-key, which is taken from STRATAKV_ADMIN_KEY" in capsys.readouterr().err
    assert named == (status == 401)

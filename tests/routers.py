"""Routers before servers of a role each, for tests: the released ones as processes, and what the
clients of any must get.
"""

import importlib.util
import json
import sys
from collections.abc import Sequence

import httpx

from stratakv.testing.patience import PATIENCE_S
from tests.disagg_servers import Fleet, Started, ready
from tests.fixtures.servers import free_port, lacking
from tests.real_server import CHAT, COMPLETIONS, completion

ROUTERS = {
    "sglang": ("sglang_router.launch_router", "--pd-disaggregation"),
    "vllm": ("vllm_router.launch_router", "--vllm-pd-disaggregation"),
}


def released_router(
    fleet: Fleet, name: str, prefill: str, join_port: int, decodes: Sequence[str]
) -> Started:
    """It is ready."""
    module, flag = ROUTERS[name]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        lacking(module.partition(".")[0], "pip install 'stratakv[routers]' (Linux, x86-64)")
    join = [str(join_port)] if name == "sglang" else []
    behind = [part for url in decodes for part in ("--decode", url)]
    port, metrics = free_port(), free_port()
    router = fleet.start(
        port, sys.executable, "-m", module, flag, "--prefill", prefill, *join, *behind,
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics),
        "--policy", "round_robin",
    )  # fmt: skip
    ready(router)
    return router


def post(url: str, body: dict[str, object], path: str = COMPLETIONS, **more) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=PATIENCE_S, **more)


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def streamed(url: str, body: dict[str, object], path: str = COMPLETIONS) -> list[str]:
    """The text of each choice, from the events of a stream; an error is among them as its code."""
    found: dict[int, str] = {}
    asked = body | {"stream": True}
    with httpx.stream("POST", url + path, json=asked, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        event = json.loads(line)
        if "error" in event:
            return [event["error"]["code"]]
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + text
    return [found[at] for at in sorted(found)]


HELLO = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "the quick brown fox"}],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
}


def drawn_tokens(url: str, body: dict[str, object]) -> list[str]:
    return post(url, body).json()["choices"][0]["logprobs"]["tokens"]


def answers_as_one_server_does(url: str, one: str, prompts: list, **more: object) -> None:
    """Completions and chats, streamed and not; each server that decodes has its turn."""
    for number in range(4):
        prompt = prompts[number % len(prompts)]
        asked = completion(prompt, 9, **more)
        expected = texts(post(one, asked))
        answer = post(url, asked)
        assert texts(answer) == expected
        assert "prefill" in answer.json()["usage"]["prompt_tokens_details"]
        assert streamed(url, asked) == expected
        drawn = asked | {"temperature": 1.0, "logprobs": 2}  # both sides need all of it
        assert len(drawn_tokens(url, drawn)) == 9
        seeded = drawn | {"seed": 3}
        assert drawn_tokens(url, seeded) == drawn_tokens(one, seeded)
    chat = HELLO | more
    expected = post(one, chat, CHAT).json()["choices"]
    header = {"X-Request-Id-Cache-Salt": ""}
    assert post(url, chat, CHAT, headers=header).json()["choices"] == expected

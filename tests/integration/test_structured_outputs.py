"""Answers bound to a form, by a real engine behind a real server whose pages run short: a random
model writes JSON, over retractions, streamed or whole, and the same again from the cache.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from stratakv.testing.patience import PATIENCE_S
from tests.real_server import CHAT, COMPLETIONS, SMALL_POOLS, real_server, tokens
from tests.serving import error_of

CONFIG = replace(SMALL_POOLS, reserve_tokens=1)


class Answer(pydantic.BaseModel, extra="forbid"):
    mood: Literal["calm", "Grüße", "wild"]
    count: Literal[1, 22, 333]


@pytest.fixture(scope="module")
def live(directory):
    with real_server(directory, CONFIG) as found:
        yield found
        found.settled()


@pytest.fixture
def http(live):
    with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as found:
        yield found


def answer(http, **body):
    found = http.post(COMPLETIONS, json={"temperature": 0, "max_tokens": 120} | body)
    assert found.status_code == 200, found.text
    (choice,) = found.json()["choices"]
    return choice["text"], choice["finish_reason"]


PATTERN = r"[a-f]{60,80}(ja|nein)"


def test_many_at_once_have_their_own_forms_also_where_pages_run_short(http, live):
    bodies = [
        {"prompt": tokens(150, at), "regex": PATTERN, "temperature": at % 2}
        if at % 3
        else {"prompt": tokens(150, at), "max_tokens": 90, "ignore_eos": True}
        for at in range(12)
    ]
    before = live.parts.cache.tiers.pools.counters.retracted
    with ThreadPoolExecutor(len(bodies)) as pool:
        found = list(pool.map(lambda body: answer(http, **body), bodies))
    assert live.parts.cache.tiers.pools.counters.retracted > before, "nobody was retracted"
    for body, (text, finish) in zip(bodies, found, strict=True):
        if "regex" in body:
            assert finish == "stop"
            assert re.fullmatch(PATTERN, text)
        elif finish == "length":
            assert not re.fullmatch(PATTERN, text)
    greedy = [at for at, body in enumerate(bodies) if "regex" in body and not body["temperature"]]
    assert [answer(http, **bodies[at]) for at in greedy] == [found[at] for at in greedy]


def test_openais_client_parses_answers(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        for at in range(4):
            found = client.chat.completions.parse(
                model=client.models.list().data[0].id,
                messages=[{"role": "user", "content": f"say {at}"}],
                response_format=Answer,
                seed=at,
                max_tokens=400,
            )
            assert isinstance(found.choices[0].message.parsed, Answer)


def test_a_stream_has_the_form_too(http):
    schema = Answer.model_json_schema() | {"x-guidance": {"whitespace_flexible": False}}
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        },
        "stream": True,
        "seed": 3,
        "max_tokens": 200,
    }
    text = ""
    for line in http.post(CHAT, json=body).text.split("\n\n"):
        if line and "[DONE]" not in line:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            text += choice["delta"].get("content", "")
    Answer.model_validate_json(text)


@pytest.mark.parametrize(
    ("form", "right"),
    [
        ({"guided_choice": ["yes", "no"]}, r"yes|no"),
        ({"ebnf": 'root ::= "a" [0-9] [0-9] | "b"'}, r"a[0-9][0-9]|b"),
        ({"structured_outputs": {"regex": "x{3,9}"}}, r"x{3,9}"),
    ],
)
def test_other_forms(http, form, right):
    text, finish = answer(http, prompt=tokens(40, 99), **form)
    assert finish == "stop"
    assert re.fullmatch(right, text)


def test_a_form_that_is_none_is_a_400_by_name(http):
    for form in ({"regex": "(a"}, {"guided_json": {"type": "objekt"}}, {"ebnf": "root ::= b"}):
        error = error_of(http.post(COMPLETIONS, json={"prompt": [1, 2], **form}), 400)
        assert error["param"] == next(iter(form))
    for extra in ({"ignore_eos": True}, {"min_tokens": 2}):
        body = {"prompt": [1, 2], "regex": "a", **extra}
        error = error_of(http.post(COMPLETIONS, json=body), 400)
        assert error["param"] == next(iter(extra))

"""Calls of tools over HTTP: told to the model, read from its answer, streamed or whole, and forced
by a grammar. The scripted engine says its prompt again, so that a message is the answer it gets.
"""

import json
from dataclasses import replace

import httpx
import openai
import pydantic
import pytest

from stratakv.serve.tokenizer import Tokenizer
from stratakv.testing.patience import PATIENCE_S
from tests.real_server import CHAT, SMALL_POOLS, real_server
from tests.serving import EchoEngine, make_service, running, train_tokenizer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
PLAIN = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ASKED = {"tools": [WEATHER], "stop": ["<tools>"], "temperature": 0}


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    tokenizer = Tokenizer(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    engine = EchoEngine()
    with running(make_service(tokenizer, engine), engine) as live:
        yield live


@pytest.fixture
def client(echo):
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def asked(client, text, **more):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="echo", messages=messages, **(ASKED | more))


def test_a_call_is_read_from_an_answer(client):
    (choice,) = asked(client, f"well {CALL} {CALL}").choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "<user>well"
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["weather"] * 2
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Köln"}] * 2
    assert len({call.id for call in calls}) == 2
    (choice,) = asked(client, f"{CALL}{CALL}", parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1


def test_a_stream_has_the_same_calls(client):
    whole = asked(client, f"well {CALL} {CALL}").choices[0].message
    text, calls, finish = "", [], None
    for chunk in asked(client, f"well {CALL} {CALL}", stream=True):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        finish = choice.finish_reason or finish
    assert (text, finish) == (whole.content, "tool_calls")
    assert [call.index for call in calls] == [0, 1]
    assert [call.function for call in calls] == [
        openai.types.chat.chat_completion_chunk.ChoiceDeltaToolCallFunction(
            **call.function.model_dump()
        )
        for call in whole.tool_calls
    ]


def test_an_answer_without_a_call_is_text(client):
    (choice,) = asked(client, "no <tool_call> here").choices
    assert (choice.message.content, choice.finish_reason) == ("<user>no <tool_call> here", "stop")
    assert choice.message.tool_calls is None
    (choice,) = asked(client, CALL, tool_choice="none", stop=["<assistant>"]).choices
    assert choice.message.content == f"<user>{CALL}"


def rendered(echo, **body):
    tokens = httpx.post(f"{echo.url}/tokenize", json=body, timeout=PATIENCE_S).json()["tokens"]
    found = httpx.post(f"{echo.url}/detokenize", json={"tokens": tokens}, timeout=PATIENCE_S)
    return found.json()["prompt"]


def test_the_template_shows_tools_calls_and_results(echo):
    messages = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function",
                 "function": {"name": "weather", "arguments": '{"city":"Köln"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]  # fmt: skip
    found = rendered(echo, messages=messages, tools=[WEATHER])
    shown = json.dumps([WEATHER], ensure_ascii=False)
    call = '{"name": "weather", "arguments": {"city": "Köln"}}'
    assert found == f"<user>?<assistant><call>{call}<tool>rain<tools>{shown}</tools><assistant>"
    assert "<tools>" not in rendered(echo, messages=messages, tools=[WEATHER], tool_choice="none")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"regex": "a"}, "regex"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"messages": [{"role": "tool", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [1]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "[1]"}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": ""}}]}]},
         "messages[0].tool_calls[0].function.name"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_is_named(echo, more, param):
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [WEATHER]} | more
    answer = httpx.post(f"{echo.url}{CHAT}", json=body, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


# -- forced, by a real engine --------------------------------------------------------------------


@pytest.fixture(scope="module")
def forced(directory):
    with real_server(directory, ROOMY) as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as found:
            yield found
        live.settled()


ROOMY = replace(SMALL_POOLS, device_memory="4MiB", host_memory="8MiB")


class Leg(pydantic.BaseModel):
    mode: str = pydantic.Field(pattern="^(train|bus)$")


class trip(pydantic.BaseModel):  # noqa: N801 - the function's name
    """Plan a trip."""

    city: str = pydantic.Field(pattern="^(Rom|Oslo)$")
    legs: list[Leg] = pydantic.Field(min_length=1, max_length=2)


class now(pydantic.BaseModel):  # noqa: N801 - the function's name
    pass


NOW = openai.pydantic_function_tool(now)
TRIP = openai.pydantic_function_tool(trip)
QUESTION = [{"role": "user", "content": "Where to?"}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_one_of_the_tools(forced, stream):
    names = set()
    for seed in range(4):
        asked = {"messages": QUESTION, "tools": [TRIP, NOW], "seed": seed, "max_tokens": 300}
        asked |= {"model": forced.models.list().data[0].id, "tool_choice": "required"}
        if stream:
            with forced.chat.completions.stream(**asked) as events:
                choice = events.get_final_completion().choices[0]
        else:
            asked |= {"parallel_tool_calls": False}
            choice = forced.chat.completions.parse(**asked).choices[0]
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        for call in choice.message.tool_calls:
            names.add(call.function.name)
            if call.function.name == "trip":
                assert isinstance(call.function.parsed_arguments, trip)
    assert names <= {"trip", "now"}
    assert names


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_call_has_arguments_of_its_schema(forced, stream):
    asked = {"messages": QUESTION, "tools": [NOW, TRIP], "seed": 1, "max_tokens": 400}
    asked |= {"model": forced.models.list().data[0].id}
    asked |= {"tool_choice": {"type": "function", "function": {"name": "trip"}}}
    if stream:
        with forced.chat.completions.stream(**asked) as events:
            kinds = [event.type for event in events]
            choice = events.get_final_completion().choices[0]
        assert kinds.count("tool_calls.function.arguments.delta") > 3
    else:
        choice = forced.chat.completions.parse(**asked).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.message.content) == ("trip", None)
    assert call.function.parsed_arguments.city in ("Rom", "Oslo")


def test_a_form_of_calls_that_is_not_known_is_refused_by_the_name_of_the_flag(forced):
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        forced.chat.completions.create(
            model=forced.models.list().data[0].id, messages=QUESTION, tools=[PLAIN]
        )

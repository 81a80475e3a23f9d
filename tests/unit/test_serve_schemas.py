import json
import re
from functools import reduce

import numpy as np
import pytest

from stratakv.cache.records import CacheUse
from stratakv.serve.decoding import TextOptions
from stratakv.serve.errors import ApiError
from stratakv.serve.fields import parse_object
from stratakv.serve.json_body import MOST_DEPTH, MOST_VALUES, read_object
from stratakv.serve.schemas import WHAT_FITS, chat_call, completion_call, messages

VOCAB = 100
USER = {"role": "user", "content": "hi"}


def completion(**extra):
    return completion_call({"prompt": "hi", **extra}, VOCAB)


def chat(**extra):
    return chat_call({"messages": [USER], **extra}, VOCAB)


def test_defaults_are_openais():
    decoding = completion().decoding
    sampling = decoding.sampling
    assert (decoding.n, decoding.max_tokens, sampling.temperature) == (1, None, 1.0)
    assert (sampling.top_p, sampling.top_k, decoding.seed) == (1.0, 0, None)
    assert (decoding.text.stop, sampling.logprobs, decoding.stream) == ((), None, False)
    assert not sampling.changes_logits


def test_null_means_absent():
    names = ["temperature", "n", "stop", "seed", "stream_options", "tools", "logprobs", "regex"]
    names += ["logit_bias", "stop_token_ids", "min_tokens", "rid", "skip_special_tokens"]
    assert completion(**dict.fromkeys(names)).decoding == completion().decoding


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [4]], ["a", [4]]),
    ],
)
def test_every_form_of_a_prompt(prompt, wanted):
    found = completion_call({"prompt": prompt}, VOCAB).prompts
    assert [p if isinstance(p, str) else p.tolist() for p in found] == wanted
    assert all(p.dtype == np.int32 for p in found if not isinstance(p, str))


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": float("inf")}, "temperature", "invalid_value"),
        ({"temperature": 10**400}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_p": 1.01}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 10**6}, "n", "invalid_value"),
        ({"n": 1.0}, "n", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 10**5000}, "max_tokens", "invalid_value"),
        ({"seed": 1 << 63}, "seed", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"stop": ["a"] * 65}, "stop", "invalid_value"),
        ({"stop": [1]}, "stop", "invalid_type"),
        ({"stop": {}}, "stop", "invalid_type"),
        ({"stop": "\ud800"}, "stop", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"cache_salt": "\ud800"}, "cache_salt", "invalid_value"),
        ({"cache_salt": 3}, "cache_salt", "invalid_type"),
        ({"cache_salt": "x" * 513}, "cache_salt", "invalid_value"),
        ({"priority": 101}, "priority", "invalid_value"),
        ({"priority": -1}, "priority", "invalid_value"),
        ({"priority": 1.0}, "priority", "invalid_type"),
        ({"frequency_penalty": 2.01}, "frequency_penalty", "invalid_value"),
        ({"presence_penalty": -3}, "presence_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"min_p": 1.5}, "min_p", "invalid_value"),
        ({"min_tokens": -1}, "min_tokens", "invalid_value"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
        ({"stop_token_ids": 7}, "stop_token_ids", "invalid_type"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids", "invalid_type"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids", "invalid_value"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "invalid_value"),
        ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"\u0665": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": True}}, "logit_bias", "invalid_type"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias", "invalid_value"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
        ({"rid": ["a"]}, "rid", "invalid_type"),
        ({"rid": "a\n"}, "rid", "invalid_value"),
        ({"request_id": "é"}, "request_id", "invalid_value"),
        ({"request_id": "x" * 129}, "request_id", "invalid_value"),
        ({"regex": "a+", "json_schema": "{}"}, "json_schema", "invalid_value"),
        ({"regex": "a+", "min_tokens": 2}, "min_tokens", "invalid_value"),
        ({"regex": "a+", "ignore_eos": True}, "ignore_eos", "invalid_value"),
        ({"bad_words": ["a"]}, "bad_words", "unsupported_parameter"),
        ({"best_of": 3}, "best_of", "unsupported_parameter"),
        ({"echo": 1}, "echo", "invalid_type"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo", "invalid_value"),
        ({"max_tokens": 0, "echo": False}, "max_tokens", "invalid_value"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"temprature": 0}, "temprature", "unknown_parameter"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"model": 5}, "model", "invalid_type"),
        ({"cache": "no-cache"}, "cache", "invalid_value"),
        ({"cache": ["bypass"]}, "cache", "invalid_type"),
    ],
)
def test_what_is_wrong_is_named(extra, param, code):
    with pytest.raises(ApiError) as caught:
        completion(**extra)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], [[]], [1, "a"], [1, True], [[1], 2], [-1], [VOCAB], [10**400], 7, {}],
)  # fmt: skip
def test_prompts_that_are_none(prompt):
    with pytest.raises(ApiError) as caught:
        completion_call({"prompt": prompt}, VOCAB)
    assert caught.value.status == 400
    assert caught.value.param.startswith("prompt")


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "echo": False, "logit_bias": {}},
        {"n": 3, "best_of": 3},
        {"min_p": 0, "skip_special_tokens": True},
        {"regex": None, "bad_words": [], "structured_outputs": None, "detokenize": True},
    ],
)
def test_fields_that_change_nothing_are_taken(extra):
    assert completion(**extra).prompts == ("hi",)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_what_a_chat_may_not_ask(extra, param):
    with pytest.raises(ApiError) as caught:
        chat(**extra)
    assert caught.value.param == param


def test_log_probabilities_of_a_chat():
    assert chat().decoding.sampling.logprobs is None
    assert chat(logprobs=True).decoding.sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).decoding.sampling.logprobs == 4


def test_salt_and_priority_are_read_by_both_endpoints():
    for read in (completion, chat):
        plain, both = read().decoding, read(cache_salt="me", priority=7).decoding
        assert (plain.salt, plain.priority) == (None, 0)
        assert (both.salt, both.priority) == ("me", 7)


def test_what_changes_the_logits_is_read_by_both_endpoints():
    for read in (completion, chat):
        found = read(
            frequency_penalty=1,
            presence_penalty=-0.5,
            repetition_penalty=1.5,
            min_p=0.1,
            min_tokens=3,
            stop_token_ids=[4, 4, 9],
            logit_bias={"5": -100, "6": 0},
        ).decoding
        sampling = found.sampling
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (1.0, -0.5)
        assert (sampling.repetition_penalty, sampling.min_p, sampling.min_tokens) == (1.5, 0.1, 3)
        assert sampling.stop_tokens == (4, 9)
        assert sampling.logit_bias == ((5, -100.0),)
        assert found.text.min_tokens == 3


def test_least_tokens_do_not_reach_a_server_that_a_router_asks_for_one():
    decode = {"do_remote_decode": True}
    assert completion(min_tokens=1, kv_transfer_params=decode).decoding.sampling.min_tokens == 0
    prefill = {"do_remote_prefill": True, "remote_host": "a", "remote_request_id": "b"}
    with pytest.raises(ApiError, match="does not reach") as caught:
        completion(min_tokens=1, kv_transfer_params=prefill)
    assert caught.value.param == "min_tokens"


def test_what_is_shown_of_an_answer():
    plain = completion().decoding
    assert plain.text == TextOptions()
    assert plain.id is None
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        assert completion(**{name: True}).decoding.text.keep_stop
    assert completion(skip_special_tokens=False).decoding.text.special
    assert completion(return_token_ids=True).decoding.text.token_ids
    assert completion(rid="mine").decoding.id == completion(request_id="mine").decoding.id == "mine"


def test_how_a_text_becomes_tokens():
    assert completion().options.special
    assert not chat().options.special
    assert not completion(add_special_tokens=False).options.special
    assert completion().options.most is None
    assert completion(truncate_prompt_tokens=7).options.most == 7
    assert chat(truncate_prompt_tokens=-1).options.most == WHAT_FITS


def test_how_a_chat_template_is_applied():
    plain = chat().conversation
    assert (plain.opens, plain.goes_on, plain.template) == (True, False, {})
    assert not chat(add_generation_prompt=False).conversation.opens
    goes_on = chat(continue_final_message=True).conversation
    assert (goes_on.opens, goes_on.goes_on) == (False, True)
    found = chat(chat_template_kwargs={"enable_thinking": False, "ids": [1, 2]}).conversation
    assert found.template == {"enable_thinking": False, "ids": [1, 2]}


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": ["\ud800"]}}, "chat_template_kwargs"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_how_a_chat_template_is_not_applied(extra, param):
    with pytest.raises(ApiError) as caught:
        chat(**extra)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_the_newer_name_of_max_tokens_counts():
    assert chat(max_tokens=5).decoding.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).decoding.max_tokens == 7


def test_text_parts_are_lines_and_an_echoed_answer_is_taken():
    echoed = {"role": "assistant", "content": "a", "tool_calls": None, "annotations": []}
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert messages([echoed, {"role": "developer", "content": parts, "name": "x"}]) == (
        {"role": "assistant", "content": "a"},
        {"role": "system", "content": "b\nc", "name": "x"},
    )


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([3], "messages[0]"),
        ([USER, {"role": "function", "content": "x"}], "messages[1].role"),
        (
            [{**USER, "provider_specific_fields": {"a": [1]}}],
            "messages[0].provider_specific_fields",
        ),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 4}], "messages[0].content"),
        ([{"role": "user", "content": "\ud83d"}], "messages[0].content"),
        ([{**USER, "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{**USER, "name": 3}], "messages[0].name"),
        ([{**USER, "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{**USER, "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{**USER, "content": ["x"]}], "messages[0].content[0]"),
    ],
)
def test_messages_that_are_none(value, param):
    with pytest.raises(ApiError) as caught:
        messages(value)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[1]", b'"x"', b"null", b'{"a": NaN}', b'{"a": -Infinity}', b"\xff\xfe{}",
        b'{"a": "\xc3"}', b'{"a": ' + b"1" * 5000 + b"}", b"[" * 100_000, b"{}{}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_json_object(body):
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert caught.value.status == 400


def test_log_probabilities_of_a_prompt_come_from_no_cached_page():
    found = completion(echo=True, logprobs=2, max_tokens=0).decoding
    assert (found.sampling.prompt_logprobs, found.sampling.logprobs) == (2, 2)
    assert (found.text.echo, found.text.prompt_only) == (True, True)
    assert found.cache is CacheUse.STORE
    assert completion(echo=True, logprobs=0, cache="no-store").decoding.cache is CacheUse.NOTHING
    plain = completion(echo=True, max_tokens=3).decoding
    assert (plain.sampling.prompt_logprobs, plain.cache) == (None, CacheUse.ALL)
    assert not plain.text.prompt_only


def calling(*arguments):
    calls = [{"type": "function", "function": {"name": "f", "arguments": one}} for one in arguments]
    return [{"role": "assistant", "content": None, "tool_calls": calls}]


def test_values_in_arguments_count_for_the_whole_body_before_any_is_made():
    """As text in a body they are one value: 2.6 million of them took 3.4 s and 657 MB."""
    half = '{"a":[' + "[]," * (MOST_VALUES // 4) + "0]}"
    assert chat(messages=calling(half)).conversation.messages
    for wrong in (calling(half, half), [*calling(half), USER, *calling(half)]):
        with pytest.raises(ApiError, match=f"at most {MOST_VALUES} are allowed") as error:
            chat(messages=wrong)
        assert error.value.code == "too_many_values"
        assert error.value.param.endswith(".function.arguments")


def test_deep_arguments_are_refused_by_name():
    deep = '{"a":' * (MOST_DEPTH + 1) + "0" + "}" * (MOST_DEPTH + 1)
    with pytest.raises(ApiError, match=f"at most {MOST_DEPTH} are allowed") as error:
        chat(messages=calling("{}", deep))
    assert error.value.param == "messages[0].tool_calls[1].function.arguments"


@pytest.mark.parametrize("levels", [58, 400])
def test_a_deep_schema_of_a_tool_is_taken_or_refused(levels):
    inner = {"type": "string"}
    schema = reduce(
        lambda one, _: {"type": "object", "properties": {"a": one}}, range(levels), inner
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"messages": [USER], "tools": [tool], "tool_choice": "required"}
    if 2 * levels < MOST_DEPTH:
        assert chat_call(read_object(json.dumps(body).encode()), VOCAB).use
        return
    with pytest.raises(ApiError, match=f"at most {MOST_DEPTH} are allowed"):
        chat_call(read_object(json.dumps(body).encode()), VOCAB)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": 5}, "'prompt': expected a string or an array, got an integer"),
        ({"prompt": ["a", 5]}, "'prompt[1]': expected a string or an array of token ids, got an i"),
        ({"stop": 5}, "'stop': expected a string or an array of strings, got an i"),
    ],
)
def test_a_refusal_of_a_type_names_all_that_are_taken(body, words):
    with pytest.raises(ApiError, match=re.escape(f"invalid type for {words}")):
        completion(**body)


def test_a_body_with_an_endless_integer_is_refused_in_words_for_clients():
    with pytest.raises(ApiError, match=r"not valid JSON: an integer has thousands of digits$"):
        read_object(b'{"max_tokens": 1' + b"0" * 5000 + b"}")

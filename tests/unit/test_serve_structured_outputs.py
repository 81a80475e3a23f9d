"""Fields that bind an answer to a form: OpenAI's, vLLM's and SGLang's."""

import json

import pytest

from stratakv.serve.errors import ApiError
from stratakv.serve.json_body import MOST_VALUES
from stratakv.serve.structured_outputs import grammar_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def json_schema(schema):
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None, "regex": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "disable_any_whitespace": False}},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_nothing_is_asked_for(body):
    assert grammar_of(body) is None


def test_one_form_in_many_spellings():
    _, right = grammar_of(json_schema(SCHEMA))
    for body in (
        {"json_schema": json.dumps(SCHEMA)},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ):
        assert grammar_of(body) == (next(iter(body)), right)
    _, pattern = grammar_of({"regex": "a+"})
    assert grammar_of({"guided_regex": "a+"})[1] == pattern
    assert grammar_of({"structured_outputs": {"regex": "a+"}})[1] == pattern
    _, choice = grammar_of({"guided_choice": ["yes", 'n"o']})
    assert grammar_of({"structured_outputs": {"choice": ["yes", 'n"o']}})[1] == choice
    _, grammar = grammar_of({"ebnf": 'root ::= "a" | "b"'})
    assert grammar_of({"guided_grammar": 'root ::= "a" | "b"'})[1] == grammar
    assert grammar_of({"grammar": 'root ::= "a" | "b"'}) == ("grammar", grammar)
    _, any_object = grammar_of({"response_format": {"type": "json_object"}})
    assert grammar_of({"structured_outputs": {"json_object": True}})[1] == any_object


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (json_schema([]), "response_format"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"json_schema": {"a": "\ud800"}}, "json_schema"),
        ({"regex": ""}, "regex"),
        ({"regex": 3}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_choice": ["a"] * 4097}, "guided_choice"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
        ({"regex": "a", "guided_json": {}}, "guided_json"),
        ({"guided_json": '{"a":[' + "[]," * MOST_VALUES + "0]}"}, "guided_json"),
        ({"guided_json": '{"a":' * 200 + "0" + "}" * 200}, "guided_json"),
    ],
)
def test_what_is_wrong_is_named(body, param):
    with pytest.raises(ApiError) as caught:
        grammar_of(body)
    assert (caught.value.status, caught.value.param) == (400, param)

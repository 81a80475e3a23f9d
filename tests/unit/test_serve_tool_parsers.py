"""Calls of functions in answers: every form, whole and in any pieces; what is none stays text."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stratakv.core.choices import TOOL_CALL_PARSERS
from stratakv.serve.tool_parsers import (
    FORMATS,
    REQUIRED,
    CallDelta,
    MarkedCalls,
    NamedArguments,
    detected,
)

PARIS = '{"city": "Paris", "note": "a } \\" { ] </tool_call> [TOOL_CALLS] 東京"}'
OSLO = '{"city": "Oslo"}'
HERMES = (
    f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
)
BEGIN, END = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
ONE, SEP, DONE = (
    "<\uff5ctool▁call▁begin\uff5c>",
    "<\uff5ctool▁sep\uff5c>",
    "<\uff5ctool▁call▁end\uff5c>",
)
FENCE = "```"
ANSWERS = {
    "hermes": HERMES,
    "llama3_json": f'{{"name": "weather", "parameters": {PARIS}}}; '
    f'{{"name": "weather", "parameters": {OSLO}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, '
    f'{{"name": "weather", "arguments": {OSLO}}}]',
    "deepseek_v3": f"{BEGIN}{ONE}function{SEP}weather\n{FENCE}json\n{PARIS}\n{FENCE}{DONE}\n"
    f"{ONE}function{SEP}weather\n{FENCE}json\n{OSLO}\n{FENCE}{DONE}{END}",
    "deepseek_v31": f"{BEGIN}{ONE}weather{SEP}{PARIS}{DONE}{ONE}weather{SEP}{OSLO}{DONE}{END}",
}
NEWER_MISTRAL = f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]weather{OSLO}"


def read(parser, pieces):
    """Its text, and its calls as (name, arguments)."""
    parts = [part for piece in pieces for part in parser.feed(piece)] + [*parser.flush()]
    text = "".join(part for part in parts if isinstance(part, str))
    calls = [part for part in parts if isinstance(part, CallDelta)]
    assert [call.index for call in calls] == [*range(len(calls))]
    assert len({call.id for call in calls}) == len(calls)
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


BOTH = [("weather", json.loads(PARIS)), ("weather", json.loads(OSLO))]
EVERY = [*ANSWERS.items(), ("mistral", NEWER_MISTRAL)]


def test_the_flag_names_every_form():
    assert ("auto", *FORMATS) == TOOL_CALL_PARSERS


@pytest.mark.parametrize(("form", "answer"), EVERY)
def test_calls_are_read_whole_and_token_by_token(form, answer):
    assert read(MarkedCalls(FORMATS[form]), [answer]) == ("", BOTH)
    assert read(MarkedCalls(FORMATS[form]), answer) == ("", BOTH)
    assert read(MarkedCalls(FORMATS[form], parallel=False), answer) == ("", BOTH[:1])


@pytest.mark.parametrize(("form", "answer"), [one for one in EVERY if one[0] != "llama3_json"])
def test_text_before_calls_is_text_without_the_space_between(form, answer):
    found = read(MarkedCalls(FORMATS[form]), ["  Let me see.\n\n", answer, "\n  That was it. "])
    assert found == ("  Let me see.That was it. ", BOTH)


def test_llama_marks_a_call_behind_text():
    call = f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}<|eom_id|>'
    assert read(MarkedCalls(FORMATS["llama3_json"]), ["So: ", call]) == ("So:", BOTH[:1])


def test_an_array_is_what_a_required_call_is():
    whole = f'[{{"name": "weather", "parameters": {PARIS}}} , {{"name": "weather", '
    whole += f'"parameters": {OSLO}}}\n]'
    assert read(MarkedCalls(REQUIRED), whole) == ("", BOTH)
    assert read(MarkedCalls(REQUIRED), ['[{"name": "weath']) == ('{"name": "weath', [])


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("hermes", "<tool_call>weather(Paris)</tool_call>"),
        ("hermes", '<tool_call>{"name": "weather"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Par'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}'),
        ("hermes", f"<tool_call>{'x' * 600}{OSLO}"),
        ("hermes", '<tool_call>{"name" "weather"}'),
        ("hermes", "<tool_ca and < more  "),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", ' {"name": "Ada"} '),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", "[TOOL_CALLS] []"),
        ("deepseek_v31", f"{BEGIN}{ONE}weather{OSLO}"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}'),
        ("hermes", r'<tool_call>{"name": "\udfff", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"at": NaN}}'),
        ("mistral", '[TOOL_CALLS]weather{"at": -Infinity}'),
        ("deepseek_v31", f'{BEGIN}{ONE}weather{SEP}{{"city": "\\ud800"}}'),
        ("hermes", "  \n"),
        ("hermes", f"<tool_call>{'[' * 5000}{']' * 5000}"),
    ],
)
def test_what_is_no_call_stays_text(form, answer):
    assert read(MarkedCalls(FORMATS[form]), [answer]) == (answer, [])
    assert read(MarkedCalls(FORMATS[form]), answer) == (answer, [])


def test_arguments_that_a_model_spells_twice_are_read():
    twice = json.dumps({"name": "weather", "arguments": OSLO})
    assert read(MarkedCalls(FORMATS["hermes"]), [f"<tool_call>{twice}"]) == ("", BOTH[1:])


MARKS = [
    "{", "}", "[", "]", '"', "\\", " ", "\n", ",", ";", "a", '{"name": "f", "arguments": {}}',
    '{"name": "f", "parameters": {"x": [1]}}', FENCE, "<", "function",
    *(mark for form in FORMATS.values() for mark in (*form.opens, *form.around)), SEP, "[ARGS]",
]  # fmt: skip


@pytest.mark.parametrize("form", [*FORMATS.values(), REQUIRED], ids=[*FORMATS, "required"])
@given(words=st.lists(st.sampled_from(MARKS), max_size=14), cuts=st.lists(st.integers(1, 9)))
@example(words=["<tool_call>", "{", "<tool_call>"], cuts=[1])
def test_it_does_not_matter_how_an_answer_is_cut(form, words, cuts):
    answer, pieces, at = "".join(words), [], 0
    for cut in cuts:
        pieces.append(answer[at : at + cut])
        at += cut
    pieces.append(answer[at:])
    whole = read(MarkedCalls(form), [answer])
    assert read(MarkedCalls(form), pieces) == whole
    if not whole[1] and form is not REQUIRED:
        assert whole[0] == answer


def test_the_arguments_of_a_named_call_come_as_they_are_written():
    parser = NamedArguments("weather", "call_1")
    assert parser.feed("") == []
    assert parser.feed('{"ci') == [CallDelta(0, '{"ci', "weather", "call_1")]
    assert parser.feed('ty"') == [CallDelta(0, 'ty"')]
    assert parser.flush() == []


def test_ids_are_such_as_templates_take():
    (call,) = MarkedCalls(FORMATS["mistral"]).feed(
        f'[TOOL_CALLS][{{"name":"f","arguments":{OSLO}}}]'
    )
    assert len(call.id) == 9
    assert call.id.isalnum()


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>\\n{...}</tool_call>", "hermes"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<\uff5ctool▁calls▁begin\uff5c>```json", "deepseek_v3"),
        ("<\uff5ctool▁calls▁begin\uff5c>", "deepseek_v31"),
        ('{"name": ..., "parameters": ...} ipython', "llama3_json"),
        ("<tool_call><function=name>", None),
        ("{{ message.content }}", None),
    ],
)
def test_the_form_is_seen_in_a_template(template, form):
    assert detected(template) is (None if form is None else FORMATS[form])

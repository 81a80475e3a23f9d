"""Grammars by row: what the masks allow is the form, wherever a request goes on."""

import json
import random
import re

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from stratakv.engine.grammars import Grammar, TokenMasks
from stratakv.engine.processed_logits import masked
from stratakv.serve import grammars as grammars_module
from stratakv.serve import grammars as serve_grammars
from stratakv.serve.grammars import GuidedGrammars, grammar_tokenizer
from stratakv.serve.structured_outputs import MAX_CHOICES, grammar_of
from stratakv.serve.tokenizer import Tokenizer
from tests.serving import EOS, train_tokenizer

VOCAB = 410
PATTERN = r"(ab|cd){2,5}[0-9]{3}€"
REGEX = Grammar(LLMatcher.grammar_from_regex(PATTERN))
SCHEMA = Grammar(
    LLMatcher.grammar_from_json_schema(
        {
            "type": "object",
            "properties": {"kind": {"enum": ["Grüße", "fox"]}, "n": {"type": "boolean"}},
            "required": ["kind", "n"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    )
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def grammars(tokenizer):
    (eos,) = tokenizer.encode(EOS).tolist()
    return GuidedGrammars(lambda: grammar_tokenizer(tokenizer.serialized, VOCAB, (eos, 9999)))


def allowed(grammars, *rows):
    words = grammars.masks(np.array(rows, np.int32))
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def generate(grammars, row, eos, draw, tokens):
    """To the end, from what ``row`` has."""
    while not tokens or tokens[-1] != eos:
        (options,) = allowed(grammars, row)
        tokens.append(draw.choice(options))
        grammars.append(np.array([row], np.int32), np.array(tokens[-1:], np.int32))
    return tokens


@pytest.mark.parametrize("seed", range(12))
def test_what_is_generated_has_the_form(grammars, tokenizer, seed):
    (eos,) = tokenizer.encode(EOS).tolist()
    draw = random.Random(seed)
    for row, grammar in enumerate((REGEX, SCHEMA)):
        assert grammars.refusal(grammar) is None
        grammars.begin(row, grammar, np.empty(0, np.int32))
    texts = [tokenizer.decode(generate(grammars, row, eos, draw, [])) for row in (0, 1)]
    assert re.fullmatch(PATTERN, texts[0])
    assert set(json.loads(texts[1])) == {"kind", "n"}


def test_a_request_goes_on_where_it_was_at_another_row(grammars, tokenizer):
    """As after a retraction, when its row has belonged to another one."""
    (eos,) = tokenizer.encode(EOS).tolist()
    grammars.begin(3, REGEX, np.empty(0, np.int32))
    whole = generate(grammars, 3, eos, random.Random(5), [])
    for cut in range(len(whole)):
        grammars.begin(4, SCHEMA, np.empty(0, np.int32))
        grammars.begin(4, REGEX, np.array(whole[:cut], np.int32))
        again = generate(grammars, 4, eos, random.Random(cut), whole[:cut])
        assert again[:cut] == whole[:cut]
        assert re.fullmatch(PATTERN, tokenizer.decode(again))


def test_rows_do_not_touch_each_other(grammars):
    for row in range(3):
        grammars.begin(row, REGEX, np.empty(0, np.int32))
    before = allowed(grammars, 0, 1, 2)
    token = before[0][0]
    grammars.append(np.array([1], np.int32), np.array([token], np.int32))
    after = allowed(grammars, 2, 1, 0)
    assert after[0] == after[2] == before[0]
    assert after[1] != before[1]


def test_a_token_that_is_none_moves_nothing(grammars):
    grammars.begin(0, REGEX, np.empty(0, np.int32))
    before = allowed(grammars, 0)
    grammars.append(np.array([0], np.int32), np.array([-2], np.int32))
    assert allowed(grammars, 0) == before


def test_what_has_left_its_form_has_no_next_token(grammars, tokenizer):
    """Its end would say that it has the form; the others of the batch go on."""
    grammars.begin(0, REGEX, tokenizer.encode("x"))
    grammars.begin(1, REGEX, np.empty(0, np.int32))
    left, other = allowed(grammars, 0, 1)
    assert left == []
    assert other


def test_a_choice_among_as_many_as_are_allowed_is_one_of_them(grammars, tokenizer):
    (eos,) = tokenizer.encode(EOS).tolist()
    choices = [f"{at:04}" for at in range(MAX_CHOICES)]
    _, form = grammar_of({"guided_choice": choices})
    assert grammars.refusal(form) is None
    grammars.begin(0, form, np.empty(0, np.int32))
    assert tokenizer.decode(generate(grammars, 0, eos, random.Random(1), [])) in choices


@pytest.mark.parametrize("pattern", ["a{1000000}", "xyz((a{1000}){1000}){1000}"])
def test_a_form_beyond_the_limits_fails_and_does_not_end(grammars, pattern):
    form = Grammar(LLMatcher.grammar_from_regex(pattern))
    assert grammars.refusal(form) is None
    grammars.begin(0, form, np.empty(0, np.int32))
    (options,) = allowed(grammars, 0)
    grammars.append(np.array([0], np.int32), np.array(options[:1], np.int32))
    assert allowed(grammars, 0) == [[]]
    assert grammars.refusal(REGEX) is None


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_regex("(a"),
        LLMatcher.grammar_from_json_schema({"type": "objekt"}),
        LLMatcher.grammar_from_lark('start: "a" b'),
        "{}",
    ],
)
def test_a_grammar_that_is_none_is_refused(grammars, grammar):
    assert grammars.refusal(Grammar(grammar))
    assert grammars.refusal(REGEX) is None


def test_few_compiled_grammars_are_kept(grammars, monkeypatch):
    monkeypatch.setattr(grammars_module, "KEPT", 2)
    forms = [Grammar(LLMatcher.grammar_from_regex(f"a{{{n}}}")) for n in range(1, 6)]
    for row, form in enumerate(forms):
        assert grammars.refusal(form) is None
        grammars.begin(row, form, np.empty(0, np.int32))
    grammars.begin(9, forms[0], np.empty(0, np.int32))  # compiled again
    assert allowed(grammars, 0) == allowed(grammars, 9)


def test_masks_bar_what_they_do_not_name():
    logits = torch.zeros(3, 70)
    words = np.zeros((1, 2), np.int32)
    words[0, 0], words[0, 1] = -(1 << 31), 1  # tokens 31 and 32
    masks = TokenMasks(at=np.array([1]), words=words)
    found = masked(logits, masks)
    assert torch.isfinite(found[1]).nonzero().ravel().tolist() == [31, 32]
    assert torch.isfinite(found[[0, 2]]).all()
    assert torch.isfinite(logits).all()
    assert masks.only(np.array([0, 2])) is None
    assert masks.only(np.array([1, 2])).at.tolist() == [0]


def test_what_is_kept_of_compiled_forms_is_bounded_by_their_length(grammars, monkeypatch):
    forms = [Grammar(LLMatcher.grammar_from_regex(f"a{{{at}}}" + "b" * 200)) for at in range(1, 9)]
    longest = max(len(form.text) for form in forms)
    monkeypatch.setattr(serve_grammars, "KEPT_CHARS", 3 * longest)
    made = []
    compiled = serve_grammars.LLMatcher

    def counted(*of, **more):
        made.append(of[1])
        return compiled(*of, **more)

    monkeypatch.setattr(serve_grammars, "LLMatcher", counted)
    for form in (*forms, *forms[-3:], forms[0]):
        assert grammars.refusal(form) is None
    assert made == [form.text for form in (*forms, forms[0])]

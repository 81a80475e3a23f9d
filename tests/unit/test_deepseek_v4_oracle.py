"""Hugging Face's DeepSeek-V4 and ours on pages give what the formulas give, in float64.

The two could share a misreading: ours was written from theirs. The oracle is a third opinion, and
whatever is changed in it shows.
"""

import copy
from functools import cache

import pytest
import torch

from stratakv.engine.attention import scratch_limit
from stratakv.engine.huggingface.model import wrap
from tests.fixtures.deepseek_v4 import (
    SHORT,
    TOLERANCE,
    V4Host,
    adopted,
    hugging_face,
    prompt_of,
)
from tests.oracles import deepseek_v4 as oracle
from tests.oracles.common import distance, expected, last_among_equals, mistaken

RICH = 27
"""Four streams, YaRN, low bounds, a window of 9, all three kinds of layers, top 3."""
LENGTH = 560
CASES = pytest.mark.parametrize(("seed", "page_tokens"), [(0, 128), (RICH, 256), (SHORT, 48)])
SEEDS = pytest.mark.parametrize("seed", [0, RICH, SHORT])
AROUND = sorted({n + d for n in (4, 48, 128, 256, 512) for d in (-1, 0, 1)} | {1, 97, LENGTH})
WRONG = 100 * TOLERANCE


@cache
def by_formula(seed):
    """Logits at every position of the prompt, float64 [LENGTH, vocab]."""
    return expected(oracle, hugging_face(seed), text(seed))


def text(seed):
    return prompt_of(seed, 1, LENGTH)


@SEEDS
def test_selection_and_the_window_leave_something_out(seed):
    config = hugging_face(seed).config
    assert config.sliding_window < LENGTH
    assert config.index_topk < LENGTH // config.compress_rates[oracle.OVERLAPPING]


@SEEDS
def test_the_oracle_does_not_look_ahead(seed):
    for length in (3, 131):
        part = expected(oracle, hugging_face(seed), text(seed)[:length])
        assert distance(part, by_formula(seed)[:length]) < 1e-12


@SEEDS
@torch.no_grad()
def test_hugging_face_gives_the_formulas_logits(seed):
    for length in AROUND:
        ids = torch.from_numpy(text(seed)[:length]).long()[None]
        logits = hugging_face(seed)(input_ids=ids, use_cache=False).logits[0]
        assert distance(logits, by_formula(seed)[:length]) <= TOLERANCE


@CASES
def test_a_prompt_of_any_length_gives_the_formulas_logits(seed, page_tokens):
    host, formula = V4Host(adopted(seed), page_tokens), by_formula(seed)
    for length in AROUND:
        row, logits = host.feed(text(seed)[:length])
        assert distance(logits, formula[length - 1]) <= TOLERANCE
        host.close(row)


def assert_follows(host, prompt, formula, ends):
    """Chunks that end there, one after another."""
    row = host.open()
    for end in ends:
        logits = host.run((row, prompt[host.computed[row] : end]))[0]
        assert distance(logits, formula[end - 1]) <= TOLERANCE


@CASES
def test_chunks_and_then_decoding_give_the_formulas_logits(seed, page_tokens):
    ends = [*AROUND[:-7], *range(250, 262), 400, *range(505, LENGTH + 1)]
    host = V4Host(adopted(seed), page_tokens)
    assert_follows(host, text(seed), by_formula(seed), ends)


@CASES
def test_a_ragged_batch_gives_the_formulas_logits(seed, page_tokens):
    """A prompt's chunks beside rows that decode, each elsewhere in its blocks and pages."""
    host, prompt = V4Host(adopted(seed), page_tokens), text(seed)
    long, *short = [host.open() for _ in range(3)]
    host.run((short[0], prompt[:118]), (short[1], prompt[:250]))
    for end in (7, 100, 128, 129, 255, 256, 300, 400, 511, LENGTH):
        chunks = [(row, prompt[host.computed[row] :][:1]) for row in short]
        chunks.append((long, prompt[host.computed[long] : end]))
        for (row, _), logits in zip(chunks, host.run(*chunks), strict=True):
            formula = by_formula(seed)[host.computed[row] - 1]
            assert distance(logits, formula) <= TOLERANCE


@pytest.mark.parametrize(
    "tied", [("scorer.weights_proj.weight",), ("mlp.gate.weight", "e_score_correction_bias")]
)
@pytest.mark.parametrize("scratch_bytes", [1, scratch_limit.SCRATCH_BYTES])
def test_among_equals_the_lowest_index_wins(tied, scratch_bytes, monkeypatch):
    """Hugging Face leaves that open: ours is compared with the rule alone, in any pieces."""
    monkeypatch.setattr(scratch_limit, "SCRATCH_BYTES", scratch_bytes)
    module = copy.deepcopy(hugging_face())
    for name, tensor in module.state_dict().items():
        if name.endswith(tied):
            tensor.zero_()
    prompt = text(0)[:201]
    formula = expected(oracle, module, prompt)
    ends = [70, 120, *range(121, 136), 201]
    assert_follows(V4Host(wrap(module)), prompt, formula, ends)
    monkeypatch.setattr(oracle, "highest", last_among_equals)
    assert distance(expected(oracle, module, prompt), formula) > WRONG


OF_WINDOW = "max(0, t - config.sliding_window + 1)"
OF_SCORES = "np.maximum(queries @ keys.T, 0)"
OF_SINKS = 'np.concatenate([logits, weights["sinks"][:, None]], 1), -1)[:, :-1]'
MISTAKES = {
    "blocks do not overlap": ("if overlaps and block > 0", "if False"),
    "the next block's values for the own one": ("value[:, dim:], gate", "value[:, :dim], gate"),
    "no place in a block": ("bias[:, :dim]", "0"),
    "a softmax over channels": ("(softmax(gate, 0)", "(softmax(gate, 1)"),
    "entries stand at their last token": (", config), start, turns", ", config), own.stop, turns"),
    "an open block is seen": ("closed = (t + 1) // ratio", "closed = t // ratio + 1"),
    "an open long block is seen": ("every[: (t + 1) // ratio]", "every[: t // ratio + 1]"),
    "a block is seen late": ("closed = (t + 1) // ratio", "closed = t // ratio"),
    "a long block is seen late": ("every[: (t + 1) // ratio]", "every[: t // ratio]"),
    "values stay rotated": ("rotate(shares @ keys, -t, turns)", "shares @ keys"),
    "values rotated again": ("rotate(shares @ keys, -t, turns)", "rotate(shares @ keys, t, turns)"),
    "a long window": (OF_WINDOW, "max(0, t - config.sliding_window)"),
    "a short window": (OF_WINDOW, "max(0, t - config.sliding_window + 2)"),
    "no sinks": (OF_SINKS, "logits, -1)"),
    "everything is selected": ("highest(scores, config.index_topk)", ": len(scores)"),
    "one too few is selected": ("config.index_topk)", "config.index_topk - 1)"),
    "negative votes count": (OF_SCORES, "(queries @ keys.T)"),
    "index queries not rotated": ('queries = rotate(queries, t, turns_of(config, "compress"))', ""),
    "one rope for all layers": ('"main" if kind == WINDOW_ONLY else "compress"', '"compress"'),
    "entries turn as a window's": (
        'turns = turns_of(config, "compress")',
        'turns = turns_of(config, "main")',
    ),
    "the bias weighs": ("biased = score +", "biased = score = score +"),
    "the bias does not choose": ("highest(biased,", "highest(score,"),
    "hashed as if routed": ("expert_ids[t]", "highest(score, config.num_experts_per_tok)"),
    "streams mixed the other way": ('"tij,tid->tjd"', '"tji,tid->tjd"'),
    "columns never sum to one": ("(matrix.sum(-2, keepdims=True) + eps)", "1"),
    "half as much comes out": ("2 * sigmoid(", "sigmoid("),
    "gates unbounded": ("np.minimum(gate, limit)", "gate"),
    "factors unbounded": ("np.clip(up, -limit, limit)", "up"),
    "YaRN forgotten": ("frequencies(rope,", 'frequencies(rope | {"rope_type": "default"},'),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_formulas_shows(mistake):
    prompt = text(RICH)[:200]
    wrong = expected(mistaken(oracle, *MISTAKES[mistake]), hugging_face(RICH), prompt)
    assert distance(wrong, by_formula(RICH)[: len(prompt)]) > WRONG

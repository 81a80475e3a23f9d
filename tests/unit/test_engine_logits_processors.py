"""Penalties, biases and tokens that may not come yet: vLLM's formulas, whoever shares the batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from stratakv.core.ids import NONE
from stratakv.engine.logits_processors import ProcessorColumns
from stratakv.engine.processed_logits import processed
from stratakv.engine.request import SamplingParams
from stratakv.engine.sampling import sample
from tests.sampling_rows import logits_of, params, penalised

VOCAB = 40
STOPS = (7, 11)
ASKED = (
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(),
    SamplingParams(frequency_penalty=0.7, presence_penalty=-0.4),
    SamplingParams(logit_bias=((3, 5.0), (9, -100.0))),
    SamplingParams(min_tokens=12, stop_tokens=STOPS),
    SamplingParams(repetition_penalty=0.6, frequency_penalty=-1.5, logit_bias=((0, 1.5),)),
    SamplingParams(presence_penalty=1.9, min_tokens=6, stop_tokens=STOPS, repetition_penalty=2.0),
)


def text_of(row):
    """A prompt and an output, of another length each, with tokens that come back."""
    draw = np.random.default_rng(row)
    return draw.integers(0, VOCAB, 5 + 3 * row), draw.integers(0, VOCAB // 4, 2 * row)


def columns():
    """All ``ASKED`` at rows of a block table, and the table's tokens. Behind a row's tokens stand
    those of an earlier request."""
    rows = ProcessorColumns(len(ASKED))
    tokens = np.full((len(ASKED), 64), 1, np.int32)
    lengths = np.zeros(len(ASKED), np.int32)
    stops = np.full((len(ASKED), 2), NONE, np.int32)
    for row, asks in enumerate(ASKED):
        prompt, output = text_of(row)
        both = np.concatenate((prompt, output))
        tokens[row, : len(both)], lengths[row] = both, len(both)
        stops[row, : len(asks.stop_tokens)] = asks.stop_tokens
        rows.open(row, len(prompt), asks)
    return rows, tokens, lengths, stops


def wanted(rows):
    table, tokens, lengths, stops = columns()
    return table.of(np.asarray(rows, np.int32), tokens, lengths, stops)


def test_every_row_gets_what_it_asks_for_and_no_other_is_touched():
    rows = [4, 1, 0, 6, 3, 2, 5]
    logits = logits_of(0, len(rows), VOCAB)
    before = logits.clone()
    found = processed(logits, wanted(rows))
    for at, row in enumerate(rows):
        right = penalised(before[at], *text_of(row), ASKED[row])
        assert torch.allclose(found[at].double(), right, rtol=1e-5, atol=1e-5), ASKED[row]
    assert torch.equal(logits, before)
    assert torch.equal(found[1], before[1])


def test_a_row_gets_the_same_alone_as_in_a_batch():
    rows = np.arange(len(ASKED), dtype=np.int32)
    logits = logits_of(1, len(rows), VOCAB)
    together = processed(logits, wanted(rows))
    for row in rows:
        alone = wanted([row])
        got = logits[row : row + 1] if alone is None else processed(logits[row : row + 1], alone)
        assert torch.equal(got[0], together[row])
        part = wanted(rows).only(np.array([row]))
        assert (part is None) == (alone is None)
        if part is not None:
            assert torch.equal(processed(logits[row : row + 1], part)[0], together[row])


def test_some_of_the_rows_keep_their_own():
    rows = np.arange(len(ASKED), dtype=np.int32)
    logits = logits_of(2, len(rows), VOCAB)
    some = np.array([1, 2, 5, 6])
    part = processed(logits[some], wanted(rows).only(some))
    assert torch.equal(part, processed(logits, wanted(rows))[some])


def test_nothing_is_made_for_rows_that_want_nothing():
    assert wanted([1, 1, 1]) is None


def test_a_row_forgets_what_its_last_request_wanted():
    table, tokens, lengths, stops = columns()
    for row in range(len(ASKED)):
        table.open(row, 1, SamplingParams())
    assert table.of(np.arange(len(ASKED), dtype=np.int32), tokens, lengths, stops) is None
    table.open(3, 1, SamplingParams(logit_bias=((1, 2.0),)))
    found = table.of(np.array([3], np.int32), tokens, lengths, stops)
    assert found.bias_tokens[found.bias_tokens != NONE].tolist() == [1]


def test_the_repetition_penalty_is_hugging_faces():
    row, penalty = 6, 1.4
    table, tokens, lengths, stops = columns()
    prompt, output = text_of(row)
    table.open(row, len(prompt), SamplingParams(repetition_penalty=penalty))
    logits = logits_of(3, 1, VOCAB)
    text = torch.from_numpy(np.concatenate((prompt, output)))[None]
    right = RepetitionPenaltyLogitsProcessor(penalty)(text, logits.clone())
    found = processed(logits, table.of(np.array([row], np.int32), tokens, lengths, stops))
    assert torch.allclose(found, right)


def test_a_stop_token_beyond_the_vocabulary_is_not_there_to_be_barred():
    table, tokens, lengths, stops = columns()
    stops[4, 1] = VOCAB + 5
    logits = logits_of(4, 1, VOCAB)
    found = processed(logits, table.of(np.array([4], np.int32), tokens, lengths, stops))
    assert torch.isinf(found).sum() == 1


def test_logprobs_are_of_the_models_own_logits():
    logits = logits_of(5, 1, VOCAB)
    batch = replace(params(1, temperature=0, logprobs=3), processors=wanted([3]))
    found = sample(logits, batch)
    changed = processed(logits, wanted([3])).argmax(-1).item()
    assert found.tokens.tolist() == [changed]
    raw = logits.log_softmax(-1)[0]
    assert found.logprobs[0].chosen == pytest.approx(raw[changed].item())
    assert found.logprobs[0].top[0][0] == raw.argmax().item()


def test_min_p_leaves_out_what_is_less_likely_than_its_share_of_the_likeliest():
    draws = 20_000
    row = torch.tensor([[0.5, 0.26, 0.24, 0.0]]).log()
    tokens = sample(row.expand(draws, -1), params(draws, min_p=0.5)).tokens
    shares = np.bincount(tokens, minlength=4) / draws
    assert shares[2:].sum() == 0
    assert abs(shares[0] - 0.5 / 0.76) < 0.012
    # Before top_p: of the two that are left, the first has two thirds.
    tokens = sample(row.expand(draws, -1), params(draws, min_p=0.5, top_p=0.6)).tokens
    assert set(tokens.tolist()) == {0}
    # It is a share of the weights that the temperature leaves.
    tokens = sample(row.expand(draws, -1), params(draws, min_p=0.6, temperature=2.0)).tokens
    assert set(tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("asks", "field"),
    [
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"presence_penalty": 101.0}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, float("inf")),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
    ],
)
def test_what_the_columns_cannot_hold_is_refused_by_name(asks, field):
    refusal = SamplingParams(**asks).refusal()
    assert refusal is not None
    assert refusal.startswith(field)
    assert "is allowed" in refusal

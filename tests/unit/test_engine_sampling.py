"""Sampling: the right distribution, the same token whoever shares the batch, ties to the lowest."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stratakv.engine import drawing
from stratakv.engine.drawing import NO_TOKEN, NOT_FINITE, likeliest, uniform
from stratakv.engine.grammars import TokenMasks
from stratakv.engine.sampling import sample
from tests.sampling_rows import logits_of, params


def test_temperature_zero_is_greedy_and_ties_go_to_the_lowest_id():
    logits = torch.zeros(2, 6)
    logits[0, [4, 2]] = 3.0
    assert sample(logits, params(2, temperature=0)).tokens.tolist() == [2, 0]


def test_greedy_rows_stay_greedy_beside_random_ones():
    logits = logits_of(0, 64)
    temperature = np.where(np.arange(64) % 2 == 0, 0.0, 1.0)
    mixed = sample(logits, params(64, temperature=temperature)).tokens
    assert (mixed[::2] == logits.argmax(-1).numpy()[::2]).all()
    assert (mixed[1::2] != logits.argmax(-1).numpy()[1::2]).any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_follow_the_softmax(temperature):
    draws, vocab = 20_000, 12
    row = logits_of(1, 1, vocab)
    expected = (row[0].double() / temperature).softmax(-1).numpy() * draws
    tokens = sample(row.expand(draws, -1), params(draws, temperature=temperature)).tokens
    counts = np.bincount(tokens, minlength=vocab)
    # 11 degrees of freedom: 99.99 % of fair samples stay below 37.4 (the seed is fixed anyway).
    assert ((counts - expected) ** 2 / expected).sum() < 37.4


def test_top_k_and_top_p_keep_the_share_of_what_is_left():
    draws = 20_000
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    tokens = sample(row.expand(draws, -1), params(draws, top_k=3, top_p=0.75)).tokens
    # Of the first three, 0.4/0.9 is less than 0.75 and 0.7/0.9 is more: two are kept.
    shares = np.bincount(tokens, minlength=4) / draws
    assert shares[2:].sum() == 0
    assert abs(shares[0] - 4 / 7) < 0.012


def test_top_k_one_and_top_p_zero_are_greedy():
    logits = logits_of(2, 100)
    greedy = logits.argmax(-1).numpy()
    assert (sample(logits, params(100, top_k=1)).tokens == greedy).all()
    assert (sample(logits, params(100, top_p=0.0)).tokens == greedy).all()


def test_limits_larger_than_the_vocabulary_change_nothing():
    logits = logits_of(3, 200)
    free = sample(logits, params(200)).tokens
    assert (sample(logits, params(200, top_k=10_000)).tokens == free).all()
    assert (sample(logits, params(200, top_p=1.0, top_k=50)).tokens == free).all()


def test_top_k_cuts_ties_at_the_lowest_ids():
    logits = torch.zeros(500, 8)
    assert set(sample(logits, params(500, top_k=3)).tokens.tolist()) == {0, 1, 2}
    assert set(sample(logits, params(500, top_p=0.25)).tokens.tolist()) == {0, 1}


def test_a_nucleus_wider_than_the_candidates_is_found(monkeypatch):
    logits = logits_of(4, 300, vocab=400) / 4
    wide = sample(logits, params(300, top_p=0.9)).tokens
    monkeypatch.setattr(drawing, "CANDIDATES", 8)
    assert (sample(logits, params(300, top_p=0.9)).tokens == wide).all()
    narrow = sample(logits, params(300, top_p=0.9, top_k=300)).tokens
    monkeypatch.undo()
    assert (sample(logits, params(300, top_p=0.9, top_k=300)).tokens == narrow).all()


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e6])
def test_extreme_temperatures_give_tokens(temperature):
    logits = logits_of(5, 50)
    tokens = sample(logits, params(50, temperature=temperature, top_p=0.99)).tokens
    assert ((tokens >= 0) & (tokens < 50)).all()
    if temperature < 1:
        assert (tokens == logits.argmax(-1).numpy()).all()


def test_a_row_draws_the_same_token_alone_and_in_any_batch():
    rows = 40
    logits = logits_of(6, rows, vocab=2000)
    kinds = np.arange(rows) % 4
    columns = {
        "temperature": np.choose(kinds, [1.0, 0.7, 1.3, 0.0]),
        "top_p": np.choose(kinds, [1.0, 0.9, 0.999, 1.0]),
        "top_k": np.choose(kinds, [0, 40, 0, 0]),
        "seeds": np.arange(rows) // 3,
        "positions": np.arange(rows) * 7,
    }
    together = sample(logits, params(rows, **columns)).tokens
    order = np.random.default_rng(0).permutation(rows)
    shuffled = params(rows, **{name: column[order] for name, column in columns.items()})
    assert (sample(logits[order], shuffled).tokens == together[order]).all()
    for row in range(rows):
        alone = params(1, **{name: column[row] for name, column in columns.items()})
        assert sample(logits[row : row + 1], alone).tokens[0] == together[row]


def test_seed_and_position_both_matter():
    logits = logits_of(7, 1).expand(64, -1)
    by_position = sample(logits, params(64, seeds=5)).tokens
    by_seed = sample(logits, params(64, seeds=np.arange(64), positions=3)).tokens
    assert len(set(by_position.tolist())) > 5
    assert len(set(by_seed.tolist())) > 5


def test_random_numbers_are_uniform_and_streams_do_not_repeat():
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 200)
    positions = np.tile(np.arange(200, dtype=np.int64), 200)
    numbers = uniform(seeds, positions)
    assert len(set(numbers.tolist())) == len(numbers)
    assert 0 <= numbers.min() < numbers.max() < 1
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    # 49 degrees of freedom: 99.99 % of fair samples stay below 94.
    assert ((counts - 800) ** 2 / 800).sum() < 94
    grid = numbers.reshape(200, 200)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02


def test_the_largest_seed_is_a_seed():
    top = np.array([2**64 - 1, 0], np.uint64)
    first, second = uniform(top, np.zeros(2, np.int64)).tolist()
    assert first != second


def test_logprobs_are_of_the_raw_logits_and_ordered():
    logits = logits_of(8, 4)
    wanted = np.array([-1, 0, 3, 5])
    done = sample(logits, params(4, temperature=0.3, top_k=2, logprobs=wanted))
    expected = logits.log_softmax(-1)
    assert done.logprobs[0] is None
    assert done.logprobs[1].top == ()
    for row in (1, 2, 3):
        report = done.logprobs[row]
        assert report.chosen == pytest.approx(expected[row, done.tokens[row]].item())
        values, ids = expected[row].topk(int(wanted[row]))
        assert [token for token, _ in report.top] == ids.tolist()
        assert [score for _, score in report.top] == pytest.approx(values.tolist())


def test_logprobs_of_ties_name_the_lowest_ids():
    logits = torch.zeros(1, 7)
    logits[0, 5] = 1.0
    report = sample(logits, params(1, temperature=0, logprobs=3)).logprobs[0]
    assert [token for token, _ in report.top] == [5, 0, 1]


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_no_random_number_reaches_a_token_without_weight(number, monkeypatch):
    monkeypatch.setattr(drawing, "uniform", lambda seeds, positions: np.full(len(seeds), number))
    logits = torch.tensor([[0.0, 5.0, 5.0, 5.1, 0.0], [-1e9, 1.0, 1.1, 0.9, -1e9]])
    tokens = sample(logits, params(2, top_k=np.array([3, 0]))).tokens
    assert tokens.tolist() == ([1, 1] if number == 0 else [3, 3])


def test_no_rows_is_no_tokens():
    done = sample(torch.empty(0, 9), params(0))
    assert done.tokens.shape == (0,)
    assert done.logprobs == []


def test_likeliest_takes_exactly_as_many_as_asked():
    weights = torch.tensor([[3.0, 1.0, 3.0, 3.0], [0.0, 2.0, 1.0, 0.0]])
    mask = likeliest(weights, torch.tensor([[2], [3]]), torch.tensor([[3.0], [0.0]]))
    assert mask.tolist() == [[True, False, True, False], [True, True, True, False]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_request_bars_has_another_failure_than_what_the_model_computed(temperature):
    logits = logits_of(5, 5, 40)
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    logits[3, 3] = torch.inf
    alone = sample(logits, params(5, temperature=temperature)).tokens
    assert alone[1:4].tolist() == [NOT_FINITE] * 3
    nothing = TokenMasks(at=np.arange(4), words=np.zeros((4, 2), np.int32))
    asked = replace(params(5, temperature=temperature), masks=nothing)
    barred = sample(logits, asked).tokens
    assert barred.tolist() == [NO_TOKEN, *[NOT_FINITE] * 3, alone[4]]

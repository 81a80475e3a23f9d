"""Scores and choice in C are torch's, to the last bit."""

import numpy as np
import pytest
import torch

from stratakv.engine.deepseek.common_topk import highest_indices, torch_highest_indices
from stratakv.engine.deepseek.common_votes import torch_votes, votes
from tests.fixtures.exact_scores import numbers

helper = pytest.importorskip("stratakv.engine.deepseek.compiled_scores", exc_type=ImportError)

DTYPES = [torch.float32, torch.bfloat16]


def asked(heads, dim, queries=3, keys=45, pool=60, dtype=torch.float32):
    rows = torch.from_numpy(np.random.default_rng(heads).integers(0, pool, (queries, keys)))
    query, weights = numbers(1, queries, heads, dim), numbers(2, queries, heads)
    return query.to(dtype), weights, numbers(3, pool, dim).to(dtype), rows


def assert_alike(*call):
    mine, right = helper.compiled_votes(*call), torch_votes(*call)
    broken = right.isnan()
    assert mine.isnan().equal(broken)
    assert mine[~broken].equal(right[~broken])
    assert votes(*call).nan_to_num().equal(right.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("dim", [1, 7, 16, 128])
def test_votes_of_any_shape_are_torchs(heads, dim, dtype):
    assert_alike(*asked(heads, dim, dtype=dtype))


@pytest.mark.parametrize("keys", [1, 7, 8, 9, 31, 32, 33, 64, 100])
def test_votes_of_any_number_of_keys_are_torchs(keys):
    assert_alike(*asked(5, 18, keys=keys))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, 1e-40, 3e38])
def test_votes_of_keys_that_are_no_usual_numbers_are_torchs(value, dtype):
    query, weights, pool, rows = asked(4, 16, dtype=dtype)
    pool[5] = value
    pool[7, 3] = value
    pool[9] = -0.0
    rows[:, :3] = torch.tensor([5, 7, 9])
    assert_alike(query, weights, pool, rows)


@pytest.mark.parametrize("where", [0, 1])
def test_votes_of_broken_queries_are_torchs(where):
    call = asked(4, 16)
    call[where][1, 2] = torch.inf
    assert_alike(*call)


def test_rows_outside_of_the_pool_are_not_read():
    for row in (60, -1):
        query, weights, pool, rows = asked(4, 16)
        rows[2, 44] = row
        with pytest.raises(IndexError, match="outside of the pool"):
            helper.compiled_votes(query, weights, pool, rows)


@pytest.mark.parametrize("changed", [0, 1, 2, 3])
def test_what_does_not_belong_together_is_refused(changed):
    call = list(asked(4, 16))
    other = asked(3, 18, queries=2)
    call[changed] = other[changed]
    with pytest.raises(ValueError, match="belong together"):
        helper.compiled_votes(*call)


@pytest.mark.parametrize("seed", range(30))
def test_the_best_are_torchs_also_where_many_are_equal(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 300))
    few = [0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, -np.nan, 1e-40, -1e-40]
    scores = random.standard_normal((4, count)).astype(np.float32)
    scores = np.where(random.random((4, count)) < seed / 30, random.choice(few, (4, count)), scores)
    scores = torch.from_numpy(scores.astype(np.float32))
    for k in {1, -(-count // 3), count}:
        mine = helper.compiled_best(scores, k)
        assert mine.equal(torch_highest_indices(scores, k))
        assert highest_indices(scores, k).equal(mine)


def test_scores_of_any_leading_shape_have_their_best():
    scores = numbers(1, 2, 3, 9)[..., ::2]
    assert helper.compiled_best(scores, 2).equal(torch_highest_indices(scores, 2))


def test_more_than_there_are_cannot_be_best():
    for k in (0, 4):
        with pytest.raises(ValueError, match="no more than it has"):
            helper.compiled_best(torch.zeros(1, 3), k)


def test_what_is_not_near_is_left_to_torch(monkeypatch):
    pool = torch.zeros(8, 4)
    assert helper.reads(pool)
    assert not helper.reads(pool[:, :2])
    assert not helper.reads(pool.half())
    assert not helper.near(pool.to("meta"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: helper.MOST_THREADS + 1)
    assert not helper.near(pool)

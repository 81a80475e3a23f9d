"""What an indexer's kernels score and choose, in Triton's interpreter: what torch does, and in
float32 to the bit."""

import numpy as np
import pytest
import torch

from stratakv.engine.attention import scratch_limit
from stratakv.engine.attention.kernels import IndexKeys
from stratakv.engine.deepseek.common_topk import torch_highest_indices
from stratakv.engine.deepseek.common_votes import torch_votes
from stratakv.engine.deepseek.triton_best_keys import (
    KEYS,
    LEAST,
    TILES,
    IndexTiles,
    Reach,
    best_keys,
    chosen,
    scores,
)
from stratakv.engine.deepseek.triton_indexer import vote
from stratakv.testing.kernel_oracle import poisoned
from tests.fixtures.exact_scores import numbers, pair_scores

# NumPy's, in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
NARROW = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *NARROW]
ODD = [0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, -np.nan, 1e-40, -1e-40]


def asked(heads, dim, dtype, queries=3, keys=45, pool=60):
    """Keys in any order, and of the others each is NaN."""
    random = np.random.default_rng(heads * 1000 + dim)
    rows = np.stack([random.permutation(pool)[:keys] for _ in range(queries)])
    query, weights = random.standard_normal((queries, heads, dim)), numbers(2, queries, heads)
    all_keys = torch.from_numpy(random.standard_normal((pool, dim))).to(dtype)
    unseen = np.setdiff1d(np.arange(pool), rows)
    all_keys[unseen] = poisoned(all_keys[unseen])
    return torch.from_numpy(query).to(dtype), weights, all_keys, torch.from_numpy(rows)


def float64(query, weights, pool, rows):
    dots = torch.einsum("mhd,mnd->mhn", query.double(), pool.double()[rows])
    return (dots.relu() * weights.double()[..., None]).sum(1)


def hiding(rows):
    random = np.random.default_rng(5)
    return torch.from_numpy(random.random(rows.shape) < 0.4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 7), (3, 16), (4, 24), (64, 128), (70, 18), (16, 8)])
def test_scores_are_the_votes_of_float64(heads, dim, dtype):
    query, weights, pool, rows = asked(heads, dim, dtype)
    found, right = (
        scores(query, weights, IndexKeys(pool, rows)),
        float64(query, weights, pool, rows),
    )
    assert found.isfinite().all(), "a key was read that nobody owns"
    assert (found - right).abs().max() <= 3e-6 * right.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_hidden_is_not_read_and_least(dtype):
    query, weights, pool, rows = asked(4, 16, dtype)
    whole, hidden = scores(query, weights, IndexKeys(pool, rows)), hiding(rows)
    found = scores(query, weights, IndexKeys(pool, rows, hidden))
    assert found.equal(whole.masked_fill(hidden, -torch.inf))
    counts = torch.tensor([0, 45, 17])
    beyond = torch.arange(45) >= counts[:, None]
    assert scores(query, weights, IndexKeys(pool, rows, counts=counts)).equal(
        whole.masked_fill(beyond, -torch.inf)
    )
    nowhere = torch.where(hidden, 2**40, rows)  # an address that would end the process
    assert scores(query, weights, IndexKeys(pool, nowhere, hidden)).equal(found)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_no_number_and_harms_nobody_else(value, dtype):
    query, weights, pool, rows = asked(64, 16, dtype)
    weights.abs_(), query[..., 3].abs_()  # or infinities of both signs would be no number anyway
    whole = scores(query, weights, IndexKeys(pool, rows))
    pool[rows[1, 5], 3] = value
    found = scores(query, weights, IndexKeys(pool, rows))
    broken = rows == rows[1, 5]
    assert found.isnan().equal(broken)
    assert found[~broken].equal(whole[~broken])
    query[2, 63, 1] = value
    found = scores(query, weights, IndexKeys(pool, rows))
    assert found[2].isnan().all()
    assert found[:2].isnan().equal(broken[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_keys_have_equal_scores_wherever_they_lie(dtype):
    """And whoever is beside them: the tie rule would mean nothing else."""
    width = TILES * KEYS + 77
    query, weights, pool, _ = asked(64, 32, dtype, keys=60)
    random = np.random.default_rng(3)
    rows = torch.from_numpy(random.integers(0, 60, (3, width)))
    together = scores(query, weights, IndexKeys(pool, rows))
    for token in range(3):
        each = torch.full((60,), torch.nan)
        each[rows[token]] = together[token]
        assert together[token].equal(each[rows[token]])
        few = IndexKeys(pool, rows[token, 300:311])
        one = slice(token, token + 1)
        assert scores(query[one], weights[one], few)[0].equal(together[token, 300:311])


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 11, 64])
@pytest.mark.parametrize("dim", [1, 7, 16, 18, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_float32_queries_are_torchs_to_the_bit(heads, dim, dtype):
    query, weights = numbers(1, 3, heads, dim), numbers(2, 3, heads)
    pool = numbers(3, 60, dim).to(dtype)
    rows = torch.from_numpy(np.random.default_rng(heads).integers(0, 60, (3, 45)))
    right = torch_votes(query, weights, pool, rows)
    assert scores(query, weights, IndexKeys(pool, rows)).equal(right)
    assert scores(query, weights, IndexKeys(pool, rows[0])).equal(
        torch_votes(query, weights, pool, rows[:1].expand(3, -1))
    )


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, 1e-40, 3e38])
def test_scores_of_unusual_float32_are_torchs(value):
    query, weights, pool, rows = asked(4, 16, torch.float32, keys=60)
    pool[5], pool[7, 3], pool[9] = value, value, -0.0
    query[2, 1, 3] = value
    mine = scores(query, weights, IndexKeys(pool, rows))
    right = torch_votes(query, weights, pool, rows)
    assert mine.isnan().equal(right.isnan())
    assert mine.nan_to_num().equal(right.nan_to_num())


@pytest.mark.long
def test_a_pair_scores_alike_in_every_surrounding():
    def score(query, weights, pool, rows):
        return scores(query, weights, IndexKeys(pool, rows))

    sizes, first = [(16, 8)], {}
    for name, found in pair_scores(score, sizes):
        for one in found:
            assert one == first.setdefault(name, one)
    assert len(first) == 3


def test_strides_are_those_of_a_view():
    query, weights, pool, rows = asked(4, 16, torch.float16)
    plain = scores(query, weights, IndexKeys(pool, rows))
    wide = torch.full((60, 40), torch.nan, dtype=torch.float16)
    wide[:, 24:] = pool
    turned = query.mT.contiguous().mT
    table = torch.zeros(3, 90, dtype=torch.int64)
    table[:, ::2] = rows
    assert scores(turned, weights.T.contiguous().T, IndexKeys(wide[:, 24:], table[:, ::2])).equal(
        plain
    )


def test_pages_of_any_size_are_read_through_a_table():
    """As static graphs launch it: a table of pages in the place of a list of rows."""
    query, weights, pool, _ = asked(4, 16, torch.float16, keys=60, pool=60)
    table, size, width = torch.tensor([[9, 2, 14], [0, 1, 3], [5, 5, 5]], dtype=torch.int32), 4, 11
    rows = (table.long()[:, :, None] * size + torch.arange(size)).view(3, -1)[:, :width]
    found = torch.empty(3, width)
    tiles = IndexTiles.of(4, 16, exact=False)
    vote[3, tiles.programs(width)](
        found, query, weights.contiguous(), pool, table, table, table, 64, 16, 16, 3, width,
        HEADS=4, DIM=16, PAGE=size, BLOCK_H=tiles.heads, BLOCK_D=tiles.dims, BLOCK_N=tiles.keys,
        TILES=tiles.tiles, HIDES=False, COUNTED=False, UPCAST=False,
    )  # fmt: skip
    assert found.equal(scores(query, weights, IndexKeys(pool, rows)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rows_may_lie_further_than_32_bits_reach(dtype):
    """Of a pool of 2**31 numbers and more, which nobody touches but at its end."""
    dim = 4096
    pool = torch.empty((2**31 // dim + 9, dim), dtype=dtype)
    query, weights = torch.zeros(1, 4, dim, dtype=dtype), torch.ones(1, 4)
    query[:, :, 0] = 1
    rows = torch.tensor([[len(pool) - 1, len(pool) - 3]])
    pool[rows[0]] = 0
    pool[rows[0], 0] = torch.tensor([2.0, 5.0], dtype=dtype)
    assert scores(query, weights, IndexKeys(pool, rows)).tolist() == [[8.0, 20.0]]


@pytest.mark.parametrize("seed", range(24))
def test_the_best_are_torchs_also_where_many_are_equal(seed):
    random = np.random.default_rng(seed)
    count = int(random.choice([1, 2, 255, 256, 257, 300, 4096, 4097, 9000]))
    drawn = random.standard_normal((3, count)).astype(np.float32)
    drawn = np.where(random.random((3, count)) < seed / 24, random.choice(ODD, (3, count)), drawn)
    drawn = torch.from_numpy(drawn.astype(np.float32))
    for k in {1, -(-count // 3), -(-3 * count // 5), count}:
        places = torch.empty(3, k, dtype=torch.int64)
        chosen(drawn, None, places)
        assert places.equal(torch_highest_indices(drawn, k))


@pytest.mark.parametrize("counts", [[0, 1, 2], [5, 6, 7], [299, 300, 4000], [40, 5, 300]])
@pytest.mark.parametrize("least", [0.0, -np.inf])
def test_what_does_not_count_is_chosen_last_whatever_it_is(counts, least):
    random = np.random.default_rng(1)
    drawn = torch.from_numpy(random.choice([least, 1.0, 2.0], (3, 300)).astype(np.float32))
    number = torch.tensor(counts)
    beyond = torch.arange(300) >= number[:, None]
    for k in (1, 6, 300):
        places = torch.empty(3, k, dtype=torch.int64)
        chosen(drawn.masked_fill(beyond, torch.nan), number, places)
        right = torch_highest_indices(drawn.masked_fill(beyond, -torch.inf), k)
        assert places.equal(right)


@pytest.mark.parametrize("limit", [1, scratch_limit.SCRATCH_BYTES])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("hides", ["none", "hidden", "counts"])
def test_what_is_chosen_of_keys_is_torchs_in_any_pieces(hides, shared, limit, monkeypatch):
    monkeypatch.setattr(scratch_limit, "SCRATCH_BYTES", limit)
    query, weights, pool, rows = asked(4, 16, torch.float32, keys=60)
    pool[::3] = pool[0]  # ties
    rows = rows[0] if shared else rows
    own = rows.expand(3, -1)
    hidden = {"hidden": hiding(own), "counts": torch.arange(60) >= torch.tensor([[4], [60], [33]])}
    keys = {
        "none": IndexKeys(pool, rows),
        "hidden": IndexKeys(pool, rows, hiding(own)),
        "counts": IndexKeys(pool, rows, counts=torch.tensor([4, 60, 33])),
    }[hides]
    right = torch_votes(query, weights, pool, own)
    if hides != "none":
        right = right.masked_fill(hidden[hides], -torch.inf)
    assert best_keys(query, weights, keys, 20).equal(torch_highest_indices(right, 20))


def test_nobody_asks():
    query, weights, pool, rows = asked(4, 16, torch.float16)
    found = best_keys(query[:0], weights[:0], IndexKeys(pool, rows[:0]), 5)
    assert found.shape == (0, 5)


def test_tiles_hold_any_heads_and_dims():
    for heads in (1, 3, 16, 64, 71):
        for dim in (1, 16, 80, 128):
            for exact in (False, True):
                tiles = IndexTiles.of(heads, dim, exact=exact)
                assert tiles.heads >= max(heads, LEAST)
                assert 2**tiles.levels == tiles.heads
                assert exact or tiles.dims >= dim
                for width in (1, tiles.keys * tiles.tiles, 100_001):
                    covered = tiles.programs(width) * tiles.keys * tiles.tiles
                    assert width <= covered < width + tiles.keys * tiles.tiles


def test_a_row_of_scores_is_read_by_as_many_as_have_work():
    assert [Reach.of(width) for width in (1, 256, 257, 4096, 10**6)] == [
        Reach(256, 1), Reach(256, 1), Reach(512, 2), Reach(4096, 16), Reach(4096, 16),
    ]  # fmt: skip

"""Scoring and attending in pieces: what is chosen is the same, and scratch stays within the limit.

Peaks are what torch's allocator hands out at one time, as its profiler saw it, less what stays.
"""

import itertools
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from stratakv.engine.attention import scratch_limit
from stratakv.engine.attention.dense_kernels import DenseKernels
from stratakv.engine.attention.kernels import SelectedRows
from stratakv.engine.attention.row_kernels import RowKernels
from stratakv.engine.attention.scratch_limit import PairCost, pieces
from stratakv.engine.deepseek.common_topk import best_places, highest_indices
from stratakv.engine.deepseek.v4_attention import V4Indexer
from stratakv.engine.deepseek.v4_config import V4Config
from stratakv.engine.deepseek.v4_step import Entries
from stratakv.engine.deepseek.v32_indexer import Asked
from tests.fixtures.deepseek_v4 import config_of

MIB = 2**20
QUERIES, KEYS, TOP_K = 24, 6000, 40


@contextmanager
def limited(limit_bytes):
    """For Hypothesis, which runs many examples in one test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch_limit, "SCRATCH_BYTES", limit_bytes)
        yield


# --- cutting -------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(1, 100), st.integers(1, 3000))
def test_runs_cover_all_in_order_within_the_limit(count, each_bytes, limit_bytes):
    with limited(limit_bytes):
        runs = list(pieces(count, each_bytes))
    assert [at for run in runs for at in range(run.start, run.stop)] == list(range(count))
    sizes = [run.stop - run.start for run in runs]
    assert all(n == 1 or n * each_bytes <= limit_bytes for n in sizes)
    assert len(sizes) == 1 or (sizes[0] + 1) * each_bytes > limit_bytes


@given(
    st.integers(1, 40), st.integers(1, 300), st.integers(0, 20), st.integers(1, 20),
    st.integers(1, 60), st.integers(1, 10**5),
)  # fmt: skip
def test_a_piece_is_within_the_limit(queries, keys, key_bytes, pair_bytes, least, limit_bytes):
    least = min(least, keys)
    with limited(limit_bytes):
        some, width = PairCost(key_bytes, pair_bytes).cut(queries, keys, least)
    assert 1 <= some <= queries
    assert least <= width <= keys
    taken = width * (key_bytes + some * pair_bytes)
    assert taken <= limit_bytes or (some, width) == (1, least)
    if keys * (key_bytes + queries * pair_bytes) <= limit_bytes:
        assert (some, width) == (queries, keys)


# --- choosing ------------------------------------------------------------------------------------


@given(st.data())
def test_the_best_of_pieces_are_the_best_of_all(data):
    queries, keys = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 40))
    k = data.draw(st.integers(1, keys))
    values = [-torch.inf, -1.0, -0.0, 0.0, 1.0, torch.inf, torch.nan]
    drawn = data.draw(st.lists(st.sampled_from(values), min_size=queries * keys))
    scores = torch.tensor(drawn[: queries * keys]).view(queries, keys)
    asked = []

    def score(some, part):
        asked.append((some, part))
        return scores[some, part].clone()

    with limited(data.draw(st.sampled_from([1, 500, 2000, 10**6]))):
        found = best_places(score, (queries, keys), k, PairCost(4, 8))
    assert found.equal(highest_indices(scores, k))
    seen = torch.zeros(queries, keys)
    for piece in asked:
        seen[piece] += 1
    assert (seen == 1).all(), "a pair was scored twice, or never"


def test_what_fits_is_one_piece():
    calls = []

    def score(some, part):
        calls.append((some, part))
        return torch.zeros(64, 1000)

    best_places(score, (64, 1000), 8, PairCost(0, 100))
    assert calls == [(slice(0, 64), slice(0, 1000))]


# --- what it takes -------------------------------------------------------------------------------


def peak_bytes(call):
    """Most that was allocated beside what there was before and what is returned."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = call()
    events = found.profiler.kineto_results.events()
    moves = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    assert moves, "the profiler saw no allocation"
    kept = max(0, sum(size for _, size in moves))
    return result, max(itertools.accumulate(size for _, size in moves)) - kept


def within_the_limit(monkeypatch, call, limit_bytes=MIB):
    """The result under a limit, which must need many pieces, and without."""
    whole, most = peak_bytes(call)
    assert most > 4 * limit_bytes, "nothing to bound"
    monkeypatch.setattr(scratch_limit, "SCRATCH_BYTES", limit_bytes)
    result, peak = peak_bytes(call)
    assert peak <= 1.25 * limit_bytes
    return result, whole


def whole_numbers(*shape):
    """Sums of their products are exact, in whatever order, and tie often."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(1)).float()


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def torch_alone(monkeypatch):
    """The helper in C has no tiles: there would be nothing to bound."""
    if find_spec("stratakv.engine.deepseek._scores") is not None:
        helper = import_module("stratakv.engine.deepseek.compiled_scores")
        monkeypatch.setattr(helper, "MOST_THREADS", 0)


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True])
def test_the_indexer_of_v32_stays_within_the_limit(shared, dtype, monkeypatch):
    pool = whole_numbers(KEYS, 16).to(dtype)
    rows = torch.arange(KEYS).flip(0)
    hidden = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
    hidden[3, TOP_K + 7 :] = True
    if not shared:
        rows = rows.expand(QUERIES, -1).contiguous()

    def chosen():
        kernels = DenseKernels(torch.device("cpu"), dtype)
        asked = Asked(whole_numbers(QUERIES, 6, 16), whole_numbers(QUERIES, 6), pool, kernels)
        return asked.best(slice(None), rows, hidden, TOP_K)

    found, whole = within_the_limit(monkeypatch, chosen, MIB // 4)
    assert found.equal(whole)
    assert found[3].max() < TOP_K + 7


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("shared", [False, True])
def test_the_indexer_of_v4_stays_within_the_limit(shared, monkeypatch):
    config = V4Config.of(config_of(0).to_dict())
    indexer = V4Indexer(config, ratio=4)
    weights = indexer.scorer.weights_proj.weight
    weights.data = whole_numbers(*weights.shape)
    pool = whole_numbers(KEYS, config.index_dim)
    rows = torch.arange(KEYS).flip(0)
    entries = Entries(
        rows if shared else rows.expand(QUERIES, -1).contiguous(),
        torch.arange(KEYS - QUERIES, KEYS) + 1,
    )
    x = whole_numbers(QUERIES, config.hidden)
    query = whole_numbers(QUERIES, config.index_heads, config.index_dim)
    with torch.inference_mode():
        found, whole = within_the_limit(
            monkeypatch, lambda: indexer.select(x, query, entries, pool, RowKernels()), MIB // 4
        )
    assert found.rows.equal(whole.rows)
    assert found.hidden.equal(whole.hidden)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)])
def test_attention_over_selected_rows_stays_within_the_limit(shared, sinks, monkeypatch):
    """A prefill over a layer's entries that no indexer selects, or decoding ones."""
    queries = 64
    pool = torch.randn(KEYS, 32, generator=torch.Generator().manual_seed(2))
    rows = torch.arange(2000)
    keys = SelectedRows(
        pool,
        rows if shared else rows.expand(queries, -1).contiguous(),
        torch.arange(2000) > torch.arange(queries)[:, None] + 1900,
    )
    query = torch.randn(queries, 4, 32, generator=torch.Generator().manual_seed(3))

    def attended():
        kernels = DenseKernels(torch.device("cpu"), torch.float32)
        return kernels.attend_selected(query, (keys,), 24, 0.1, sinks)

    with torch.inference_mode():
        found, whole = within_the_limit(monkeypatch, attended)
    torch.testing.assert_close(found, whole)

"""Attention in C: what is no usual number, and places outside of the pools."""

import numpy as np
import pytest
import torch

from stratakv.core.ids import GroupId
from stratakv.engine.attention.kernels import AttentionGroup, Paged
from stratakv.engine.attention.paged_layer import LayerPages, Scoring
from stratakv.engine.attention.row_kernels import RowKernels
from stratakv.engine.attention.step_meta import StepShape
from stratakv.engine.batch import StepBatch
from stratakv.spec.retention import KeepAll

helper = pytest.importorskip("stratakv.engine.attention.compiled_row_kernels", exc_type=ImportError)

PAGE, HEADS, QUERY_HEADS = 4, 2, 6


def layer_of(dim, pages=40):
    random = torch.Generator().manual_seed(dim)
    keys, values = (torch.randn(pages, PAGE, HEADS, dim, generator=random) for _ in range(2))
    return LayerPages.of(GroupId(0), keys, values)


def attended(kernels, layer, lengths, queries, table=None, scoring=None):
    """Of a token after ``lengths`` others each."""
    count = len(lengths)
    wide = max(lengths) // PAGE + 1
    if table is None:
        table = np.arange(count * wide, dtype=np.int32).reshape(count, wide)
    ones = np.ones(count, np.int32)
    batch = StepBatch(
        rows=np.arange(count, dtype=np.int32),
        starts=np.array(lengths, np.int32),
        counts=ones,
        tokens=ones,
        sampled=ones > 0,
        gate=None,
    )
    group = AttentionGroup(GroupId(0), KeepAll(), PAGE, 1)
    plan = kernels.plan(group, StepShape.of(batch), table)
    own = layer.key_rows.view(-1, HEADS, layer.key_dim)[:count].transpose(0, 1)
    return plan.decode(queries, Paged(layer, own, own), scoring or Scoring(0.3, None, None))


def queries_of(count, dim):
    return torch.randn(count, QUERY_HEADS, dim, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("dim", [1, 15, 16, 17, 64, 80, 100, 128, 256])
@pytest.mark.parametrize("length", [0, 3, 14, 15, 16, 63, 64, 140])
def test_dims_and_lengths_of_any_size_are_torchs(dim, length):
    layer, queries = layer_of(dim), queries_of(1, dim)
    right = attended(RowKernels(), layer, [length], queries)
    mine = attended(helper.CompiledRowKernels(), layer, [length], queries)
    torch.testing.assert_close(mine, right, atol=3e-6, rtol=2e-5)


def test_a_result_is_the_same_to_the_bit_whoever_shares_the_step():
    layer, queries = layer_of(64), queries_of(3, 64)
    table = np.arange(30, dtype=np.int32).reshape(3, 10)
    together = attended(helper.CompiledRowKernels(), layer, [37, 5, 20], queries, table)
    for at, length in enumerate([37, 5, 20]):
        alone = helper.CompiledRowKernels()
        one = attended(alone, layer, [length], queries[at : at + 1], table[at : at + 1])
        assert one[0].equal(together[at])


def test_scores_far_apart_leave_the_highest_alone():
    layer, queries = layer_of(16), torch.ones(1, QUERY_HEADS, 16)
    layer.key_rows[:21] = -30.0
    layer.key_rows[7] = 30.0
    out = attended(helper.CompiledRowKernels(), layer, [20], queries)
    assert out[0].view(HEADS, -1, 16)[:, 0].equal(layer.value_rows[7].view(HEADS, 16))


def test_a_sink_far_above_all_scores_takes_all_weight_from_its_head_alone():
    layer, queries = layer_of(16), queries_of(1, 16)
    sinks = torch.tensor([300.0, -300.0] + (QUERY_HEADS - 2) * [0.0])
    scoring = Scoring(0.3, None, sinks)
    right = attended(RowKernels(), layer, [20], queries, scoring=scoring)
    mine = attended(helper.CompiledRowKernels(), layer, [20], queries, scoring=scoring)
    assert not mine[0, 0].any()
    torch.testing.assert_close(mine, right, atol=3e-6, rtol=2e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("rows", ["key_rows", "value_rows"])
def test_what_is_not_finite_shows_in_its_own_request_alone(rows, value):
    layer, queries = layer_of(16), queries_of(2, 16).abs()
    getattr(layer, rows)[2] = value  # of the first request
    out = attended(helper.CompiledRowKernels(), layer, [9, 9], queries)
    assert not out[0].isfinite().any()
    assert out[1].isfinite().all()


def test_a_page_outside_of_the_pool_is_not_read():
    layer = layer_of(16, pages=3)
    with pytest.raises(IndexError, match="outside"):
        attended(helper.CompiledRowKernels(), layer, [14], queries_of(1, 16))


def test_a_token_without_a_page_is_found_before_anything_is_computed():
    table = np.array([[0, -1, 2]], np.int32)
    with pytest.raises(AssertionError, match="no page"):
        attended(helper.CompiledRowKernels(), layer_of(16), [9], queries_of(1, 16), table)


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_threads_share_the_work_and_change_no_bit(threads, monkeypatch):
    layer, queries = layer_of(64), queries_of(3, 64)
    table = np.arange(30, dtype=np.int32).reshape(3, 10)
    right = attended(helper.CompiledRowKernels(), layer, [37, 5, 20], queries, table)
    monkeypatch.setattr("stratakv.engine.in_c.PART_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    shared = attended(helper.CompiledRowKernels(), layer, [37, 5, 20], queries, table)
    assert shared.equal(right)


def test_a_table_that_is_a_view_changes_no_bit():
    layer, queries = layer_of(64), queries_of(1, 64)
    table = np.arange(10, dtype=np.int32).reshape(1, 10)
    right = attended(helper.CompiledRowKernels(), layer, [37], queries, table)
    strided = np.repeat(table, 2, axis=1)[:, ::2]
    assert attended(helper.CompiledRowKernels(), layer, [37], queries, strided).equal(right)

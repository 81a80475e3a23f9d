"""From Hugging Face's interface to the kernels, and how a step is padded and cut: none of it
changes a result. What kernels promise is held by ``stratakv.testing.kernel_conformance``."""

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.attention.dense_kernels import DenseKernels
from stratakv.engine.attention.kernels import AttentionGroup
from stratakv.engine.attention.paged_layer import LayerPages, Scoring, Scratch
from stratakv.engine.attention.row_kernels import RowKernels
from stratakv.engine.attention.step_meta import StepShape
from stratakv.engine.attention.step_plan import BUCKET_BYTES, GroupPlanner, split_widths
from stratakv.engine.batch import StepBatch
from stratakv.engine.huggingface.attention import STEP, PagedStep, paged_attention
from stratakv.engine.huggingface.hf_cache import PagedCache
from stratakv.engine.huggingface.state_layer import OpenStates
from stratakv.spec.retention import KeepAll, KeepChunk, KeepWindow, first_key, needed
from stratakv.testing.kernel_oracle import attended

HEADS, QUERY_HEADS, DIM, VALUE_DIM, SCALE = 2, 6, 8, 8, 0.3
SINKS = torch.linspace(-1, 3, QUERY_HEADS)
RULES = [KeepAll(), KeepWindow(1), KeepWindow(13), KeepChunk(12)]
# (start, count) per request, decoding ones first.
RAGGED = [(30, 1), (0, 1), (15, 1), (95, 1), (16, 1), (24, 1), (0, 9), (13, 40), (48, 1), (32, 16)]
EQUAL = [(37, 1)] * 5
LONG_CHUNK = [(0, 150)]


class Attention:
    """One layer's pools under one rule, holding random keys and values of a batch's requests.

    ``height``: rows of token ids; ``index``: what the module takes for its layer.
    """

    height, index = 1, 3

    def __init__(self, rule, page_tokens, spans, make_kernels=RowKernels, slack_pages=0):
        self.rule, self.spans = rule, spans
        self.random = torch.Generator().manual_seed(len(spans) + page_tokens)
        ends = [start + count for start, count in spans]
        wide = max(ends) // page_tokens + 1
        pages = len(spans) * wide + 3
        shape = (pages, page_tokens, HEADS)
        keys = torch.full((*shape, DIM), torch.nan)
        values = torch.full((*shape, VALUE_DIM), torch.nan)
        free = np.random.default_rng(page_tokens).permutation(pages)
        # Row 0 belongs to nobody, so that a row is not its place in the batch.
        table = np.full((len(spans) + 1, wide), -1, np.int32)
        self.keys = [self.draw(end, HEADS, DIM) for end in ends]
        self.values = [self.draw(end, HEADS, VALUE_DIM) for end in ends]
        for row, (start, count) in enumerate(spans):
            kept = needed(rule, start, page_tokens)
            last = (start + count - 1) // page_tokens
            for page_index in range(min(kept.start, start // page_tokens), last + 1):
                page, free = free[0], free[1:]
                table[row + 1, page_index] = page
                low, high = page_index * page_tokens, min(start, (page_index + 1) * page_tokens)
                if low < high:
                    keys[page, : high - low] = self.keys[row][low:high]
                    values[page, : high - low] = self.values[row][low:high]
        layer = LayerPages.of(GroupId(0), keys, values)
        kernels = make_kernels()
        page_bytes = BUCKET_BYTES // slack_pages if slack_pages else BUCKET_BYTES + 1
        group = AttentionGroup(GroupId(0), rule, page_tokens, page_bytes)
        plan = kernels.plan(group, StepShape.of(self.batch()), table)
        self.plan = plan
        self.step = PagedStep({LayerId(3): layer}, {GroupId(0): plan}, ..., None, kernels)

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.random)

    def batch(self):
        starts, counts = (np.array(column, np.int32) for column in zip(*self.spans, strict=True))
        rows = np.arange(1, len(starts) + 1, dtype=np.int32)
        tokens = np.zeros(counts.sum(), np.int32)
        return StepBatch(
            rows=rows, starts=starts, counts=counts, tokens=tokens, sampled=rows > 0, gate=None
        )

    def run(self):
        """(paged result, dense result), [T, H, VALUE_DIM] each."""
        fresh = [slice(start, start + count) for start, count in self.spans]
        new_keys = torch.cat([k[at] for k, at in zip(self.keys, fresh, strict=True)])
        new_values = torch.cat([v[at] for v, at in zip(self.values, fresh, strict=True)])
        queries = self.draw(len(new_keys), QUERY_HEADS, DIM)
        packed = [self.laid_out(rows) for rows in (queries, new_keys, new_values)]
        cache = PagedCache(self.step, OpenStates({}, {}, None, Scratch()))
        cache.update(packed[1], packed[2], 3)
        scoring = {"softcap": 0.4, "s_aux": SINKS}
        kwargs = {"scaling": SCALE, "sliding_window": 2, STEP: self.step, **scoring}
        with torch.inference_mode():
            out, _ = paged_attention(SimpleNamespace(layer_idx=self.index), *packed, None, **kwargs)
        assert out.shape[:2] == (self.height, len(queries) // self.height)
        return out.flatten(0, 1), self.dense(queries)

    def laid_out(self, rows):
        """[T, heads, dim] -> [height, heads, T / height, dim], as Hugging Face's models have it."""
        return rows.unflatten(0, (self.height, -1)).transpose(1, 2)

    def dense(self, queries):
        scoring, out = Scoring(SCALE, 0.4, SINKS), []
        for (start, count), keys, values in zip(self.spans, self.keys, self.values, strict=True):
            for position in range(start, start + count):
                seen = slice(int(first_key(self.rule, np.array([position]))[0]), position + 1)
                out.append(attended(queries[len(out)], keys[seen], values[seen], scoring))
        return torch.stack(out).float()


def dense_kernels():
    return DenseKernels(torch.device("cpu"), torch.float32)


KERNELS = [RowKernels, dense_kernels]
if find_spec("stratakv.engine.attention._row_attention"):  # there was a compiler
    KERNELS.append(
        import_module("stratakv.engine.attention.compiled_row_kernels").CompiledRowKernels
    )
each = pytest.mark.parametrize("kernels", KERNELS)


@each
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("spans", [EQUAL, LONG_CHUNK, RAGGED], ids=["equal", "long", "ragged"])
def test_padding_and_blocks_change_nothing(kernels, rule, spans, monkeypatch):
    monkeypatch.setattr("stratakv.engine.attention.step_plan.BLOCK_QUERIES", 70)
    monkeypatch.setattr("stratakv.engine.attention.step_plan.MIN_QUERIES", 4)
    for slack_pages in (0, 3, 1000):
        mine, dense = Attention(rule, 8, spans, kernels, slack_pages).run()
        torch.testing.assert_close(mine, dense, atol=2e-6, rtol=1e-5)


SIDE_BY_SIDE = [[(30, 1), (15, 1), (95, 1)], [(0, 9), (0, 9)], [(13, 20), (40, 20), (32, 20)]]


@each
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("spans", SIDE_BY_SIDE, ids=["decode", "first", "later"])
def test_equal_chunks_may_lie_side_by_side(kernels, rule, spans):
    paged = Attention(rule, 8, spans, kernels)
    paged.height = len(spans)
    mine, dense = paged.run()
    torch.testing.assert_close(mine, dense, atol=2e-6, rtol=1e-5)


def test_a_module_that_layers_share_attends_for_the_one_that_wrote_last():
    paged = Attention(KeepAll(), 8, RAGGED)
    paged.index = -1
    mine, dense = paged.run()
    torch.testing.assert_close(mine, dense, atol=2e-6, rtol=1e-5)
    with pytest.raises(AssertionError, match="before it has written"):
        Attention(KeepAll(), 8, EQUAL).step.layer_of(SimpleNamespace(layer_idx=-1))


def test_expensive_blocks_are_cut_smaller(monkeypatch):
    monkeypatch.setattr("stratakv.engine.attention.step_plan.BLOCK_PAIRS", 700 * 20)
    monkeypatch.setattr("stratakv.engine.attention.step_plan.MIN_QUERIES", 4)
    paged = Attention(KeepAll(), 16, [(90, 60)])
    assert len(paged.plan.step.chunks[0].blocks) > 2
    mine, dense = paged.run()
    torch.testing.assert_close(mine, dense, atol=2e-6, rtol=1e-5)


def test_equal_lengths_need_one_bucket_and_no_mask():
    group = Attention(KeepAll(), 16, EQUAL).plan.step
    assert [(bucket.count, bucket.mask) for bucket in group.buckets] == [(5, None)]


def test_a_first_chunk_reads_nothing_back_and_needs_no_mask():
    (chunk,) = Attention(KeepAll(), 16, LONG_CHUNK).plan.step.chunks
    assert chunk.fresh
    assert [block.mask for block in chunk.blocks] == [None]


def test_a_window_chunk_never_scores_keys_far_behind_its_window():
    (chunk,) = Attention(KeepWindow(70), 16, [(200, 500)]).plan.step.chunks
    widths = [block.keys.stop - block.keys.start for block in chunk.blocks]
    assert max(widths) <= 70 + 70
    assert chunk.skip == (200 - 69) % 16


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_query_sees_only_what_its_rule_keeps(rule):
    for page_tokens in (1, 5, 16):
        for position in range(80):
            first = int(first_key(rule, np.array([position]))[0])
            read = range(first // page_tokens, position // page_tokens + 1)
            kept = needed(rule, position, page_tokens)
            assert set(read) <= {*kept, position // page_tokens}
            assert first <= position


def test_widths_are_cut_where_padding_costs_more_than_a_bucket():
    assert split_widths(np.array([9, 9, 9]), 0) == [slice(0, 3)]
    assert split_widths(np.array([128, *[8] * 15]), 37) == [slice(0, 1), slice(1, 16)]
    assert split_widths(np.array([128, 127, 126, 125]), 0) == [slice(0, 4)]
    widths = np.sort(np.random.default_rng(0).integers(1, 200, 64))[::-1]
    parts = split_widths(widths, 50)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(64))
    padding = [int((widths[part][0] - widths[part]).sum()) for part in parts]
    assert max(padding) <= max(50, widths.sum() // 8)
    assert len(parts) <= 9


def test_a_token_without_a_page_is_our_bug():
    table = np.full((1, 4), -1, np.int32)
    table[0, 0] = 5
    planner = GroupPlanner(KeepAll(), 4, 0, torch.device("cpu"), torch.float32)
    one = np.array([1], np.int32)
    batch = StepBatch(
        rows=0 * one, starts=4 * one, counts=one, tokens=one, sampled=one > 0, gate=None
    )
    with pytest.raises(AssertionError, match="no page"):
        planner.plan(StepShape.of(batch), table)

"""Attention over buffers that stay: to the bit what a step's own plan gives, whatever was there."""

import numpy as np
import pytest
import torch

from stratakv.core.ids import GroupId
from stratakv.engine.attention.kernels import AttentionGroup, Paged
from stratakv.engine.attention.paged_layer import LayerPages, Scoring
from stratakv.engine.attention.step_meta import StepShape
from stratakv.engine.attention.triton_kernels import Partial, TritonKernels
from stratakv.engine.attention.triton_static import StaticGroup
from stratakv.engine.batch import StepBatch
from stratakv.spec.retention import KeepAll, KeepChunk, KeepWindow

AT, PAGE, PAGES, MOST, DIM = torch.device("cpu"), 64, 60, 2560, 16
RULES = (KeepAll(), KeepWindow(1500), KeepChunk(1280))


def decoding(starts):
    rows = np.arange(len(starts), dtype=np.int32)
    return StepShape.of(
        StepBatch(
            rows=rows,
            starts=np.array(starts, np.int32),
            counts=np.ones_like(rows),
            tokens=rows,
            sampled=np.ones(len(rows), np.bool_),
            gate=None,
        )
    )


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_buffers_give_what_a_plan_gives_to_the_bit(rule):
    """Contexts of one part and of several, by turns; the buffers are of the longest."""
    random = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(PAGES, PAGE, 1, DIM, generator=random) for _ in "kv")
    layer = LayerPages.of(GroupId(0), keys, values)
    group = AttentionGroup(GroupId(0), rule, PAGE, PAGE * DIM * 8)
    static, kernels = StaticGroup(group, 3, MOST, AT, Partial(AT)), TritonKernels(AT)
    table = np.random.default_rng(0).integers(0, PAGES, (3, MOST // PAGE)).astype(np.int32)
    graph = static.attention(decoding([0, 0, 0]), table, MOST)
    none = torch.empty(1, 0, DIM)
    for starts in ([2559, 5, 1100], [0, 1279, 64], [1280, 2047, 2048]):
        shape, query = decoding(starts), torch.randn(3, 2, DIM, generator=random)
        static.fill(shape, table)
        plan = kernels.plan(group, shape, table)
        assert torch.equal(graph.slots, plan.slots)
        scoring, context = Scoring(0.3, None, None), Paged(layer, none, none)
        found, wanted = (one.decode(query, context, scoring) for one in (graph, plan))
        assert torch.equal(found, wanted)
        table = np.roll(table, 1, axis=1)

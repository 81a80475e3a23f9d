"""Latents: one gather for every context of a call, nothing of it that nobody wrote."""

import numpy as np
import pytest
import torch

from stratakv.core.ids import GroupId
from stratakv.engine.batch import StepBatch
from stratakv.engine.latent_layer import (
    Contexts,
    LatentPages,
    bucket_keys,
    context_keys,
    exchange,
)
from stratakv.engine.paged_layer import Scratch
from stratakv.engine.step_meta import StepShape
from stratakv.engine.step_plan import GroupPlanner
from stratakv.spec.retention import KeepAll, KeepWindow

PAGE, RANK, ROPE = 4, 3, 2
SPANS = [(9, 1), (21, 1), (2, 1), (6, 7), (0, 5)]


def written():
    """A layer that holds SPANS' contexts, (request, position, ...) in each row; the rest is NaN."""
    pages = 40
    pool = torch.full((pages, PAGE, RANK + ROPE), torch.nan)
    free = iter(np.random.default_rng(0).permutation(pages))
    table = np.full((len(SPANS), 8), -1, np.int32)
    for row, (start, count) in enumerate(SPANS):
        for index in range(-(-(start + count) // PAGE)):
            table[row, index] = next(free)
        for position in range(start):
            pool[int(table[row, position // PAGE]), position % PAGE] = latent(row, position)
    return LatentPages.of(GroupId(0), pool), table


def latent(row, position):
    return torch.tensor([row, position, 1.0, 2.0, 3.0])


def exchanged(slack_pages, rule):
    layer, table = written()
    starts, counts = (np.array(column, np.int32) for column in zip(*SPANS, strict=True))
    rows = np.arange(len(SPANS), dtype=np.int32)
    tokens = np.zeros(counts.sum(), np.int32)
    batch = StepBatch(
        rows=rows, starts=starts, counts=counts, tokens=tokens, sampled=rows >= 0, gate=None
    )
    planner = GroupPlanner(rule, PAGE, slack_pages, torch.device("cpu"), torch.float32)
    group = planner.plan(StepShape.of(batch), table)
    fresh = [latent(r, p) for r, (start, n) in enumerate(SPANS) for p in range(start, start + n)]
    pair = torch.stack(fresh)[None, None].split((RANK, ROPE), -1)
    contexts = Contexts.of(group, PAGE)
    latents, keys = exchange(layer, group.slots, contexts, pair, Scratch())
    return layer, group, contexts, torch.cat((latents, keys), -1)[0]


def test_a_decoding_row_finds_its_own_context_and_zeros_where_nobody_wrote():
    for slack_pages in (0, 100):
        layer, group, contexts, found = exchanged(slack_pages, KeepAll())
        for bucket, start in zip(group.buckets, contexts.buckets, strict=True):
            seen = bucket_keys(found, layer, start, bucket)[:, 0]
            requests = range(bucket.count) if bucket.tokens is None else bucket.tokens.tolist()
            for at, request in enumerate(requests):
                end = SPANS[request][0] + 1
                assert seen[at, :end, 0].eq(request).all()
                assert seen[at, :end, 1].tolist() == list(range(end))
            assert seen.isfinite().all()
            if bucket.mask is not None:
                ends = bucket.mask[:, 0, 0].eq(0).sum(-1).tolist()
                assert ends == [SPANS[request][0] + 1 for request in requests]


@pytest.mark.parametrize(("rule", "begins"), [(KeepAll(), (0, 0)), (KeepWindow(2), (5, 0))])
def test_a_chunk_finds_its_context_and_itself_oldest_first(rule, begins):
    _, group, contexts, found = exchanged(0, rule)
    for at, request in enumerate((3, 4)):
        begin, end = begins[at], sum(SPANS[request])
        seen = context_keys(found, contexts.chunks[at], group.chunks[at])[0, : end - begin]
        assert seen[:, 0].eq(request).all()
        assert seen[:, 1].tolist() == list(range(begin, end))

"""What Triton's kernels are given for a step, and what their suite does not ask of them."""

import numpy as np
import pytest
import torch

from stratakv.engine.attention.kernels import AttentionGroup, Expanded, Paged, SelectedRows
from stratakv.engine.attention.paged_layer import Scoring
from stratakv.engine.attention.triton_blocks import LEAST, Blocks
from stratakv.engine.attention.triton_kernels import (
    SPLIT_ROWS,
    SPLIT_TOKENS,
    PagedWork,
    TritonKernels,
)
from stratakv.spec.retention import KeepAll, KeepChunk, KeepWindow
from stratakv.testing.kernel_conformance import KernelConformance, scoring_of
from stratakv.testing.kernel_oracle import (
    Heads,
    KernelStep,
    PagedCase,
    latent_layer,
    poisoned,
    selected,
    shape_of,
)

CPU = torch.device("cpu")


def near(found, right):
    assert found.isfinite().all(), "a row was read that nobody owns"
    bound = KernelConformance.bounds[found.dtype] * max(1.0, right.abs().max().item())
    assert (found.double() - right).abs().max() <= bound


def attended(spans, rule=None, heads=None, scoring="plain", dtype=torch.float32):
    """What the kernels give, which must be right."""
    step, kernels = KernelStep(rule or KeepAll(), 16, spans, dtype), TritonKernels(CPU)
    case = PagedCase.of(step, heads)
    plan = kernels.plan(case.group, step.shape, step.table)
    keys, values = step.fresh(case.keys), step.fresh(case.values)
    kernels.write(case.layer.key_rows, plan.slots, keys.flatten(1))
    kernels.write(case.layer.value_rows, plan.slots, values.flatten(1))
    how = scoring_of(scoring, case.heads.query, CPU, dtype)
    context = Paged(case.layer, keys.transpose(0, 1), values.transpose(0, 1))
    near(both(plan, case.query, context, how), case.right(how))


def both(plan, query, context, scoring):
    found = []
    if plan.decodes:
        found.append(plan.decode(query[: plan.decodes], context, scoring))
    if plan.decodes < len(query):
        found.append(plan.prefill(query[plan.decodes :], context, scoring))
    return torch.cat(found)


@pytest.mark.parametrize("rule", [KeepAll(), KeepWindow(1500), KeepChunk(1000)], ids=str)
def test_a_long_context_is_read_in_splits(rule):
    spans = ((2 * SPLIT_TOKENS + 300, 1), (SPLIT_TOKENS - 1, 1), (SPLIT_TOKENS, 1), (5, 1))
    attended(spans, rule, scoring="both")


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (Heads(8, 1, 192, 128), torch.float32),
        (Heads(3, 3, 80, 96), torch.float16),
        (Heads(4, 2, 256, 256), torch.float32),
        (Heads(130, 2, 16, 16), torch.float32),
        (Heads(4, 2, 24, 40), torch.bfloat16),
    ],
    ids=str,
)
def test_heads_of_real_models_and_of_none(heads, dtype):
    attended(((33, 1), (7, 1), (20, 19)), KeepWindow(30), heads, "both", dtype)


@pytest.mark.parametrize("parts", [1, 2])
def test_more_rows_are_selected_than_one_program_reads(parts):
    queries, heads, dim, value_dim, rows = 3, 5, 40, 32, 2 * SPLIT_ROWS + 90
    random = np.random.default_rng(parts)
    step = KernelStep(KeepAll(), 4, ((0, 1),))
    asked, wanted = [], []
    for part in range(parts):
        pool = step.draw(rows + 20, dim, salt=part)
        index = np.stack([random.permutation(rows + 20)[:rows] for _ in range(queries)])
        hidden = random.random(index.shape) < 0.6
        hidden[:, : 5 * SPLIT_ROWS // 4] = part == 0  # a split of which nothing is seen
        seen = np.zeros((queries, rows + 20), np.bool_)
        for at in range(queries):
            seen[at, index[at][~hidden[at]]] = True
        unseen = ~seen.any(0)
        pool[unseen] = poisoned(pool[unseen])
        asked.append(SelectedRows(pool, torch.from_numpy(index), torch.from_numpy(hidden)))
        wanted.append((pool, torch.from_numpy(seen)))
    query = step.draw(queries, heads, dim, salt=9)
    scoring = scoring_of("sinks", heads, CPU, torch.float32)
    found = TritonKernels(CPU).attend_selected(query, asked, value_dim, 0.3, scoring.sinks)
    near(found, selected(query, wanted, value_dim, scoring))


def test_keys_and_values_may_lie_in_any_order_but_within_a_row():
    """As a module's projections and its expansion leave them."""
    step = KernelStep(KeepAll(), 4, ((9, 1), (3, 6)))
    plan = TritonKernels(CPU).plan(step.attention_group(400), step.shape, step.table)
    rows = plan.gather(latent_layer(step, step.contexts(8, salt=7)))
    keys, values = step.draw(2, len(rows), 8, salt=1), step.draw(2, len(rows), 8, salt=2)
    query = step.draw(len(step.shape.positions), 4, 8, salt=3)
    scoring = Scoring(0.3, None, None)
    plain = both(plan, query, Expanded(keys, values), scoring)
    turned = Expanded(keys.mT.contiguous().mT, values.transpose(0, 1).contiguous().transpose(0, 1))
    assert both(plan, query.mT.contiguous().mT, turned, scoring).equal(plain)


@pytest.mark.parametrize("far", ["keys", "values"])
def test_heads_may_lie_further_apart_than_32_bits_reach(far):
    """As those of a long context's expanded keys; of the memory between them nobody touches any."""
    step = KernelStep(KeepAll(), 4, ((9, 1), (3, 6)), torch.float16)
    plan = TritonKernels(CPU).plan(step.attention_group(400), step.shape, step.table)
    rows = len(plan.gather(latent_layer(step, step.contexts(8, salt=7))))
    near_by = {name: step.draw(3, rows, 8, salt=at) for at, name in enumerate(("keys", "values"))}
    query = step.draw(len(step.shape.positions), 3, 8, salt=3)
    plain = both(plan, query, Expanded(**near_by), Scoring(0.3, None, None))
    apart = torch.empty(2**31 + rows * 8, dtype=torch.float16)
    apart = apart.as_strided((3, rows, 8), (2**30, 8, 1))
    context = Expanded(**near_by | {far: apart.copy_(near_by[far])})
    assert both(plan, query, context, Scoring(0.3, None, None)).equal(plain)


def work(rule, spans, size=4):
    step = KernelStep(rule, size, spans)
    group = AttentionGroup(step.group, rule, size, 400)
    return step, PagedWork.of(group, step.shape, step.table)


def test_work_covers_every_query_once():
    spans = ((30, 1), (0, 1), (5, 70), (13, 64), (0, 65), (8, 1))
    _, found = work(KeepWindow(13), spans)
    assert found.shape.decodes == 2
    items = np.concatenate((found.decoding(), found.chunks(64)))
    queries = [
        (request, position + at, token + at)
        for request, token, count, position, *_ in items.tolist()
        for at in range(count)
    ]
    wanted = [(request, start + at) for request, (start, n) in enumerate(spans) for at in range(n)]
    assert [(request, position) for request, position, _ in queries] == wanted
    assert [token for *_, token in queries] == list(range(len(wanted)))


def test_a_program_reads_what_its_queries_see_and_no_page_before():
    step, found = work(KeepChunk(12), ((30, 1), (13, 20)))
    request, token, count, position, low, page = found.chunks(16)[1].tolist()[:6]
    assert (request, token, count, position) == (1, 1 + 16, 4, 29)
    assert low == 24
    assert page == found.first_pages[1] == 12 // 4
    assert found.table[1, 0] == step.table[2, 3]
    assert found.widths.tolist() == [2, 6]
    assert found.splits == 1


def test_packed_pages_and_their_table_name_the_same_pages():
    _, found = work(KeepAll(), ((30, 1), (2, 1), (0, 9)))
    inside = np.arange(found.table.shape[1]) < found.widths[:, None]
    assert found.packed_pages[found.packed_table[inside]].tolist() == found.table[inside].tolist()


def test_splits_are_those_of_the_longest_reach():
    far = 3 * SPLIT_TOKENS
    assert work(KeepAll(), ((far, 1), (4, 1)), 64)[1].splits == 4
    assert work(KeepAll(), ((far - 1, 1), (4, 1)), 64)[1].splits == 3
    assert work(KeepWindow(SPLIT_TOKENS), ((far, 1), (far + 9, 1)), 64)[1].splits == 2


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("one_token", [False, True])
def test_tiles_hold_any_heads_and_dims(item_bytes, one_token):
    for per_head in (1, 3, 8, 16, 71, 128):
        for dim in (8, 64, 80, 96, 128, 192, 256):
            found = Blocks.paged(per_head, dim, dim, item_bytes, one_token=one_token)
            sides = (found.heads * found.queries, found.keys, found.main, found.value)
            assert all(side >= LEAST and side & (side - 1) == 0 for side in sides)
            assert found.main + found.rest >= dim <= found.value
            assert found.rest == 0 or found.rest >= LEAST
            assert not one_token or found.queries == 1
    wide = Blocks.selected(128, 576, 512, item_bytes)
    assert (wide.main, wide.rest, wide.keys) == (512, 64, LEAST)


@pytest.mark.parametrize("scoring", ["plain", "both"])
@pytest.mark.parametrize("rule", [KeepAll(), KeepWindow(700), KeepChunk(900)], ids=str)
def test_the_bits_of_a_token_do_not_depend_on_who_is_beside_it(rule, scoring):
    """Alone no request but the first is split, or has chunks of others beside its own."""
    spans = ((2 * SPLIT_TOKENS + 300, 1), (SPLIT_TOKENS - 1, 1), (5, 1), (40, 70), (0, 9))
    step, kernels = KernelStep(rule, 16, spans), TritonKernels(CPU)
    case = PagedCase.of(step)
    how = scoring_of(scoring, case.heads.query, CPU, step.dtype)
    keys, values = step.fresh(case.keys), step.fresh(case.values)

    def bits(requests):
        chosen = [spans[at] for at in requests]
        tokens = np.flatnonzero(np.isin(step.shape.token_rows, np.array(requests) + 1))
        table = step.table[[0, *(at + 1 for at in requests)]]
        plan = kernels.plan(case.group, shape_of(chosen), table)
        kernels.write(case.layer.key_rows, plan.slots, keys[tokens].flatten(1))
        kernels.write(case.layer.value_rows, plan.slots, values[tokens].flatten(1))
        context = Paged(case.layer, keys[tokens].transpose(0, 1), values[tokens].transpose(0, 1))
        return both(plan, case.query[tokens], context, how).view(torch.int32)

    together = bits(range(len(spans)))
    near(together.view(torch.float32), case.right(how))
    assert together.equal(torch.cat([bits([at]) for at in range(len(spans))]))
    two = bits([0, 2])
    assert two.equal(together[[0, 2]])

"""All kernels of the CPU pass the public suite, and the suite has teeth."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stratakv.engine.attention import step_plan
from stratakv.engine.attention.dense_kernels import DenseAttention, DenseKernels
from stratakv.engine.attention.kernels import Paged
from stratakv.engine.attention.row_kernels import RowIndex, RowKernels
from stratakv.spec.retention import KeepAll, KeepWindow
from stratakv.testing.kernel_conformance import HEADS, KernelConformance

CPU = torch.device("cpu")


class TestDenseKernels(KernelConformance):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def kernels(self, dtype):
        return DenseKernels(CPU, dtype)


class TestRowKernels(KernelConformance):
    def kernels(self, dtype):
        assert dtype == torch.float32
        return RowKernels()


COMPILED = "stratakv.engine.attention.compiled_row_kernels"


class TestCompiledRowKernels(KernelConformance):
    def kernels(self, dtype):
        compiled = pytest.importorskip(COMPILED, exc_type=ImportError)
        return compiled.CompiledRowKernels()


# --- kernels with a bug each, and the test that says so ------------------------------------------


def changed(**how):
    class Kernels(DenseKernels):
        def _attention(self, step, page_tokens, scratch):
            return type("Attention", (DenseAttention,), how)(step, page_tokens, scratch)

    return Kernels


def without(name):
    def decode(self, query, context, scoring):
        return DenseAttention.decode(self, query, context, replace(scoring, **{name: None}))

    return changed(decode=decode)


def interleaved_heads(self, query, context, scoring):
    order = torch.arange(query.shape[1]).view(-1, context.keys.shape[0]).T.flatten()
    return DenseAttention.decode(self, query[:, order], context, scoring)


def own_keys_alone(self, query, context, scoring):
    keys = self.step.chunks[0].tokens
    whole = Paged(context.layer, context.keys[:, keys], context.values[:, keys])
    self.step = replace(
        self.step, chunks=tuple(replace(chunk, fresh=True) for chunk in self.step.chunks)
    )
    return DenseAttention.prefill(self, query, whole, scoring)


class WiderWindow(DenseKernels):
    def plan(self, group, shape, table):
        return super().plan(replace(group, rule=KeepWindow(14)), shape, table)


class FirstPlanForEver(DenseKernels):
    first = None

    def plan(self, group, shape, table):
        self.first = self.first or super().plan(group, shape, table)
        return self.first


class WritesTheNextRowToo(DenseKernels):
    def write(self, pool, slots, rows):
        super().write(pool, (slots + 1) % len(pool), rows)
        super().write(pool, slots, rows)


class ShowsWhatIsHidden(DenseKernels):
    def attend_selected(self, query, parts, *rest):
        return super().attend_selected(query, [replace(p, hidden=None) for p in parts], *rest)


class WholeRowsAsValues(DenseKernels):
    def attend_selected(self, query, parts, value_dim, *rest):
        found = super().attend_selected(query, parts, parts[0].pool.shape[1], *rest)
        return found[..., -value_dim:]


class ChoosesWhatIsHidden(DenseKernels):
    def best_keys(self, query, weights, keys, k):
        return super().best_keys(query, weights, replace(keys, hidden=None, counts=None), k)


class TheLastOfEqualOnes(DenseKernels):
    def best_keys(self, query, weights, keys, k):
        n = keys.rows.shape[-1]
        rows = keys.rows.flip(-1)
        return n - 1 - super().best_keys(query, weights, replace(keys, rows=rows), k).flip(-1)


SUITE = KernelConformance
WINDOW = (SUITE.test_a_token_attends_to_what_its_rule_keeps, KeepWindow(13), 4)
SCORED = SUITE.test_heads_share_keys_and_scores_are_capped_and_sunk
SELECTED = SUITE.test_selected_rows_are_attended_together
BEST = SUITE.test_the_best_keys_are_chosen_and_the_first_of_equal_ones
KINDS = {SELECTED: {"shared": False, "sinks": False}, BEST: {"shared": False}}
BUGS = {
    "a window wider by one": (WiderWindow, *WINDOW, "decode"),
    "sinks forgotten": (without("sinks"), SCORED, HEADS[0], "sinks"),
    "no cap": (without("softcap"), SCORED, HEADS[0], "both"),
    "heads in another order": (changed(decode=interleaved_heads), SCORED, HEADS[1], "plain"),
    "a chunk sees itself alone": (changed(prefill=own_keys_alone), *WINDOW, "later"),
    "a plan is not made again": (FirstPlanForEver, SUITE.test_steps_leave_nothing_behind),
    "one plan for all groups": (
        FirstPlanForEver, SUITE.test_groups_and_layers_of_a_step_do_not_meet,
    ),
    "a row too many is written": (
        WritesTheNextRowToo, SUITE.test_rows_go_to_their_slots_and_nowhere_else,
    ),
    "hidden rows are seen": (ShowsWhatIsHidden, SELECTED, 2),
    "hidden keys are chosen": (ChoosesWhatIsHidden, BEST, "some"),
    "keys that do not count are chosen": (ChoosesWhatIsHidden, BEST, "the last"),
    "the last of equal keys": (TheLastOfEqualOnes, BEST, "nothing"),
    "another part of a row is its value": (WholeRowsAsValues, SELECTED, 1),
}  # fmt: skip


class Suite(KernelConformance):
    def __init__(self, make):
        self.make = make

    def kernels(self, dtype):
        return self.make(CPU, dtype)


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_kernel_is_caught(bug):
    make, test, *arguments = BUGS[bug]
    kinds = KINDS.get(test, {})
    test(Suite(DenseKernels), *arguments, **kinds)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        test(Suite(make), *arguments, **kinds)


def no_stale_rows(monkeypatch):
    monkeypatch.setattr(step_plan, "_unwritten", lambda *_: np.zeros(0, np.int64))


def no_own_row(monkeypatch):
    """Padding of the row index names a hidden row of the page, which nobody may have written."""
    of = RowIndex.of

    def unmasked(bucket, *rest):
        return of(replace(bucket, mask=None), *rest)

    monkeypatch.setattr(RowIndex, "of", unmasked)


@pytest.mark.parametrize(
    ("kernels", "bug"),
    [(lambda *_: RowKernels(), no_own_row), (DenseKernels, no_stale_rows)],
    ids=["rows", "pages"],
)
def test_a_row_that_nobody_has_written_is_seen(kernels, bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError, match="nobody owns"):
        WINDOW[0](Suite(kernels), KeepAll(), 4, "decode")

"""Triton's kernels pass the public suite, in its interpreter; a few cases of it in every run."""

import pytest
import torch
from triton.runtime.errors import InterpreterError

from stratakv.engine.attention import triton_kernels
from stratakv.engine.attention.triton_kernels import TritonKernels
from stratakv.spec.retention import KeepAll, KeepChunk, KeepWindow
from stratakv.testing.kernel_conformance import HEADS, KernelConformance

# NumPy's, of a tile in which the interpreter meets nothing else.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")


class Suite(KernelConformance):
    dtypes = (torch.float32, torch.float16)

    def kernels(self, dtype):
        return TritonKernels(torch.device("cpu"))


@pytest.mark.long
class TestTritonKernels(Suite):
    dtypes = (torch.float32, torch.float16, torch.bfloat16)


SOME = {
    "all": (Suite.test_a_token_attends_to_what_its_rule_keeps, KeepAll(), 16, "mixed"),
    "window": (Suite.test_a_token_attends_to_what_its_rule_keeps, KeepWindow(13), 4, "mixed"),
    "chunk": (Suite.test_a_token_attends_to_what_its_rule_keeps, KeepChunk(12), 4, "mixed"),
    "heads": (Suite.test_heads_share_keys_and_scores_are_capped_and_sunk, HEADS[1], "both"),
    "damage": (Suite.test_what_is_not_finite_harms_its_own_request_alone, 3),
    "no page": (Suite.test_a_token_without_a_page_is_refused,),
    "latents": (Suite.test_latents_are_gathered_once_and_attended_expanded, KeepAll(), "mixed"),
    "rows": (Suite.test_rows_go_to_their_slots_and_nowhere_else,),
    "nothing hidden": (Suite.test_nothing_need_be_hidden_of_what_is_selected,),
}


@pytest.mark.parametrize("case", SOME)
def test_some_of_the_suite(case):
    test, *arguments = SOME[case]
    test(Suite(), *arguments)


def test_the_best_keys():
    for hides in ("nothing", "some", "the last"):
        test = Suite().test_the_best_keys_are_chosen_and_the_first_of_equal_ones
        test(hides, shared=hides == "some")
    Suite().test_equal_keys_have_equal_scores_wherever_they_lie()


def test_selected_rows():
    Suite().test_selected_rows_are_attended_together(2, shared=False, sinks=True)
    Suite().test_selected_rows_are_attended_together(1, shared=True, sinks=False)


# --- with a bug each -----------------------------------------------------------------------------


def one_first_key(monkeypatch):
    """Of a tile of queries, instead of each one's own."""
    first = triton_kernels.first_key
    monkeypatch.setattr(triton_kernels, "first_key", lambda rule, at: first(rule, at) * 0)


def one_key_late(monkeypatch):
    """A bug that leads outside of a table would end the process: there is no driver to catch it."""
    decoding = triton_kernels.PagedWork.decoding

    def late(step):
        found = decoding(step)
        found[:, 4] += 1
        return found

    monkeypatch.setattr(triton_kernels.PagedWork, "decoding", late)


def no_rest_of_a_chunk(monkeypatch):
    """Chunks of more queries than a tile has lose the last ones."""
    chunks = triton_kernels.PagedWork.chunks
    monkeypatch.setattr(triton_kernels.PagedWork, "chunks", lambda *of: chunks(*of)[:1])


@pytest.mark.parametrize("bug", [one_first_key, one_key_late, no_rest_of_a_chunk])
def test_a_wrong_launch_is_caught(bug, monkeypatch):
    bug(monkeypatch)
    test, *arguments = SOME["window"]
    with pytest.raises((AssertionError, InterpreterError)):
        test(Suite(), *arguments)

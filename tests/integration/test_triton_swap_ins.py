"""Requests whose selected rows are on the host, with a GPU's swap-ins in Triton's interpreter: they
say what they would say with all on the device, and no row comes by the CPU."""

from dataclasses import replace

import pytest
import torch

from stratakv.assembly.device import CPU
from stratakv.engine.attention.row_kernels import RowKernels
from stratakv.engine.attention.swap_ins import SwapShape
from stratakv.engine.attention.triton_swap_ins import TritonSwapIns
from stratakv.transfer.host_rows import CpuHostRows, HostRows
from tests.fixtures.deepseek_v32 import random_tokens
from tests.offloading import CASES, answers, rows_of

PROMPTS = [random_tokens(seed, 90 + 13 * seed % 61) for seed in range(2)]


class SwapsOnDevice(RowKernels):
    """All else is the CPU's: it has tests of its own, and the interpreter is slow."""

    def swap_ins(self, host: HostRows, shape: SwapShape):
        return TritonSwapIns(host, shape, torch.device("cpu"))


class LentRows(CpuHostRows):
    lent = 0

    def route(self, layer):
        LentRows.lent += 1
        return super().route(layer)

    def load(self, layer, device, host):
        raise AssertionError("a row came by the CPU")


DEVICE = replace(CPU, host_rows=LentRows, kernels=lambda model: SwapsOnDevice())


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("small", 24),
        ("v4", 8),
        pytest.param("glm", 32, marks=pytest.mark.long),
        pytest.param("narrow v4", 16, marks=pytest.mark.long),
    ],
)
def test_answers_are_those_without_offload(name, buffer):
    some, LentRows.lent = rows_of(PROMPTS), 0
    with CASES[name].engine(buffer, device=DEVICE) as parts:
        assert answers(some, parts) == CASES[name].right(*some)
        again = answers(some, parts, first=100)
        assert again == CASES[name].right(*some), "from cached pages"
        assert LentRows.lent

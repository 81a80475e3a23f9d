"""Requests whose selected rows are on the host, on an engine as ``--device cuda`` assembles it:
over a driver that is late at random, with its swap-ins in Triton's interpreter. They say what they
would say with all on the device. Host pages that nothing was written to are NaN."""

import pytest

from stratakv.engine.attention.row_kernels import RowKernels
from stratakv.engine.attention.triton_swap_ins import TritonSwapIns
from tests.fixtures.deepseek_v32 import random_tokens
from tests.late_gpu import AT, late_gpu
from tests.offloading import CASES, answers, rows_of
from tests.offloading_ahead import ahead, lending

PROMPTS = [random_tokens(seed, 70 + 13 * seed % 61) for seed in range(3)]
OTHERS = [random_tokens(90 + seed, 100) for seed in range(2)]


class Swaps(RowKernels):
    """All else is the CPU's: it has tests of its own, and the interpreter is slow."""

    def swap_ins(self, host, shape):
        return TritonSwapIns(host, shape, AT)


@pytest.mark.parametrize(
    ("name", "buffer", "seed"),
    [
        ("small", 24, 0),
        pytest.param("v4", 8, 1, marks=pytest.mark.long),
        pytest.param("glm", 32, 2, marks=pytest.mark.long),
        pytest.param("narrow v4", 16, 3, marks=pytest.mark.long),
        *(pytest.param("small", 24, seed, marks=pytest.mark.long) for seed in range(4, 12)),
    ],
)
def test_answers_are_those_without_offload(name, buffer, seed):
    """Also from cached pages, and where host pages are others' by then: the host is short."""
    case, some, others = CASES[name], rows_of(PROMPTS), rows_of(OTHERS)
    device, driver = late_gpu(seed, kernels=lambda model: Swaps())
    swaps = []

    def lent(route):
        arena = route.arena
        assert driver.whole(arena.ctypes.data, arena.nbytes), "a row may not be pinned"
        swaps.append(route)

    with ahead(case, buffer, lending(device, lent), host=60) as parts:
        assert answers(some, parts) == case.right(*some)
        assert answers(others, parts, first=50) == case.right(*others)
        assert answers(some, parts, first=100) == case.right(*some), "from cached pages"
        assert swaps, "no row was swapped in"
        parts.engine.check()
    assert not driver.registered, "host memory stays pinned"
    driver.close()

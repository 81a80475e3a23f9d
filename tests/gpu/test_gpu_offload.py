"""Requests whose selected rows are on the host, on a GPU: they say what they would say with all on
the device."""

import copy

import pytest
import torch

from stratakv.assembly.cuda import cuda_device
from stratakv.engine.huggingface.model import wrap
from tests.fixtures.deepseek_v32 import random_tokens
from tests.offloading import CASES, answers, rows_of
from tests.offloading_ahead import ahead, lending

AT = torch.device("cuda", 0)
PROMPTS = [random_tokens(seed, 70 + 13 * seed % 61) for seed in range(3)]


@pytest.mark.parametrize(("name", "buffer"), [("small", 24), ("glm", 32), ("v4", 8)])
def test_answers_are_those_without_offload(name, buffer):
    case, some = CASES[name], rows_of(PROMPTS)
    model = wrap(copy.deepcopy(case.model.module).to(AT))
    routes = []
    with ahead(case, buffer, lending(cuda_device(0), routes.append), 60, model) as parts:
        assert answers(some, parts) == case.right(*some)
        assert answers(some, parts, first=100) == case.right(*some), "from cached pages"
        assert routes, "no row was swapped in"
        parts.engine.check()

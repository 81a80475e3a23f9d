"""A server whose decoding is slower for want of a compiler says so, and no other does."""

import pytest
import torch

from stratakv.assembly.device import cpu_kernels
from stratakv.engine.huggingface.model import wrap
from tests.fixtures.models import model_to_give_away


@pytest.mark.parametrize(
    ("built", "dtype", "lines"),
    [(False, torch.float32, 1), (False, torch.bfloat16, 0), (True, torch.float32, 0)],
)
def test_a_float32_model_without_helpers_in_c_is_a_line_of_the_log(
    built, dtype, lines, monkeypatch, caplog
):
    monkeypatch.setattr("stratakv.assembly.device.IN_C", built)
    cpu_kernels(wrap(model_to_give_away("llama").to(dtype)))
    assert len([line for line in caplog.messages if "is not built" in line]) == lines

"""Decode steps that a GPU replays as CUDA graphs give the tokens of those that it computes; what is
not recorded without a GPU may be here: a step that a capture refuses fails these."""

import logging

import numpy as np
import pytest
import torch

from stratakv.assembly.cuda import cuda_device
from stratakv.assembly.graphs import GROUPS_STAY
from stratakv.assembly.models import build_engine
from stratakv.core.config import EngineConfig
from stratakv.engine.cuda.graph_choice import GraphOptions
from stratakv.engine.huggingface.model import wrap
from tests.engines import asked_of_lengths, logprobs_of, run, tokens_of
from tests.fixtures.models import model_to_give_away

AT = torch.device("cuda", 0)
FAMILIES = ("llama", "gemma2", "gemma3", "llama4", "mamba2")
WITH_EXPERTS = ("gpt_oss", "mixtral", "qwen3_next")
"""Whose sizes torch reads back, but in bfloat16 on some GPUs."""
NEAR = 1e-3
"""Of log-probabilities: a product of padded rows may be rounded otherwise."""


def served(family, options, dtype=torch.float32):
    """More requests than rows, whose answers end one after the other."""
    config = EngineConfig(
        device="cuda", device_memory="64MiB", host_memory="16MiB", max_running=11, step_tokens=256
    )
    model = wrap(model_to_give_away(family).to(AT, dtype))
    parts = build_engine(model, config, cuda_device(0, options))
    try:
        prompts = asked_of_lengths("replayed", 20, 8)
        out = run(parts, *prompts)
        return [out[prompt.id] for prompt in prompts]
    finally:
        parts.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_give_the_tokens_of_computed_ones(family, caplog):
    with caplog.at_level(logging.INFO):
        found = served(family, GraphOptions())
    assert "5 CUDA graphs of up to 11 requests" in caplog.text
    for one, other in zip(found, served(family, GraphOptions(enabled=False)), strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert np.allclose(logprobs_of(one), logprobs_of(other), atol=NEAR)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_whose_sizes_are_read_back_run_eagerly(family, caplog):
    with caplog.at_level(logging.INFO):
        served(family, GraphOptions())
    assert "decode steps run eagerly, not as CUDA graphs: torch reads the sizes" in caplog.text


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_other_experts_are_recorded(family, caplog):
    """In bfloat16 another batch rounds otherwise: tokens may differ, and are not compared."""
    if torch.cuda.get_device_capability(AT)[0] not in GROUPS_STAY:
        pytest.skip("this GPU reads them back")
    with caplog.at_level(logging.INFO):
        found = served(family, GraphOptions(), torch.bfloat16)
    assert "5 CUDA graphs of up to 11 requests" in caplog.text
    eager = served(family, GraphOptions(enabled=False), torch.bfloat16)
    assert [len(tokens_of(one)) for one in found] == [len(tokens_of(one)) for one in eager]

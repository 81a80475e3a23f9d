"""Decode steps that a GPU replays as CUDA graphs give the tokens of those that it computes; what is
not recorded without a GPU may be here: a step that a capture refuses fails these."""

import logging

import numpy as np
import pytest
import torch

from stratakv.assembly.cuda import cuda_device
from stratakv.assembly.models import build_engine
from stratakv.core.config import EngineConfig
from stratakv.engine.cuda.graph_choice import GraphOptions
from stratakv.engine.huggingface.model import wrap
from tests.engines import asked_of_lengths, logprobs_of, run, tokens_of
from tests.fixtures.models import model_to_give_away

AT = torch.device("cuda", 0)
FAMILIES = (
    "llama", "gemma2", "gemma3", "gpt_oss", "llama4", "mixtral", "qwen3_next", "mamba2",
)  # fmt: skip
NEAR = 1e-3
"""Of log-probabilities: a product of padded rows may be rounded otherwise."""


def served(family, options):
    """More requests than rows, whose answers end one after the other."""
    config = EngineConfig(
        device="cuda", device_memory="64MiB", host_memory="16MiB", max_running=11, step_tokens=256
    )
    model = wrap(model_to_give_away(family).to(AT))
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

"""Whole models on Triton's kernels: tokens of a Hugging Face forward, computed and cached."""

from dataclasses import replace

import pytest

from stratakv.assembly.device import CPU
from stratakv.assembly.models import build_engine
from stratakv.core.config import EngineConfig
from stratakv.engine.attention.triton_kernels import TritonKernels
from stratakv.engine.huggingface.model import wrap
from tests.engines import greedy, run, tokens_of
from tests.fixtures.models import (
    model_to_give_away,
    random_prompt,
    reference_greedy,
    tiny_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
LONG = ("gpt_oss", "llama4", "deepseek_v3", "deepseek_v32", "deepseek_v4", "qwen3_next")
"""Sinks, chunks, latents, selected rows of one pool and of two, states beside attention."""


@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_a_model_runs_on_triton_kernels(family):
    config = EngineConfig(device_memory="3MiB", host_memory="1MiB", max_running=2)
    device = replace(CPU, kernels=lambda model: TritonKernels(model.device))
    parts = build_engine(wrap(model_to_give_away(family)), config, device)
    try:
        prompts = [random_prompt(seed, 150 + 7 * seed) for seed in range(2)]
        wanted = [reference_greedy(tiny_model(family), prompt, 3)[0] for prompt in prompts]
        for name in ("computed", "cached"):
            asked = [greedy(f"{name} {at}", prompt, 3) for at, prompt in enumerate(prompts)]
            out = run(parts, *asked)
            assert [tokens_of(out[prompt.id]) for prompt in asked] == wanted
        assert all(out[prompt.id][0].cached.device for prompt in asked)
        parts.engine.check()
    finally:
        parts.close()

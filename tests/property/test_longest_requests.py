"""A length of ``--max-model-len`` is given where any split of the device holds it, and what its
refusal says is allowed is accepted."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3TextConfig

from stratakv.assembly.sizing import planned, spec_for
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model_facts import plain_config
from stratakv.spec.model_facts import ModelFacts
from tests.fixtures.tiny_configs import tiny_config

GEMMA_27B = Gemma3TextConfig(
    hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, num_attention_heads=32,
    num_key_value_heads=16, head_dim=128, sliding_window=1024, max_position_embeddings=131072,
    layer_types=["full_attention" if at % 6 == 5 else "sliding_attention" for at in range(62)],
)  # fmt: skip
CONFIGS = {
    "gemma-3-27b": plain_config(GEMMA_27B),
    **{
        family: plain_config(tiny_config(family))
        for family in ("llama", "llama4", "qwen3_next", "deepseek_v4", "mamba2")
    },
}


def sizes_of(name, config):
    facts = ModelFacts(CONFIGS[name], 1 << 20, 1000, "bfloat16", None)
    return planned(spec_for(facts, config), facts, config)


def test_the_split_follows_a_length_that_is_asked_for():
    config = EngineConfig(device_memory="40GiB", host_ratio=0)
    assert sizes_of("gemma-3-27b", config).max_model_len < 131072
    asked = sizes_of("gemma-3-27b", replace(config, max_model_len=131072))
    assert asked.max_model_len == 131072
    assert asked.device[0] * asked.spec.page_tokens >= 131072
    assert "--max-model-len 131072" in asked.notice
    assert "not of --chat-tokens 2048" in asked.notice
    short = sizes_of("gemma-3-27b", replace(config, max_model_len=8192))
    assert short.device == sizes_of("gemma-3-27b", replace(config, chat_tokens=2048)).device
    assert "--chat-tokens" not in (short.notice or "")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    memory=st.integers(18, 36).map(lambda power: 1 << power),
    extra=st.integers(0, 1000),
    length=st.integers(2, 1 << 20),
    chat=st.sampled_from((64, 2048, 50_000)),
    running=st.sampled_from((1, 32)),
)
def test_what_a_refusal_allows_is_accepted(name, memory, extra, length, chat, running):
    config = EngineConfig(
        device_memory=str(memory + extra * (memory >> 10)), max_model_len=length, chat_tokens=chat,
        max_running=running, host_ratio=2.0,
    )  # fmt: skip
    try:
        assert sizes_of(name, config).max_model_len == length
    except ConfigError as error:
        refusal = str(error)
    else:
        return
    if not refusal.startswith("--max-model-len"):
        return  # not even a chunk fits
    held, more = re.search(r"holds (\d+) tokens.*--device-memory (\d+) \(", refusal).groups()
    assert int(held) < length
    if int(held) >= 2:
        allowed = sizes_of(name, replace(config, max_model_len=int(held)))
        assert allowed.max_model_len == int(held)
        with pytest.raises(ConfigError, match="--max-model-len"):
            sizes_of(name, replace(config, max_model_len=int(held) + 1))
    assert sizes_of(name, replace(config, device_memory=more)).max_model_len == length

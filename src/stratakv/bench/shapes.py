"""The models that the serving bench builds in memory: random weights, real shapes.

Owns seeds, and the sizes of the baselines. Speed does not depend on what a model says, so Hugging
Face's own init does.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Final, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    NemotronHConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

VOCABULARY: Final = 512


def llama_8x256() -> PretrainedConfig:
    """8 layers of 256, grouped queries: 8.2 million parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
    )
    return endless(config)


def gpt_oss_4x64() -> PretrainedConfig:
    """4 layers of 64, every other one with a window of 128, attention sinks, 4 experts, 2 used."""
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        max_position_embeddings=4096,
    )
    return endless(config)


def hybrid() -> PretrainedConfig:
    """Gemma 3's pattern: 6 layers of 128, all but every third with a window of 256."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=256,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=8192,
    )
    return endless(config)


def qwen3_next_4x256() -> PretrainedConfig:
    """4 layers of 256: three of gated delta net to one of full attention, 4 experts, 2 used."""
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        max_position_embeddings=8192,
    )
    return endless(config)


def nemotron_h_6x256() -> PretrainedConfig:
    """6 layers of 256: three of Mamba-2, one of attention, two of 4 experts each, 2 used."""
    config = NemotronHConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        layers_block_type=["mamba", "moe", "mamba", "attention", "moe", "mamba"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        mamba_num_heads=16,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        moe_shared_expert_intermediate_size=256,
        max_position_embeddings=8192,
    )
    return endless(config)


BASELINES: Final[Mapping[str, Callable[[], PretrainedConfig]]] = {
    "llama 8x256": llama_8x256,
    "gpt_oss 4x64": gpt_oss_4x64,
    "qwen3_next 4x256": qwen3_next_4x256,
    "nemotron_h 6x256": nemotron_h_6x256,
}


def endless(config: PretrainedConfig) -> PretrainedConfig:
    """No special token: an answer ends where the bench says."""
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return config


def build(config: PretrainedConfig) -> PreTrainedModel:
    """A float32 model of these sizes; the same weights every time."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    finally:
        torch.set_rng_state(state)
    return cast("PreTrainedModel", model.eval().requires_grad_(requires_grad=False))


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model of its own: an engine changes what it takes over."""
    return copy.deepcopy(model)

"""The models that the benches build in memory: random weights, real shapes.

Owns seeds and sizes. Speed does not depend on what a model generates, so Hugging Face's own init
does. Those of the first tokens are as large as a prompt of a few thousand tokens on one thread
allows: what the cache itself costs is the same for any size.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY: Final = 512
Shape: TypeAlias = Mapping[str, Any]


ENDLESS: Final = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""No special token: an answer ends where the bench says."""


def _shape(family: str, layers: int, width: int, **own: object) -> Shape:
    """Four heads for queries, two for keys and values."""
    usual = {
        "vocab_size": VOCABULARY, "num_hidden_layers": layers, "hidden_size": width,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
    }  # fmt: skip
    return {"model_type": family, **ENDLESS, **usual, **own}


LLAMA_4X128: Final = _shape("llama", 4, 128, intermediate_size=512, head_dim=32)
"""Full attention, grouped queries."""
LLAMA_8X256: Final = _shape("llama", 8, 256, intermediate_size=1024, head_dim=64)
"""The same, with 8.2 million parameters."""
GPT_OSS_4X64: Final = _shape(
    "gpt_oss", 4, 64,
    intermediate_size=128, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
    sliding_window=128, max_position_embeddings=4096,
)  # fmt: skip
"""Every other layer with a window of 128, attention sinks, 4 experts, 2 used."""
HYBRID: Final = _shape(
    "gemma3_text", 6, 128,
    intermediate_size=512, head_dim=32, query_pre_attn_scalar=32, sliding_window=256,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
)  # fmt: skip
"""Gemma 3's pattern: all but every third layer with a window of 256."""
LLAMA4_4X128: Final = _shape(
    "llama4_text", 4, 128,
    intermediate_size=128, intermediate_size_mlp=512, head_dim=32, num_local_experts=4,
    num_experts_per_tok=1, moe_layers=[1, 3], attention_chunk_size=1024,
    no_rope_layers=[1, 1, 1, 0], layer_types=["chunked_attention"] * 3 + ["full_attention"],
)  # fmt: skip
"""Three layers that see the chunk of 1,024 tokens they are in, then one that sees all."""
DEEPSEEK_V3_4X128: Final = _shape(
    "deepseek_v3", 4, 128,
    intermediate_size=512, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64,
    qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, first_k_dense_replace=1,
    n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1,
    moe_intermediate_size=128,
)  # fmt: skip
"""Latent attention, one dense layer, then 4 experts of which 2 are used."""
DEEPSEEK_V32_3X512: Final = _shape(
    "deepseek_v32", 3, 512,
    intermediate_size=2048, num_key_value_heads=4, q_lora_rank=256, kv_lora_rank=64,
    qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=32, first_k_dense_replace=1,
    index_n_heads=4, index_head_dim=16, index_topk=64,
    n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1,
    moe_intermediate_size=768,
)  # fmt: skip
"""An indexer that selects 64 tokens; of a token 72 elements are latents and 16 index keys, which is
V3.2's 4.5 to one."""
DEEPSEEK_V32_2X2048: Final = _shape(
    "deepseek_v32", 2, 2048,
    num_attention_heads=128, num_key_value_heads=128, intermediate_size=4096, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    first_k_dense_replace=1, index_n_heads=64, index_head_dim=128, index_topk=512,
    n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1,
    moe_intermediate_size=2048, max_position_embeddings=32768,
)  # fmt: skip
"""V3.2's attention and indexer by every number but top-k, a quarter of its own; for a GPU."""
QWEN3_NEXT_4X256: Final = _shape(
    "qwen3_next", 4, 256,
    head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32,
    linear_value_head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
)  # fmt: skip
"""Three layers of gated delta net to one of full attention, 4 experts, 2 used."""
NEMOTRON_H_6X256: Final = _shape(
    "nemotron_h", 6, 256,
    layers_block_type=["mamba", "moe", "mamba", "attention", "moe", "mamba"], head_dim=64,
    mamba_num_heads=16, mamba_head_dim=32, ssm_state_size=32, n_groups=2, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=256, moe_shared_expert_intermediate_size=256,
)  # fmt: skip
"""Three layers of Mamba-2, one of attention, two of 4 experts each, 2 used."""
MAMBA2_4X128: Final[Shape] = {
    "model_type": "mamba2", **ENDLESS, "vocab_size": VOCABULARY, "num_hidden_layers": 4,
    "hidden_size": 128, "num_heads": 8, "head_dim": 32, "state_size": 32, "n_groups": 2,
    "expand": 2,
}  # fmt: skip
"""Nothing but Mamba-2."""
LFM2_4X128: Final = _shape(
    "lfm2", 4, 128, intermediate_size=512, layer_types=["conv", "conv", "full_attention", "conv"]
)
"""Three short convolutions around one layer of full attention."""

BASELINES: Final[Mapping[str, Shape]] = {
    "llama 8x256": LLAMA_8X256,
    "gpt_oss 4x64": GPT_OSS_4X64,
    "qwen3_next 4x256": QWEN3_NEXT_4X256,
    "nemotron_h 6x256": NEMOTRON_H_6X256,
}
FIRST_TOKENS: Final[Mapping[str, Shape]] = {
    "llama": LLAMA_4X128,
    "llama 8x256": LLAMA_8X256,
    "gemma3": HYBRID,
    "llama4": LLAMA4_4X128,
    "deepseek_v3": DEEPSEEK_V3_4X128,
    "qwen3_next": QWEN3_NEXT_4X256,
    "nemotron_h": NEMOTRON_H_6X256,
    "mamba2": MAMBA2_4X128,
    "lfm2": LFM2_4X128,
}
"""One of each class of layers, by model type."""


def build(shape: Shape) -> PreTrainedModel:
    """A float32 model of these sizes; the same weights every time."""
    config = AutoConfig.for_model(**shape)
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

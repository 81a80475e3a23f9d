"""One small model per class of layers, for the times to first token.

Owns their sizes. They are as large as a prompt of a few thousand tokens on one thread allows: what
the cache itself costs is the same for any size.
"""

from collections.abc import Callable, Mapping
from typing import Final

from transformers import (
    DeepseekV3Config,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    PretrainedConfig,
)

from stratakv.bench.shapes import (
    VOCABULARY,
    endless,
    hybrid,
    llama_8x256,
    nemotron_h_6x256,
    qwen3_next_4x256,
)

POSITIONS: Final = 8192


def llama_4x128() -> PretrainedConfig:
    """Full attention, grouped queries."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
    )
    return endless(config)


def llama4_4x128() -> PretrainedConfig:
    """Three layers that see the chunk of 1,024 tokens they are in, then one that sees all."""
    config = Llama4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        intermediate_size_mlp=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=1,
        moe_layers=[1, 3],
        attention_chunk_size=1024,
        no_rope_layers=[1, 1, 1, 0],
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
        max_position_embeddings=POSITIONS,
    )
    return endless(config)


def deepseek_v3_4x128() -> PretrainedConfig:
    """Latent attention, one dense layer, then 4 experts of which 2 are used."""
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=128,
        max_position_embeddings=POSITIONS,
    )
    return endless(config)


def mamba2_4x128() -> PretrainedConfig:
    """Nothing but Mamba-2."""
    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_heads=8,
        head_dim=32,
        state_size=32,
        n_groups=2,
        expand=2,
    )
    return endless(config)


def lfm2_4x128() -> PretrainedConfig:
    """Three short convolutions around one layer of full attention."""
    config = Lfm2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "conv", "full_attention", "conv"],
        max_position_embeddings=POSITIONS,
    )
    return endless(config)


FIRST_TOKENS: Final[Mapping[str, Callable[[], PretrainedConfig]]] = {
    "llama": llama_4x128,
    "llama 8x256": llama_8x256,
    "gemma3": hybrid,
    "llama4": llama4_4x128,
    "deepseek_v3": deepseek_v3_4x128,
    "qwen3_next": qwen3_next_4x256,
    "nemotron_h": nemotron_h_6x256,
    "mamba2": mamba2_4x128,
    "lfm2": lfm2_4x128,
}
"""By model type: full attention, small and larger, sliding window, chunks, latents, gated delta
net, a Mamba-2 hybrid, Mamba-2 alone, short convolutions."""

"""The numbers of a DeepSeek-V4 configuration that its forward needs.

Owns reading them, and refusing what no published checkpoint sets. Must not load weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stratakv.engine.deepseek.common_config import (
    bounded,
    number,
    of_every_layer,
    positive,
    refuse_unlike_layers,
)
from stratakv.engine.deepseek.common_rope import rotated_dim
from stratakv.spec.model_config import ModelConfig

INDEXED: Final = "compressed_sparse_attention"
"""The layers whose blocks overlap, and whose entries an indexer selects."""
ROPES: Final = ("main", "compress")
"""Rotations by kind of layer: without entries, and with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Config:
    """``rates``: tokens per compressed entry of each layer, None for one without. ``hashes``: per
    layer, whether a token's id picks its experts. ``streams``: residual streams of mHC."""

    vocab_size: int
    hidden: int
    norm_eps: float
    rates: tuple[int | None, ...]
    indexed: tuple[bool, ...]
    heads: int
    head_dim: int
    query_rank: int
    out_groups: int
    out_rank: int
    index_heads: int
    index_dim: int
    index_topk: int
    streams: int
    sinkhorn_rounds: int
    stream_eps: float
    experts: int
    experts_per_token: int
    expert_inner: int
    hashes: tuple[bool, ...]
    scoring: str
    routed_scale: float
    limit: float

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> "V4Config":
        """fields: ``to_dict()`` of the Hugging Face configuration. ConfigError names a field that
        it cannot honour."""
        config = ModelConfig(fields)
        _refuse_variants(config)
        _refuse_sizes(config)
        types = [str(name) for name in config.items("layer_types")]
        rates = config.section("compress_rates")
        experts = of_every_layer(config, "mlp_layer_types", ("hash_moe", "moe"))
        return cls(
            vocab_size=positive(config, "vocab_size"),
            hidden=positive(config, "hidden_size"),
            norm_eps=number(config, "rms_norm_eps"),
            rates=tuple(rates.integer(name) if rates.has(name) else None for name in types),
            indexed=tuple(name == INDEXED for name in types),
            heads=positive(config, "num_attention_heads"),
            head_dim=positive(config, "head_dim"),
            query_rank=positive(config, "q_lora_rank"),
            out_groups=positive(config, "o_groups"),
            out_rank=positive(config, "o_lora_rank"),
            index_heads=positive(config, "index_n_heads"),
            index_dim=positive(config, "index_head_dim"),
            index_topk=positive(config, "index_topk"),
            streams=positive(config, "hc_mult"),
            sinkhorn_rounds=positive(config, "hc_sinkhorn_iters"),
            stream_eps=number(config, "hc_eps"),
            experts=positive(config, "n_routed_experts"),
            experts_per_token=positive(config, "num_experts_per_tok"),
            expert_inner=positive(config, "moe_intermediate_size"),
            hashes=tuple(name == "hash_moe" for name in experts),
            scoring=config.text("scoring_func"),
            routed_scale=number(config, "routed_scaling_factor"),
            limit=number(config, "swiglu_limit"),
        )


def _refuse_variants(config: ModelConfig) -> None:
    refuse_unlike_layers(config)
    # The last closed block's part in the next entry lies on a page that the window keeps.
    least = config.section("compress_rates").integer(INDEXED, 1)
    kept = config.integer("sliding_window")
    if kept < least:
        raise config.fault("sliding_window", f"at least {least}, the tokens of a block")
    if config.text("hidden_act") != "silu":
        raise config.fault("hidden_act", "'silu'")
    if config.fields.get("mlp_bias") is True:
        raise config.fault("mlp_bias", "false")
    if config.text("scoring_func") not in ("sqrtsoftplus", "sigmoid"):
        raise config.fault("scoring_func", "'sqrtsoftplus' or 'sigmoid'")
    if config.integer("num_key_value_heads") != 1:
        raise config.fault("num_key_value_heads", "1")


def _refuse_sizes(config: ModelConfig) -> None:
    rates = config.section("compress_rates")
    # Blocks are distinguished by how many tokens they have.
    if len(set(rates.fields.values())) < len(rates.fields):
        raise config.fault("compress_rates", "numbers that differ")
    width = positive(config, "num_attention_heads") * positive(config, "head_dim")
    if width % positive(config, "o_groups"):
        raise config.fault("o_groups", f"a divisor of {width}, the width of all heads")
    experts = positive(config, "n_routed_experts")
    bounded(config, "num_experts_per_tok", experts, "the experts there are")
    ropes = config.section("rope_parameters")
    turning = max(rotated_dim(config, ropes.section(name)) for name in ROPES)
    if positive(config, "index_head_dim") < turning:
        raise config.fault("index_head_dim", f"at least {turning}, its rotated elements")

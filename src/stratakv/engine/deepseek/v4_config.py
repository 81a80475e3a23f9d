"""The numbers of a DeepSeek-V4 configuration that its forward needs.

Owns reading them, and refusing what no published checkpoint sets. Must not load weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stratakv.spec.model_config import ModelConfig

INDEXED: Final = "compressed_sparse_attention"
"""The layers whose blocks overlap, and whose entries an indexer selects."""


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
        types = [str(name) for name in config.items("layer_types")]
        rates = config.section("compress_rates")
        return cls(
            vocab_size=config.integer("vocab_size"),
            hidden=config.integer("hidden_size"),
            norm_eps=_number(config, "rms_norm_eps"),
            rates=tuple(rates.integer(name) if rates.has(name) else None for name in types),
            indexed=tuple(name == INDEXED for name in types),
            heads=config.integer("num_attention_heads"),
            head_dim=config.integer("head_dim"),
            query_rank=config.integer("q_lora_rank"),
            out_groups=config.integer("o_groups"),
            out_rank=config.integer("o_lora_rank"),
            index_heads=config.integer("index_n_heads"),
            index_dim=config.integer("index_head_dim"),
            index_topk=config.integer("index_topk"),
            streams=config.integer("hc_mult"),
            sinkhorn_rounds=config.integer("hc_sinkhorn_iters"),
            stream_eps=_number(config, "hc_eps"),
            experts=config.integer("n_routed_experts"),
            experts_per_token=config.integer("num_experts_per_tok"),
            expert_inner=config.integer("moe_intermediate_size"),
            hashes=tuple(name == "hash_moe" for name in config.items("mlp_layer_types")),
            scoring=config.text("scoring_func"),
            routed_scale=_number(config, "routed_scaling_factor"),
            limit=_number(config, "swiglu_limit"),
        )


def _refuse_variants(config: ModelConfig) -> None:
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


def _number(config: ModelConfig, name: str) -> float:
    value = config.fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise config.fault(name, "a number")
    return float(value)

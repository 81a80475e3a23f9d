"""What the two families with an indexer differ in, and which configurations of them run.

Owns both lists; must not read a weight.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias, assert_never

import torch
from transformers import DeepseekV32Config, GlmMoeDsaConfig
from transformers.activations import ACT2FN

from stratakv.engine.deepseek.common_config import (
    bounded,
    number,
    of_every_layer,
    positive,
    refuse_unlike_layers,
)
from stratakv.engine.deepseek.common_rope import Rotation, rotated_dim
from stratakv.spec.model_config import ModelConfig

V32Config: TypeAlias = DeepseekV32Config | GlmMoeDsaConfig
Rotate: TypeAlias = Callable[[Rotation, torch.Tensor], torch.Tensor]


def index_rotation(config: V32Config) -> Rotate:
    """How the indexer forms pairs; in the attention beside it both take neighbours."""
    match config:
        case DeepseekV32Config():
            return Rotation.halves
        case GlmMoeDsaConfig():
            return Rotation.pairs
        case _:
            assert_never(config)


def has_indexer(config: V32Config, layer: int) -> bool:
    """Whether the layer selects for itself; one that does not takes the layer's before it."""
    match config:
        case DeepseekV32Config():
            return True
        case GlmMoeDsaConfig():
            types = config.indexer_types
            assert types is not None, "the configuration fills it"
            return types[layer] != "shared"
        case _:
            assert_never(config)


def check_v32(fields: Mapping[str, object]) -> None:
    """fields: ``to_dict()`` of the Hugging Face configuration. ConfigError names a field that
    cannot be honoured."""
    config = ModelConfig(fields)
    refuse_unlike_layers(config)
    for name in (
        "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
        "index_n_heads", "index_topk",
    ):  # fmt: skip
        positive(config, name)
    number(config, "rms_norm_eps")
    if config.text("hidden_act") not in ACT2FN:
        raise config.fault("hidden_act", "an activation that Hugging Face knows")
    of_every_layer(
        config,
        "layer_types",
        ("indexed_attention", "deepseek_sparse_attention", "full_attention"),
    )
    _check_positions(config)
    _check_indexers(config)
    if "sparse" in of_every_layer(config, "mlp_layer_types", ("dense", "sparse")):
        _check_experts(config)


def _check_positions(config: ModelConfig) -> None:
    turning, rope = positive(config, "qk_rope_head_dim"), config.section("rope_parameters")
    if rotated_dim(config, rope) != turning:
        raise config.fault("qk_rope_head_dim", "the number of rotated elements")
    if rope.has("mscale_all_dim"):
        number(rope, "mscale_all_dim")
    if positive(config, "index_head_dim") < turning:
        raise config.fault("index_head_dim", f"at least {turning}, its rotated elements")


def _check_indexers(config: ModelConfig) -> None:
    if not config.has("indexer_types"):
        return
    first, *others = of_every_layer(config, "indexer_types", ("full", "shared"))
    if first != "full":
        raise config.fault("indexer_types", "'full' in the first layer")
    if config.model_type == "deepseek_v32" and "shared" in others:
        raise config.fault("indexer_types", "'full' in every layer")


def _check_experts(config: ModelConfig) -> None:
    experts, groups = positive(config, "n_routed_experts"), positive(config, "n_group")
    for name in ("moe_intermediate_size", "n_shared_experts"):
        positive(config, name)
    number(config, "routed_scaling_factor")
    if experts % groups or experts // groups < 2:
        raise config.fault("n_group", f"a divisor of {experts} experts that leaves two in a group")
    bounded(config, "topk_group", groups, "the groups there are")
    kept = config.integer("topk_group") * (experts // groups)
    bounded(config, "num_experts_per_tok", kept, "the experts of the groups that are kept")

"""What the two families with an indexer differ in. Owns their list; must not read a weight."""

from collections.abc import Callable
from typing import TypeAlias, assert_never

import torch
from transformers import DeepseekV32Config, GlmMoeDsaConfig

from stratakv.engine.deepseek.common_rope import Rotation

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

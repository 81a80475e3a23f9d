"""One rank's share of a DeepSeek-V4 model.

Owns which numbers of its configuration are a rank's, and where ranks sum. What is split is in
``common_shard``. Must not know pages.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from stratakv.engine.deepseek.common_shard import heads_split, rank_weights, sum_over_ranks
from stratakv.engine.deepseek.v4_config import V4Config
from stratakv.engine.deepseek.v4_model import V4Layer, V4Model
from stratakv.engine.model import HuggingFaceModel


def rank_model(model: HuggingFaceModel, config: V4Config) -> V4Model:
    """config: of the whole model. Its tensors become ours, no copies."""
    heads = heads_split(model.config, model.ranks)
    found = V4Model.of(_rank_config(config, model.ranks, heads=heads), rank_weights(model.module))
    if model.ranks > 1:
        sum_over_ranks(_summed_parts(found, heads=heads))
    return found


def _rank_config(config: V4Config, ranks: int, *, heads: bool) -> V4Config:
    share = replace(config, expert_inner=config.expert_inner // ranks)
    if not heads:
        return share
    return replace(share, heads=config.heads // ranks, out_groups=config.out_groups // ranks)


def _summed_parts(model: V4Model, *, heads: bool) -> Iterator[nn.Module]:
    for layer in model.model.layers:
        assert isinstance(layer, V4Layer)
        yield layer.mlp
        if heads:
            yield layer.self_attn.o_b_proj

"""DeepSeek-V3's mixture of experts: routed in groups, with experts that every token passes.

Owns the routing. Must not know attention or a cache.
"""

from typing import Final

import torch
from torch import nn

from stratakv.engine.deepseek.common_exact import sigmoid
from stratakv.engine.deepseek.common_layers import Experts, GatedMlp, activation, gated
from stratakv.engine.deepseek.common_router import RouterLogits, normalized
from stratakv.engine.deepseek.common_topk import highest, highest_indices
from stratakv.engine.deepseek.v32_config import V32Config

_NEVER_ZERO: Final = 1e-20


class V32Router(RouterLogits):
    """Chooses experts by score plus a learned bias, and weighs them by score alone."""

    def __init__(self, config: V32Config) -> None:
        super().__init__(config.n_routed_experts, config.hidden_size)
        self.register_buffer("e_score_correction_bias", torch.empty(config.n_routed_experts))
        self.groups = config.n_group
        self.groups_kept = config.topk_group
        self.experts_kept = config.num_experts_per_tok
        self.normalized = config.norm_topk_prob
        self.scale = config.routed_scaling_factor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, hidden]. Returns the chosen experts, int64 [T, k], and their weights, float32."""
        scores = sigmoid(self.logits(x.float()))
        biased = (scores + self.get_buffer("e_score_correction_bias")).view(len(x), self.groups, -1)
        # A group is worth its two best experts; a single addition rounds in one way.
        worth = biased.topk(2, -1).values.sum(-1)
        kept = highest(worth, self.groups_kept)[..., None]
        biased = biased.masked_fill(~kept, -torch.inf).flatten(1)
        chosen = highest_indices(biased, self.experts_kept)
        weights = scores.gather(1, chosen)
        if self.normalized:
            weights = normalized(weights, _NEVER_ZERO)
        return chosen, weights * self.scale


class Moe(nn.Module):
    """Routed experts, and shared ones beside them."""

    def __init__(self, config: V32Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        act = activation(config.hidden_act)
        self.gate = V32Router(config)
        self.experts = Experts(config.n_routed_experts, hidden, inner, gated(act))
        self.shared_experts = GatedMlp(hidden, inner * config.n_shared_experts, act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        chosen, weights = self.gate(x)
        return self.experts(x, chosen, weights) + self.shared_experts(x)

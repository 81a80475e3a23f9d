"""DeepSeek-V4's feed-forward block: experts chosen by score or by token id, and a shared one.

Owns routing and clipping. Must not know attention. Source: transformers 5.23,
``DeepseekV4SparseMoeBlock``.
"""

from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import nn

from stratakv.engine.deepseek.common_exact import sigmoid, softplus
from stratakv.engine.deepseek.common_layers import Activation, Experts
from stratakv.engine.deepseek.common_router import RouterLogits, normalized
from stratakv.engine.deepseek.common_topk import highest_indices
from stratakv.engine.deepseek.v4_config import V4Config

_NEVER_ZERO: Final = 1e-20


class V4Router(RouterLogits):
    """What routers share: scores by ``weight`` [experts, hidden], and the shares made of them."""

    def __init__(self, config: V4Config) -> None:
        super().__init__(config.experts, config.hidden)
        self.scale = config.routed_scale
        self.sigmoid = config.scoring == "sigmoid"

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, experts]."""
        logits = self.logits(x)
        return sigmoid(logits) if self.sigmoid else softplus(logits).sqrt()

    def shares(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Of each chosen expert, [T, k]."""
        return normalized(scores.gather(1, chosen), _NEVER_ZERO) * self.scale


class TopKRouter(V4Router):
    """The best by score plus a bias, which counts for choosing only."""

    e_score_correction_bias: torch.Tensor

    def __init__(self, config: V4Config) -> None:
        super().__init__(config)
        self.register_buffer("e_score_correction_bias", torch.empty(config.experts))
        self.top_k = config.experts_per_token

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> experts int64 [T, k], shares [T, k]."""
        scores = self.scores(x)
        chosen = highest_indices(scores + self.e_score_correction_bias, self.top_k)
        return chosen, self.shares(scores, chosen)


class HashRouter(V4Router):
    """A token's id picks its experts, by a table [vocabulary, k] that came with the weights."""

    tid2eid: torch.Tensor

    def __init__(self, config: V4Config) -> None:
        super().__init__(config)
        shape = (config.vocab_size, config.experts_per_token)
        self.register_buffer("tid2eid", torch.empty(shape, dtype=torch.long))

    def forward(
        self, x: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden], token_ids int64 [T] -> experts int64 [T, k], shares [T, k]."""
        chosen = self.tid2eid[token_ids].long()
        return chosen, self.shares(self.scores(x), chosen)


class ClippedMlp(nn.Module):
    """Down(silu(gate(x)) * up(x)), gate and up clipped."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        inner = config.expert_inner
        self.gate_proj = nn.Linear(config.hidden, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden, bias=False)
        self.limit = config.limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down_proj(clipped(self.gate_proj(x), self.up_proj(x), self.limit))


class SparseBlock(nn.Module):
    def __init__(self, config: V4Config, layer: int) -> None:
        super().__init__()
        self.gate = HashRouter(config) if config.hashes[layer] else TopKRouter(config)
        self.experts = Experts(
            config.experts, config.hidden, config.expert_inner, clipped_gate(config.limit)
        )
        self.shared_experts = ClippedMlp(config)

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], token_ids int64 [T] -> [T, hidden]."""
        chosen, shares = self.gate(x, token_ids)
        return self.experts(x, chosen, shares) + self.shared_experts(x)


def clipped(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def clipped_gate(limit: float) -> Activation:
    """``clipped`` of gate and up side by side, as ``Experts`` calls it."""

    def glu(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return clipped(gate, up, limit)

    return glu

"""The parts that DeepSeek's models share: norm, gated feed-forward, sum over chosen experts.

Owns their arithmetic, in Hugging Face's order of operations, and under its parameter names. Must
not know a router (each model has its own) or a cache.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import nn
from transformers.activations import ACT2FN

Activation = Callable[[torch.Tensor], torch.Tensor]


def activation(name: str) -> Activation:
    """By Hugging Face's name for it."""
    return cast("Activation", ACT2FN[name])


class RMSNorm(nn.Module):
    """Scales each row to a root mean square of one, in float32, then by ``weight``."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] -> the same, in the dtype of ``x``."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class GatedMlp(nn.Module):
    """Down(act(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, act: Activation) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """gate_up_proj: [experts, 2 * inner, hidden]. down_proj: [experts, hidden, inner]. glu: makes
    [n, inner] of gate and up side by side, [n, 2 * inner]."""

    def __init__(self, count: int, hidden: int, inner: int, glu: Activation) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))
        self.glu = glu

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of what each token's experts compute.

        x: [T, hidden]. chosen: int64 [T, k]. weights: [T, k]. Returns [T, hidden]. Tokens are
        sorted by expert, so that each expert's weights are read once, whatever the batch.
        """
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        shares = weights.flatten()[order, None]
        out = torch.zeros_like(x)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.gate_up_proj)).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                some = slice(start, start + count)
                inner = self.glu(F.linear(x[tokens[some]], self.gate_up_proj[expert]))
                output = F.linear(inner, self.down_proj[expert]) * shares[some]
                out.index_add_(0, tokens[some], output.to(out.dtype))
                start += count
        return out


def gated(act: Activation) -> Activation:
    """The ``glu`` of most models: act(gate) * up."""

    def glu(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return act(gate) * up

    return glu

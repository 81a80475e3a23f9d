"""Manifold-constrained hyper-connections: several residual streams instead of one.

Owns how streams become a block's input and take its output. Must not know what the block does.
Source: transformers 5.23, ``DeepseekV4HyperConnection`` and ``DeepseekV4HyperHead``.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import nn

from stratakv.engine.deepseek.v4_config import V4Config
from stratakv.engine.deepseek.v4_norm import unit_rms


@dataclass(frozen=True, slots=True, eq=False)
class Mixing:
    """``block_input`` [T, hidden]; ``post`` [T, N]: how the block's output spreads over the N
    streams; ``comb`` [T, N, N]: how the streams themselves mix. Both are float32."""

    block_input: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor

    def spread(self, block_output: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """block_output [T, hidden], streams [T, N, hidden] before the block -> those after it."""
        dtype = streams.dtype
        mixed = self.comb.to(dtype).mT @ streams
        return mixed.addcmul_(self.post.to(dtype)[..., None], block_output[:, None])


class HyperConnection(nn.Module):
    """``fn`` [(2 + N) * N, N * hidden], ``base`` [(2 + N) * N] and ``scale`` [3] make the weights
    pre, post and comb of each token."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        n = self.streams = config.streams
        self.rounds, self.eps, self.norm_eps = (
            config.sinkhorn_rounds, config.stream_eps, config.norm_eps
        )  # fmt: skip
        self.fn = nn.Parameter(torch.empty((2 + n) * n, n * config.hidden))
        self.base = nn.Parameter(torch.empty((2 + n) * n))
        self.scale = nn.Parameter(torch.empty(3))

    def forward(self, streams: torch.Tensor) -> Mixing:
        """streams [T, N, hidden]."""
        n = self.streams
        flat = unit_rms(streams.flatten(1).float(), self.norm_eps)
        mixes = F.linear(flat, self.fn.float()).split([n, n, n * n], -1)
        bases, scales = self.base.split([n, n, n * n]), self.scale.unbind()
        pre, post, comb = (m * s + b for m, s, b in zip(mixes, scales, bases, strict=True))
        return Mixing(
            block_input=weighted_sum(torch.sigmoid(pre) + self.eps, streams),
            post=2 * torch.sigmoid(post),
            comb=self._doubly_stochastic(comb.unflatten(-1, (n, n))),
        )

    def _doubly_stochastic(self, logits: torch.Tensor) -> torch.Tensor:
        """Sinkhorn-Knopp: [T, N, N] whose rows and columns sum to one, nearly."""
        comb = torch.softmax(logits, -1).add_(self.eps)
        comb.div_(comb.sum(-2, keepdim=True).add_(self.eps))
        for _ in range(self.rounds - 1):
            comb.div_(comb.sum(-1, keepdim=True).add_(self.eps))
            comb.div_(comb.sum(-2, keepdim=True).add_(self.eps))
        return comb


class HyperHead(nn.Module):
    """The last collapse."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.eps, self.norm_eps = config.stream_eps, config.norm_eps
        self.hc_fn = nn.Parameter(torch.empty(config.streams, config.streams * config.hidden))
        self.hc_base = nn.Parameter(torch.empty(config.streams))
        self.hc_scale = nn.Parameter(torch.empty(1))

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [S, N, hidden] -> [S, hidden]."""
        flat = unit_rms(streams.flatten(1).float(), self.norm_eps)
        mixes = F.linear(flat, self.hc_fn.float()) * self.hc_scale.float() + self.hc_base.float()
        return weighted_sum(torch.sigmoid(mixes) + self.eps, streams)


def weighted_sum(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """weights [T, N], streams [T, N, hidden] -> [T, hidden]."""
    return (weights[..., None] * streams).sum(1).to(streams.dtype)

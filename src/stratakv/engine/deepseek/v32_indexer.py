"""The lightning indexer: a small attention that decides which tokens the large one sees.

Owns the scores and the selection. Must not read latents (``v32_attention``).

Hugging Face's arithmetic: the reference's Hadamard transform leaves dot products alone, and its
FP8 is a matter of speed, so both are left out.
"""

import torch
from torch import nn

from stratakv.engine.deepseek.common_rope import Rotation
from stratakv.engine.deepseek.common_topk import highest_indices
from stratakv.engine.deepseek.v32_config import V32Config, index_rotation
from stratakv.engine.deepseek.v32_step import Block, PagedRows, Seen, Selection, V32Step


class Indexer(nn.Module):
    """Selects the ``index_topk`` best tokens of each query's context; all, if there are fewer."""

    def __init__(self, config: V32Config) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.topk = config.index_topk
        self.rotate = index_rotation(config)
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.dim, bias=False)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def forward(
        self, x: torch.Tensor, low: torch.Tensor, keys: PagedRows, step: V32Step
    ) -> Selection:
        """Writes the step's index keys and selects for its queries.

        x: [T, hidden]. low: the attention's compressed queries, [T, q_lora_rank].
        """
        key = self._rotated(self.k_norm(self.wk(x)), step.rotation)
        keys.write(step.slots, key)
        query = self.wq_b(low).view(-1, self.heads, self.dim)
        query = self._rotated(query, step.rotation).float()
        weights = self.weights_proj(x.to(self.weights_proj.weight.dtype)).float()
        weights = weights * self.heads**-0.5
        buckets = tuple(
            self._bucket(query[bucket.tokens], weights[bucket.tokens], keys, bucket.seen, step)
            for bucket in step.buckets
        )
        chunks: list[tuple[Seen | None, ...]] = []
        for chunk in step.chunks:
            context = keys.read(chunk.rows, step.scratch, "index keys").float()
            chunks.append(
                tuple(
                    self._block(query[block.tokens], weights[block.tokens], context, block)
                    for block in chunk.blocks
                )
            )
        return Selection(buckets, tuple(chunks))

    def _bucket(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        keys: PagedRows,
        seen: Seen,
        step: V32Step,
    ) -> Seen:
        """query: [b, H, dim]. weights: [b, H]."""
        if seen.rows.shape[1] <= self.topk:
            return seen
        context = keys.read(seen.rows, step.scratch, "index keys").float()
        found = scores(query, context, weights)
        if seen.hidden is not None:
            found = found.masked_fill(seen.hidden, -torch.inf)
        return seen.only(highest_indices(found, self.topk))

    def _block(
        self, query: torch.Tensor, weights: torch.Tensor, context: torch.Tensor, block: Block
    ) -> Seen | None:
        """query: [m, H, dim]. weights: [m, H]. context: [n >= keys, dim]."""
        if len(block.rows) <= self.topk:
            return None
        found = scores(query, context[: len(block.rows)], weights)
        found = found.masked_fill(block.hidden, -torch.inf)
        return block.only(highest_indices(found, self.topk))

    def _rotated(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[T, ..., dim]; the first ``rope_dim`` elements turn."""
        turned = self.rotate(rotation, x[..., : self.rope_dim])
        return torch.cat((turned, x[..., self.rope_dim :]), -1)


def scores(query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over heads of weight * relu(query . key / sqrt(dim)), in float32.

    query: [m, H, dim]. keys: [n, dim], or [m, n, dim], each query's own. weights: [m, H], of either
    sign. Returns [m, n].
    """
    if keys.dim() == 2:
        # One large product instead of m small ones.
        dots = (query.flatten(0, 1) @ keys.mT).view(*query.shape[:2], -1)
    else:
        dots = query @ keys.mT
    found = dots.mul_(query.shape[-1] ** -0.5).relu_()
    return (weights[:, None] @ found).squeeze(1)

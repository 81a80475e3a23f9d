"""The lightning indexer: a small attention that decides which tokens the large one sees.

Owns its queries, keys and weights, and the selection. Must not read latents (``v32_attention``).

Hugging Face's formula: the reference's Hadamard transform leaves dot products alone, and its
FP8 is a matter of speed, so both are left out.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from stratakv.engine.attention.kernels import AttentionKernels, IndexKeys
from stratakv.engine.deepseek.common_rope import Rotation
from stratakv.engine.deepseek.v32_config import V32Config, index_rotation
from stratakv.engine.deepseek.v32_step import Block, Bucket, LayerPlace, Seen, Selection, V32Step


class V32Indexer(nn.Module):
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
        self, x: torch.Tensor, low: torch.Tensor, place: LayerPlace, step: V32Step
    ) -> Selection:
        """Writes the step's index keys and selects for its queries.

        x: [T, hidden]. low: the attention's compressed queries, [T, q_lora_rank].
        """
        keys = place.index_keys
        assert keys is not None, "a layer that selects has no index keys"
        key = self._rotated(self.k_norm(self.wk(x)), step.rotation)
        step.kernels.write(keys, step.slots, key)
        query = self.wq_b(low).view(-1, self.heads, self.dim)
        query = self._rotated(query, step.rotation)
        weights = self.weights_proj(x.to(self.weights_proj.weight.dtype)).float()
        # Of a dot product 1 / sqrt(dim) is taken; it does no harm behind the relu.
        asked = Asked(query, weights * (self.heads * self.dim) ** -0.5, keys, step.kernels)
        return Selection(
            tuple(
                bucket.chosen(place.plan, self._places(asked, bucket)) for bucket in step.buckets
            ),
            tuple(
                tuple(map(partial(self._block, asked), chunk.blocks, chunk.latents))
                for chunk in step.chunks
            ),
        )

    def _places(self, asked: "Asked", bucket: Bucket) -> torch.Tensor | None:
        seen = bucket.seen
        if seen.rows.shape[1] <= self.topk:
            return None
        return asked.best(bucket.tokens, seen.rows, seen.hidden, self.topk)

    def _block(self, asked: "Asked", keys: Block, latents: Block) -> Seen | None:
        if len(keys.rows) <= self.topk:
            return None
        return latents.only(asked.best(keys.tokens, keys.rows, keys.hidden, self.topk))

    def _rotated(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[T, ..., dim]; the first ``rope_dim`` elements turn."""
        turned = self.rotate(rotation, x[..., : self.rope_dim])
        return torch.cat((turned, x[..., self.rope_dim :]), -1)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What a step's tokens ask of one layer's index keys. query: [T, H, dim]. weights: float32
    [T, H]. keys: [rows, dim]."""

    query: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    kernels: AttentionKernels

    def best(
        self,
        tokens: torch.Tensor | slice,
        rows: torch.Tensor,
        hidden: torch.Tensor | None,
        k: int,
    ) -> torch.Tensor:
        """Places of the k best keys of each of m ``tokens``, int64 [m, k]. rows: int64 [n], or
        [m, n], each token's own. hidden: bool [m, n]."""
        keys = IndexKeys(self.keys, rows, hidden)
        return self.kernels.best_keys(self.query[tokens], self.weights[tokens], keys, k)

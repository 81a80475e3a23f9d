"""Latent attention (MLA) over pages, in absorbed form.

Owns the arithmetic between a layer's input and its output. A latent is never expanded to keys and
values: the query goes into the latents' space, and what comes out is expanded once per query. So
one row per token is read, whatever the number of heads.
"""

import torch
from torch import nn

from stratakv.core.ids import LayerId
from stratakv.engine.attention.kernels import SelectedRows
from stratakv.engine.deepseek.common_layers import RMSNorm
from stratakv.engine.deepseek.common_rope import Rotation
from stratakv.engine.deepseek.v32_config import V32Config, has_indexer
from stratakv.engine.deepseek.v32_indexer import V32Indexer
from stratakv.engine.deepseek.v32_step import Block, Seen, Selection, V32Step


class SparseLatentAttention(nn.Module):
    """H heads: their queries and keys have a part without position and a rotated one; the rotated
    part of a key is the same for all heads."""

    def __init__(self, config: V32Config, layer: LayerId, scale: float) -> None:
        super().__init__()
        bias, hidden, heads = config.attention_bias, config.hidden_size, config.num_attention_heads
        self.layer, self.scale, self.heads = layer, scale, heads
        self.rank, self.rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
        self.plain_dim, self.value_dim = config.qk_nope_head_dim, config.v_head_dim
        query_dim, expanded_dim = self.plain_dim + self.rope_dim, self.plain_dim + self.value_dim
        self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=bias)
        # Hugging Face gives these two norms no eps of the configuration.
        self.q_a_layernorm = RMSNorm(config.q_lora_rank)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * query_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.rank)
        self.kv_b_proj = nn.Linear(self.rank, heads * expanded_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.value_dim, hidden, bias=bias)
        self.indexer = V32Indexer(config) if has_indexer(config, layer) else None

    def forward(
        self, x: torch.Tensor, step: V32Step, inherited: Selection | None
    ) -> tuple[torch.Tensor, Selection]:
        """x: [T, hidden]. inherited: the selection of the layer before. Returns [T, hidden] and the
        selection it has used."""
        place = step.layers[self.layer]
        low = self.q_a_layernorm(self.q_a_proj(x))
        step.kernels.write(place.latents, step.latent_slots, self._latents(x, step.rotation))
        if self.indexer is not None:
            selection = self.indexer(x, low, place, step)
        else:
            assert inherited is not None, f"layer {self.layer} has no selection to share"
            selection = inherited
        attended = self._attend(self._queries(low, step.rotation), place.latents, selection, step)
        values = attended.transpose(0, 1) @ self._expansion()[:, self.plain_dim :].mT
        return self.o_proj(values.transpose(0, 1).flatten(1)), selection

    def _expansion(self) -> torch.Tensor:
        """From a latent to every head's key without position, then its value: [H, plain + value,
        rank]."""
        return self.kv_b_proj.weight.view(self.heads, -1, self.rank)

    def _latents(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """The rows that are cached, [T, rank + rope]."""
        latent, key = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope_dim), -1)
        return torch.cat((self.kv_a_layernorm(latent), rotation.pairs(key)), -1)

    def _queries(self, low: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """low: [T, q_lora_rank]. Returns the queries in the latents' space, [T, H, rank + rope]."""
        query = self.q_b_proj(low).view(len(low), self.heads, -1)
        plain, turning = query.split((self.plain_dim, self.rope_dim), -1)
        absorbed = (plain.transpose(0, 1) @ self._expansion()[:, : self.plain_dim]).transpose(0, 1)
        return torch.cat((absorbed, rotation.pairs(turning)), -1)

    def _attend(
        self, query: torch.Tensor, latents: torch.Tensor, selection: Selection, step: V32Step
    ) -> torch.Tensor:
        """query: [T, H, rank + rope]. Returns [T, H, rank]."""
        out = query.new_empty(*query.shape[:2], self.rank)

        def attend(tokens: torch.Tensor | slice, pool: torch.Tensor, seen: Seen | Block) -> None:
            rows = SelectedRows(pool, seen.rows, seen.hidden)
            out[tokens] = step.kernels.attend_selected(
                query[tokens], (rows,), self.rank, self.scale, None
            )

        for bucket, chosen in zip(step.buckets, selection.buckets, strict=True):
            if chosen.missing is not None:
                chosen.missing.load(self.layer)
            attend(bucket.tokens, latents, chosen.seen)
        for chunk, selected in zip(step.chunks, selection.chunks, strict=True):
            pool = chunk.pool(self.layer, latents)
            for block, seen in zip(chunk.latents, selected, strict=True):
                attend(block.tokens, pool, block if seen is None else seen)
        return out

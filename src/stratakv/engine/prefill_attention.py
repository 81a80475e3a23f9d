"""Attention of one request's chunk of queries, block by block. Owns nothing."""

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from stratakv.engine.paged_layer import LayerPages, Scoring, Scratch
from stratakv.engine.step_meta import PrefillChunk


def chunk_keys(
    key: torch.Tensor, value: torch.Tensor, layer: LayerPages, chunk: PrefillChunk, scratch: Scratch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that a chunk sees, [heads, n, dim] each, oldest first.

    key, value: the step's own, [heads, T, dim], already written to their pages.
    """
    if chunk.fresh:
        return key[:, chunk.tokens], value[:, chunk.tokens]
    keys = scratch.gather("keys", layer.key_pages, chunk.pages)
    values = scratch.gather("values", layer.value_pages, chunk.pages)
    keys = keys.view(-1, layer.heads, layer.key_dim)[chunk.skip :]
    values = values.view(-1, layer.heads, layer.value_dim)[chunk.skip :]
    return keys.transpose(0, 1).to(key.dtype), values.transpose(0, 1).to(value.dtype)


def attend_block(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """query [H, n, D], keys and values [heads, m, dim] -> [H, n, value dim].

    mask: [n, m], 0 or -inf; None: n = m and query i sees keys 0 .. i.
    """
    heads, length, _ = keys.shape
    total, count, _ = query.shape
    per_head = total // heads
    if scoring.plain:
        # Expanded views in place of enable_gqa, which has no fast kernel with a mask on a CPU.
        out = F.scaled_dot_product_attention(
            query.reshape(heads, per_head, count, -1),
            keys[:, None].expand(heads, per_head, length, -1),
            values[:, None].expand(heads, per_head, length, -1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scoring.scale,
        )
        return out.reshape(total, count, -1)
    if mask is None:
        mask = query.new_full((count, count), -torch.inf).triu_(1)
    grouped = (query * scoring.scale).reshape(heads, per_head * count, -1)
    scores = torch.bmm(grouped, keys.transpose(1, 2)).view(heads, per_head, count, -1)
    weights = scoring.weights(scores, mask, (heads, per_head, 1, 1))
    return torch.bmm(weights.reshape(heads, per_head * count, -1), values).view(total, count, -1)

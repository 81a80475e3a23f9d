"""Attention over paged keys and values, in place of Hugging Face's.

Registered as ``ATTENTION``; a model whose config names it calls ``paged_attention`` with the step's
``PagedStep`` among its keyword arguments. Owns the arithmetic. Must not decide what is visible
(``step_meta``), nor write keys or values (``hf_cache``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from transformers import AttentionInterface

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.batch import Gate
from stratakv.engine.step_meta import DecodeBucket, GroupStep, PrefillChunk

ATTENTION: Final = "stratakv_paged"
STEP: Final = "stratakv_step"
"""Keyword under which a forward passes its ``PagedStep`` to every layer."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerPages:
    """One layer's keys and values, twice: by row [pages * P, heads * dim] and by page
    [pages, P * heads * dim]. All four share memory with the pools."""

    group: GroupId
    heads: int
    key_dim: int
    value_dim: int
    key_rows: torch.Tensor
    value_rows: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor

    @classmethod
    def of(cls, group: GroupId, keys: torch.Tensor, values: torch.Tensor) -> "LayerPages":
        """keys, values: pool views [pages, P, heads, dim]."""
        pages, size, heads, key_dim = keys.shape
        assert values.shape[:3] == keys.shape[:3], f"{tuple(keys.shape)}, {tuple(values.shape)}"
        rows = pages * size
        return cls(
            group=group,
            heads=heads,
            key_dim=key_dim,
            value_dim=values.shape[3],
            key_rows=keys.view(rows, -1),
            value_rows=values.view(rows, -1),
            key_pages=keys.view(pages, -1),
            value_pages=values.view(pages, -1),
        )


class Scratch:
    """Memory that gathers land in, kept between layers and steps: fresh megabytes would be page
    faults each time. What it holds is dead as soon as the next gather begins."""

    def __init__(self) -> None:
        self._flat: dict[str, torch.Tensor] = {}

    def gather(self, name: str, pages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """pages [n, elements], index int64 [m] -> [m, elements], valid until the next call."""
        shape = (len(index), pages.shape[1])
        size = shape[0] * shape[1]
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != pages.dtype:
            flat = self._flat[name] = pages.new_empty(size + size // 4)
        return torch.index_select(pages, 0, index, out=flat[:size].view(shape))


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """Everything one forward's layers need; travels as the keyword ``STEP``, so there is no global.
    ``layers`` names the producer's pages for a layer that shares them; ``shifts``: position of each
    packed token less its place in the batch, int64 [T]."""

    layers: Mapping[LayerId, LayerPages]
    groups: Mapping[GroupId, GroupStep]
    shifts: torch.Tensor
    gate: Gate | None
    scratch: Scratch


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How a layer turns dot products into weights, as its Hugging Face module asks for it.
    ``sinks`` [heads]: a logit per query head that takes weight and gives no value."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, kwargs: Mapping[str, object], key_dim: int) -> "Scoring":
        scale = cast("float | None", kwargs.get("scaling"))
        return cls(
            scale=key_dim**-0.5 if scale is None else scale,
            softcap=cast("float | None", kwargs.get("softcap")),
            sinks=cast("torch.Tensor | None", kwargs.get("s_aux")),
        )

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's attention interface over pages that ``PagedCache.update`` has just written.

    query: [1, H, T, D]. key, value: the step's own rows, [1, heads, T, D]. ``attention_mask`` and
    ``sliding_window`` are ignored: the cache group's rule says what is visible.
    Returns [1, T, H, value dim].
    """
    del attention_mask
    step = kwargs[STEP]
    assert isinstance(step, PagedStep), "the model ran outside of a ModelRunner"
    layer = step.layers[LayerId(module.layer_idx)]  # pyright: ignore[reportArgumentType]
    group = step.groups[layer.group]
    scoring = Scoring.of(kwargs, query.shape[-1])
    flat = query[0]
    if not group.chunks and len(group.buckets) == 1:
        return _decode(flat.transpose(0, 1), layer, group.buckets[0], scoring, step.scratch)[
            None
        ], None
    out = query.new_empty(flat.shape[1], flat.shape[0], layer.value_dim)
    for bucket in group.buckets:
        if bucket.tokens is None:
            rows = flat[:, : bucket.count].transpose(0, 1)
            out[: bucket.count] = _decode(rows, layer, bucket, scoring, step.scratch)
        else:
            rows = flat.index_select(1, bucket.tokens).transpose(0, 1)
            out.index_copy_(0, bucket.tokens, _decode(rows, layer, bucket, scoring, step.scratch))
    for chunk in group.chunks:
        keys, values = _chunk_rows(key, value, layer, chunk, step.scratch)
        for block in chunk.blocks:
            some = flat[:, block.tokens]
            result = _prefill(some, keys[:, block.keys], values[:, block.keys], block.mask, scoring)
            out[block.tokens] = result.transpose(0, 1)
    return out[None], None


AttentionInterface.register(ATTENTION, paged_attention)  # pyright: ignore[reportArgumentType]


def _decode(
    query: torch.Tensor, layer: LayerPages, bucket: DecodeBucket, scoring: Scoring, scratch: Scratch
) -> torch.Tensor:
    """query [b, H, D] -> [b, H, value dim]."""
    count, heads = bucket.count, layer.heads
    keys = scratch.gather("keys", layer.key_pages, bucket.pages)
    values = scratch.gather("values", layer.value_pages, bucket.pages)
    if bucket.stale is not None:
        keys.view(-1, heads * layer.key_dim).index_fill_(0, bucket.stale, 0)
        values.view(-1, heads * layer.value_dim).index_fill_(0, bucket.stale, 0)
    keys = keys.view(count, -1, heads, layer.key_dim)[:, bucket.keys].to(query.dtype)
    values = values.view(count, -1, heads, layer.value_dim)[:, bucket.keys].to(query.dtype)
    # The query heads of one key head stand where SDPA expects queries: each key is read once.
    grouped = query.reshape(count, heads, -1, query.shape[-1])
    if scoring.plain:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=bucket.mask, scale=scoring.scale
        )
        return out.reshape(count, query.shape[1], layer.value_dim)
    grouped = grouped * scoring.scale
    length, per_head = keys.shape[1], grouped.shape[2]
    scores = query.new_empty(heads, count, per_head, length + (scoring.sinks is not None))
    # A loop over heads, since matmul would first copy keys and values to make heads a batch.
    for head in range(heads):
        torch.bmm(
            grouped[:, head], keys[:, :, head].transpose(1, 2), out=scores[head, :, :, :length]
        )
    mask = None if bucket.mask is None else bucket.mask[:, 0]
    sinks = None if scoring.sinks is None else scoring.sinks.view(heads, 1, per_head)
    weights = _weights(scores, mask, sinks, scoring.softcap)
    out = query.new_empty(count, heads, per_head, layer.value_dim)
    for head in range(heads):
        torch.bmm(weights[head, :, :, :length], values[:, :, head], out=out[:, head])
    return out.view(count, query.shape[1], layer.value_dim)


def _chunk_rows(
    key: torch.Tensor, value: torch.Tensor, layer: LayerPages, chunk: PrefillChunk, scratch: Scratch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that a chunk sees, [heads, n, dim] each."""
    if chunk.pages is None:
        return key[0, :, chunk.tokens], value[0, :, chunk.tokens]
    keys = scratch.gather("keys", layer.key_pages, chunk.pages)
    values = scratch.gather("values", layer.value_pages, chunk.pages)
    keys = keys.view(-1, layer.heads, layer.key_dim)[chunk.skip :]
    values = values.view(-1, layer.heads, layer.value_dim)[chunk.skip :]
    return keys.transpose(0, 1).to(key.dtype), values.transpose(0, 1).to(value.dtype)


def _prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """query [H, n, D], keys and values [heads, m, dim], mask [n, m] or None: causal, n = m.
    Returns [H, n, value dim]."""
    heads, length, _ = keys.shape
    total, count, _ = query.shape
    per_head = total // heads
    grouped = query.reshape(heads, per_head, count, -1)
    if scoring.plain:
        # Expanded views in place of enable_gqa, which leaves the fast kernels when there is a mask.
        wide = (heads, per_head, length, -1)
        out = F.scaled_dot_product_attention(
            grouped,
            keys[:, None].expand(wide),
            values[:, None].expand(wide),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scoring.scale,
        )
        return out.reshape(total, count, -1)
    if mask is None:
        mask = query.new_full((count, count), -torch.inf).triu_(1)
    scores = query.new_empty(heads, per_head * count, length + (scoring.sinks is not None))
    scaled = (grouped * scoring.scale).view(heads, per_head * count, -1)
    torch.bmm(scaled, keys.transpose(1, 2), out=scores[:, :, :length])
    sinks = None if scoring.sinks is None else scoring.sinks.view(heads, per_head, 1)
    weights = _weights(scores.view(heads, per_head, count, -1), mask, sinks, scoring.softcap)
    weights = weights.view(heads, per_head * count, -1)[:, :, :length]
    return torch.bmm(weights, values).view(total, count, -1)


def _weights(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Softmax of scores [..., n] in float32, with a last column of room for the sinks if there are
    any. mask broadcasts over the keys, sinks over the last column's shape. Changes ``scores``."""
    logits = scores if sinks is None else scores[..., :-1]
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        logits.add_(mask)
    if sinks is not None:
        scores[..., -1] = sinks
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)

"""Attention over paged keys and values, in place of Hugging Face's.

Registered as ``ATTENTION``; a model whose config names it calls ``paged_attention`` with the step's
``PagedStep`` among its keyword arguments. Owns the way from Hugging Face's interface to the kernels
(``decode_attention``, ``prefill_attention``). Must not decide what is visible (``step_meta``), nor
write keys or values (``hf_cache``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from transformers import AttentionInterface

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.batch import Gate
from stratakv.engine.decode_attention import RowIndex, attend_pages, attend_rows, reads_rows
from stratakv.engine.paged_layer import LayerPages, Scoring, Scratch
from stratakv.engine.prefill_attention import attend_block, chunk_keys
from stratakv.engine.step_meta import DecodeBucket, GroupStep

ATTENTION: Final = "stratakv_paged"
STEP: Final = "stratakv_step"
"""Keyword under which a forward passes its ``PagedStep`` to every layer."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """Everything one forward's layers need; travels as the keyword ``STEP``, so there is no global.

    ``layers`` names the producer's pages for a layer that shares them. ``shifts``: position of each
    packed token less its place in the batch, int64 [T].
    """

    layers: Mapping[LayerId, LayerPages]
    groups: Mapping[GroupId, GroupStep]
    shifts: torch.Tensor
    gate: Gate | None
    scratch: Scratch
    _indices: dict[tuple[int, int, int], RowIndex] = field(default_factory=dict)

    def row_index(self, bucket: DecodeBucket, layer: LayerPages, query_heads: int) -> RowIndex:
        """Built by the first layer of a group that asks, read by all that have as many heads."""
        key = (id(bucket), layer.heads, query_heads)
        found = self._indices.get(key)
        if found is None:
            slots = self.groups[layer.group].slots
            found = self._indices[key] = RowIndex.of(bucket, slots, layer, query_heads)
        return found


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's attention interface, over pages that ``PagedCache.update`` has just written.

    query: [1, H, T, D]. key, value: the step's own rows, [1, heads, T, dim]. ``attention_mask`` and
    ``sliding_window`` are ignored: the cache group's rule says what is visible; ``scaling``,
    ``softcap`` and ``s_aux`` (sinks) are honoured. Returns [1, T, H, value dim].
    """
    del attention_mask
    step = kwargs.get(STEP)
    assert isinstance(step, PagedStep), "the model ran outside of a ModelRunner"
    layer = step.layers[LayerId(module.layer_idx)]  # pyright: ignore[reportArgumentType]
    group = step.groups[layer.group]
    scoring = Scoring.of(kwargs, query.shape[-1])
    packed = query[0]
    if not group.chunks and len(group.buckets) == 1:
        out = _decode(packed.transpose(0, 1), layer, group.buckets[0], scoring, step)
        return out[None], None
    out = query.new_empty(packed.shape[1], packed.shape[0], layer.value_dim)
    for bucket in group.buckets:
        if bucket.tokens is None:
            rows = packed[:, : bucket.count].transpose(0, 1)
            out[: bucket.count] = _decode(rows, layer, bucket, scoring, step)
        else:
            rows = packed.index_select(1, bucket.tokens).transpose(0, 1)
            out.index_copy_(0, bucket.tokens, _decode(rows, layer, bucket, scoring, step))
    for chunk in group.chunks:
        keys, values = chunk_keys(key, value, layer, chunk, step.scratch)
        for block in chunk.blocks:
            seen, read = keys[:, block.keys], values[:, block.keys]
            done = attend_block(packed[:, block.tokens], seen, read, block.mask, scoring)
            out[block.tokens] = done.transpose(0, 1)
    return out[None], None


AttentionInterface.register(ATTENTION, paged_attention)  # pyright: ignore[reportArgumentType]


def _decode(
    query: torch.Tensor, layer: LayerPages, bucket: DecodeBucket, scoring: Scoring, step: PagedStep
) -> torch.Tensor:
    """query [b, H, D] -> [b, H, value dim]."""
    if reads_rows(query, layer):
        index = step.row_index(bucket, layer, query.shape[1])
        return attend_rows(query, layer, index, bucket.mask, scoring)
    return attend_pages(query, layer, bucket, scoring, step.scratch)

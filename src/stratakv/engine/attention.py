"""Attention over paged keys and values, in place of Hugging Face's.

Registered as ``ATTENTION``; a model whose config names it calls ``paged_attention`` with the step's
``PagedStep`` among its keyword arguments. Owns the way from Hugging Face's interface to the kernels
(``decode_attention``, ``prefill_attention``). Must not decide what is visible (``step_meta``), nor
write keys or values (``hf_cache``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never

import torch
from transformers import AttentionInterface

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.decode_attention import (
    RowIndex,
    attend_padded,
    attend_pages,
    attend_rows,
    reads_rows,
)
from stratakv.engine.latent_layer import Contexts, LatentPages, bucket_keys, context_keys
from stratakv.engine.paged_layer import LayerPages, Scoring, Scratch
from stratakv.engine.prefill_attention import attend_block, chunk_keys
from stratakv.engine.step_meta import DecodeBucket, GroupStep
from stratakv.transfer.engine import LayerGate

ATTENTION: Final = "stratakv_paged"
STEP: Final = "stratakv_step"
"""Keyword under which a forward passes its ``PagedStep`` to every layer."""

TokenPages: TypeAlias = LayerPages | LatentPages
"""What a layer of attention keeps of every token."""


class Cursor:
    """The layer whose keys were written last. A module that several layers call (Zamba 2) does not
    know for which of them it runs; it attends right after it has written."""

    def __init__(self) -> None:
        self.layer: LayerId | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """Everything one forward's layers need; travels as the keyword ``STEP``, so there is no global.

    ``layers`` names the producer's pages for a layer that shares them. ``positions``: of each
    packed token, int64 [T].
    """

    layers: Mapping[LayerId, TokenPages]
    groups: Mapping[GroupId, GroupStep]
    positions: torch.Tensor
    gate: LayerGate | None
    scratch: Scratch
    cursor: Cursor = field(default_factory=Cursor)
    _indices: dict[tuple[int, int, int], RowIndex] = field(default_factory=dict)
    _contexts: dict[GroupId, Contexts] = field(default_factory=dict)

    def layer_of(self, module: torch.nn.Module) -> LayerId:
        """For which layer an attention module runs; one that several share has the index -1, in the
        first Zamba none."""
        index: int | None = module.layer_idx  # pyright: ignore[reportAssignmentType]
        if index is not None and index >= 0:
            return LayerId(index)
        assert self.cursor.layer is not None, "a shared module attends before it has written"
        return self.cursor.layer

    def row_index(self, bucket: DecodeBucket, layer: LayerPages, query_heads: int) -> RowIndex:
        """Built by the first layer of a group that asks, read by all that have as many heads."""
        key = (id(bucket), layer.heads, query_heads)
        found = self._indices.get(key)
        if found is None:
            slots = self.groups[layer.group].slots
            found = self._indices[key] = RowIndex.of(bucket, slots, layer, query_heads)
        return found

    def contexts(self, layer: LatentPages) -> Contexts:
        """Built by the first layer of a group that asks, read by all."""
        found = self._contexts.get(layer.group)
        if found is None:
            group = self.groups[layer.group]
            found = self._contexts[layer.group] = Contexts.of(group, layer.page_tokens)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """One layer's attention in one call: keys and values [heads, tokens, dim] as ``update``
    returned them (of latents, expanded), and how they are scored."""

    layer: TokenPages
    group: GroupStep
    key: torch.Tensor
    value: torch.Tensor
    scoring: Scoring
    step: PagedStep

    def decode(self, query: torch.Tensor, at: int) -> torch.Tensor:
        """Bucket ``at``: query [b, H, D] -> [b, H, value dim]."""
        bucket, layer, step = self.group.buckets[at], self.layer, self.step
        match layer:
            case LayerPages():
                if not reads_rows(query, layer):
                    return attend_pages(query, layer, bucket, self.scoring, step.scratch)
                index = step.row_index(bucket, layer, query.shape[1])
                return attend_rows(query, layer, index, bucket.mask, self.scoring)
            case LatentPages():
                start = step.contexts(layer).buckets[at]
                keys = bucket_keys(self.key, layer, start, bucket)
                values = bucket_keys(self.value, layer, start, bucket)
                return attend_padded(query, keys, values, bucket.mask, self.scoring)
            case _:
                assert_never(layer)

    def chunk(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of chunk ``at``, [heads, n, dim] each, oldest first."""
        chunk, layer, step = self.group.chunks[at], self.layer, self.step
        match layer:
            case LayerPages():
                return chunk_keys(self.key, self.value, layer, chunk, step.scratch)
            case LatentPages():
                start = step.contexts(layer).chunks[at]
                return context_keys(self.key, start, chunk), context_keys(self.value, start, chunk)
            case _:
                assert_never(layer)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's attention interface, over pages that ``PagedCache.update`` has just written.

    query: [1, H, T, D], or the equal chunks of n requests, [n, H, T / n, D]. key, value: what
    ``update`` returned; latents come expanded. ``attention_mask`` and ``sliding_window`` are
    ignored: the cache group's rule says what is visible; ``scaling``, ``softcap`` and ``s_aux``
    (sinks) are honoured. Returns [1, T, H, value dim], or [n, T / n, H, value dim].
    """
    del attention_mask
    step = kwargs.get(STEP)
    assert isinstance(step, PagedStep), "the model ran outside of a ModelRunner"
    layer = step.layers[step.layer_of(module)]
    group = step.groups[layer.group]
    scoring = Scoring.of(kwargs, query.shape[-1])
    reading = _Reading(layer, group, _packed(key), _packed(value), scoring, step)
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    packed = _packed(query)
    if not group.chunks and len(group.buckets) == 1:
        return reading.decode(packed.transpose(0, 1), 0).view(shape), None
    out = query.new_empty(packed.shape[1], packed.shape[0], value.shape[-1])
    for at, bucket in enumerate(group.buckets):
        if bucket.tokens is None:
            out[: bucket.count] = reading.decode(packed[:, : bucket.count].transpose(0, 1), at)
        else:
            rows = packed.index_select(1, bucket.tokens).transpose(0, 1)
            out.index_copy_(0, bucket.tokens, reading.decode(rows, at))
    for at, chunk in enumerate(group.chunks):
        keys, values = reading.chunk(at)
        for block in chunk.blocks:
            seen, read = keys[:, block.keys], values[:, block.keys]
            done = attend_block(packed[:, block.tokens], seen, read, block.mask, scoring)
            out[block.tokens] = done.transpose(0, 1)
    return out.view(shape), None


def _packed(rows: torch.Tensor) -> torch.Tensor:
    """[n, heads, T, dim] -> [heads, n * T, dim]; a view where n or T is 1."""
    return rows.transpose(0, 1).flatten(1, 2)


AttentionInterface.register(ATTENTION, paged_attention)  # pyright: ignore[reportArgumentType]

"""Attention kernels for any device and dtype: gather pages, then run torch's dense kernels.

Owns the arithmetic of buckets and blocks, and the layout in which a step's latents go through
Hugging Face's expansion as one row of tokens: every bucket's pages, then every chunk's. Must not
decide what is visible or how rows are put together (``step_plan``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from stratakv.engine.attention.kernels import (
    AttentionGroup,
    Context,
    Expanded,
    GroupAttention,
    IndexKeys,
    Paged,
    SelectedRows,
)
from stratakv.engine.attention.paged_layer import LatentPages, LayerPages, Scoring, Scratch
from stratakv.engine.attention.selected_rows import attend_selected
from stratakv.engine.attention.step_meta import DecodeBucket, GroupStep, PrefillChunk, StepShape
from stratakv.engine.attention.step_plan import BUCKET_BYTES, GroupPlanner
from stratakv.engine.attention.swap_ins import HostSwapIns, SwapIns, SwapShape
from stratakv.engine.deepseek.common_best_keys import best_keys
from stratakv.transfer.host_rows import HostRows


class DenseKernels:
    """``AttentionKernels`` on ``device``. ``dtype``: of queries, and of what hides keys."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._scratch = Scratch()

    def plan(
        self, group: AttentionGroup, shape: StepShape, table: npt.NDArray[np.int32]
    ) -> GroupAttention:
        step = self._planner(group).plan(shape, table)
        return self._attention(step, group.page_tokens, self._scratch)

    def write(self, pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        # Rows are copied as the pool's dtype: on bytes this would be tens of times slower.
        pool.index_copy_(0, slots, rows.to(pool.dtype))

    def attend_selected(
        self,
        query: torch.Tensor,
        parts: Sequence[SelectedRows],
        value_dim: int,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        return attend_selected(query, parts, value_dim, scale, sinks, self._scratch)

    def best_keys(
        self, query: torch.Tensor, weights: torch.Tensor, keys: IndexKeys, k: int
    ) -> torch.Tensor:
        return best_keys(query, weights, keys, k)

    def swap_ins(self, host: HostRows, shape: SwapShape) -> SwapIns:
        return HostSwapIns.of(host, shape)

    def _planner(self, group: AttentionGroup) -> GroupPlanner:
        return GroupPlanner(
            rule=group.rule,
            page_tokens=group.page_tokens,
            slack_pages=BUCKET_BYTES // group.layer_bytes,
            device=self._device,
            dtype=self._dtype,
        )

    def _attention(self, step: GroupStep, page_tokens: int, scratch: Scratch) -> "DenseAttention":
        return DenseAttention(step, page_tokens, scratch)


class DenseAttention:
    """A ``GroupAttention``: decoding rows in buckets of like length, chunks block by block."""

    def __init__(self, step: GroupStep, page_tokens: int, scratch: Scratch) -> None:
        self.slots = step.slots
        self.decodes = sum(bucket.count for bucket in step.buckets)
        self.step = step
        self._page_tokens = page_tokens
        self._scratch = scratch
        self._contexts: Contexts | None = None

    def gather(self, latents: LatentPages) -> torch.Tensor:
        contexts = self._gathered()
        found = self._scratch.gather("latents", latents.pages, contexts.pages).view(-1, latents.dim)
        if contexts.stale is not None:
            found.index_fill_(0, contexts.stale, 0)
        return found

    def decode(self, query: torch.Tensor, context: Context, scoring: Scoring) -> torch.Tensor:
        buckets = self.step.buckets
        if len(buckets) == 1:
            return self._bucket(0, query, context, scoring)
        out = query.new_empty(len(query), query.shape[1], context.values.shape[-1])
        for at, bucket in enumerate(buckets):
            assert bucket.tokens is not None, "one of several buckets has all rows"
            rows = query.index_select(0, bucket.tokens)
            out.index_copy_(0, bucket.tokens, self._bucket(at, rows, context, scoring))
        return out

    def prefill(self, query: torch.Tensor, context: Context, scoring: Scoring) -> torch.Tensor:
        out = query.new_empty(len(query), query.shape[1], context.values.shape[-1])
        heads_first = query.transpose(0, 1)
        for at, chunk in enumerate(self.step.chunks):
            keys, values = self._chunk(at, context)
            for block in chunk.blocks:
                own = slice(block.tokens.start - self.decodes, block.tokens.stop - self.decodes)
                seen, read = keys[:, block.keys], values[:, block.keys]
                done = attend_block(heads_first[:, own], seen, read, block.mask, scoring)
                out[own] = done.transpose(0, 1)
        return out

    def attend_pages(
        self, at: int, query: torch.Tensor, layer: LayerPages, scoring: Scoring
    ) -> torch.Tensor:
        """Decoding rows of bucket ``at`` over pages: query [b, H, D] -> [b, H, value dim]."""
        bucket, heads = self.step.buckets[at], layer.heads
        keys = self._scratch.gather("keys", layer.key_pages, bucket.pages)
        values = self._scratch.gather("values", layer.value_pages, bucket.pages)
        if bucket.stale is not None:
            keys.view(-1, heads * layer.key_dim).index_fill_(0, bucket.stale, 0)
            values.view(-1, heads * layer.value_dim).index_fill_(0, bucket.stale, 0)
        keys = keys.view(len(query), -1, heads, layer.key_dim)[:, bucket.keys].to(query.dtype)
        values = values.view(len(query), -1, heads, layer.value_dim)[:, bucket.keys]
        values = values.to(query.dtype)
        return attend_padded(
            query, keys.transpose(1, 2), values.transpose(1, 2), bucket.mask, scoring
        )

    def _bucket(
        self, at: int, query: torch.Tensor, context: Context, scoring: Scoring
    ) -> torch.Tensor:
        match context:
            case Paged(layer):
                return self.attend_pages(at, query, layer, scoring)
            case Expanded(keys, values):
                bucket, start = self.step.buckets[at], self._gathered().buckets[at]
                keys, values = (self._of_bucket(part, start, bucket) for part in (keys, values))
                return attend_padded(query, keys, values, bucket.mask, scoring)
            case _:
                assert_never(context)

    def _of_bucket(self, found: torch.Tensor, start: int, bucket: DecodeBucket) -> torch.Tensor:
        """found [heads, tokens, dim], the bucket's from ``start`` on -> what its queries see,
        [b, heads, n, dim]."""
        tokens = len(bucket.pages) * self._page_tokens
        own = found[:, start : start + tokens].unflatten(1, (bucket.count, -1))
        return own.transpose(0, 1)[:, :, bucket.keys]

    def _chunk(self, at: int, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """What chunk ``at`` sees, [heads, n, dim] each, oldest first; of latents, what is behind
        the last one its blocks leave alone."""
        chunk = self.step.chunks[at]
        match context:
            case Paged(layer, keys, values):
                return self._chunk_pages(chunk, layer, keys, values)
            case Expanded(keys, values):
                start = self._gathered().chunks[at] + chunk.skip
                return keys[:, start:], values[:, start:]
            case _:
                assert_never(context)

    def _chunk_pages(
        self, chunk: PrefillChunk, layer: LayerPages, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if chunk.fresh:
            return key[:, chunk.tokens], value[:, chunk.tokens]
        keys = self._scratch.gather("keys", layer.key_pages, chunk.pages)
        values = self._scratch.gather("values", layer.value_pages, chunk.pages)
        keys = keys.view(-1, layer.heads, layer.key_dim)[chunk.skip :]
        values = values.view(-1, layer.heads, layer.value_dim)[chunk.skip :]
        return keys.transpose(0, 1).to(key.dtype), values.transpose(0, 1).to(value.dtype)

    def _gathered(self) -> "Contexts":
        """Worked out by the first layer of latents that asks, for all."""
        if self._contexts is None:
            self._contexts = Contexts.of(self.step, self._page_tokens)
        return self._contexts


@dataclass(frozen=True, slots=True, eq=False)
class Contexts:
    """One gather for all requests of a step. pages: int64 [n]. stale: int64, gathered tokens that
    nobody may have written, or None. buckets, chunks: first gathered token of each."""

    pages: torch.Tensor
    stale: torch.Tensor | None
    buckets: tuple[int, ...]
    chunks: tuple[int, ...]

    @classmethod
    def of(cls, step: GroupStep, page_tokens: int) -> "Contexts":
        pages = [part.pages for part in (*step.buckets, *step.chunks)]
        starts = [0]
        for part in pages:
            starts.append(starts[-1] + len(part) * page_tokens)
        stale = [
            bucket.stale + start
            for bucket, start in zip(step.buckets, starts, strict=False)
            if bucket.stale is not None
        ]
        count = len(step.buckets)
        return cls(
            pages=torch.cat(pages),
            stale=torch.cat(stale) if stale else None,
            buckets=tuple(starts[:count]),
            chunks=tuple(starts[count:-1]),
        )


def attend_padded(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """query [b, H, D], keys and values [b, heads, n, dim], mask [b, 1, 1, n] or None: all are seen.
    Returns [b, H, value dim]."""
    count, heads = keys.shape[:2]
    # The query heads of one key head stand where SDPA expects queries: each key is read once.
    grouped = query.reshape(count, heads, -1, query.shape[-1])
    if scoring.plain:
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=scoring.scale
        )
    else:
        scores = (grouped * scoring.scale) @ keys.transpose(2, 3)
        out = scoring.weights(scores, mask, (heads, -1, 1)) @ values
    return out.reshape(count, query.shape[1], values.shape[-1])


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

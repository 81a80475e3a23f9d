"""One layer's latents (MLA): written before, expanded after they are read back.

Owns the layout in which a call's contexts go through Hugging Face's expansion as one row of tokens:
every decode bucket's pages, then every chunk's. Must not decide what is visible (``step_meta``).
"""

from dataclasses import dataclass

import torch

from stratakv.core.ids import GroupId
from stratakv.engine.paged_layer import Scratch
from stratakv.engine.step_meta import DecodeBucket, GroupStep, PrefillChunk

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LatentPages:
    """One layer's latents, each with its rotary key behind; they share memory with the pools.
    By row, [pages * P, dim], and by page, [pages, P * dim]."""

    group: GroupId
    dim: int
    page_tokens: int
    rows: torch.Tensor
    pages: torch.Tensor

    @classmethod
    def of(cls, group: GroupId, latents: torch.Tensor) -> "LatentPages":
        """latents: [pages, P, dim]."""
        pages, size, dim = latents.shape
        return cls(group, dim, size, latents.view(-1, dim), latents.view(pages, -1))


@dataclass(frozen=True, slots=True, eq=False)
class Contexts:
    """One gather for all requests of a call, worked out by the first layer of a group.

    pages: int64 [n]. stale: int64, gathered tokens that nobody may have written, or None. buckets,
    chunks: first gathered token of each of the group's, in their order.
    """

    pages: torch.Tensor
    stale: torch.Tensor | None
    buckets: tuple[int, ...]
    chunks: tuple[int, ...]

    @classmethod
    def of(cls, group: GroupStep, page_tokens: int) -> "Contexts":
        pages = [part.pages for part in (*group.buckets, *group.chunks)]
        starts, at = list[int](), 0
        for part in pages:
            starts.append(at)
            at += len(part) * page_tokens
        count = len(group.buckets)
        stale = [
            bucket.stale + start
            for bucket, start in zip(group.buckets, starts[:count], strict=True)
            if bucket.stale is not None
        ]
        return cls(
            pages=torch.cat(pages),
            stale=torch.cat(stale) if stale else None,
            buckets=tuple(starts[:count]),
            chunks=tuple(starts[count:]),
        )


def exchange(
    layer: LatentPages,
    slots: torch.Tensor,
    contexts: Contexts,
    fresh: Pair,
    scratch: Scratch,
) -> Pair:
    """Write the call's latents and read every context back.

    fresh: latents and rotary keys, [n, 1, T / n, dim] each. slots: int64 [T]. Returns the same two
    of all gathered tokens, [1, 1, tokens, dim] each, valid until the next call.
    """
    dims = [part.shape[-1] for part in fresh]
    rows = torch.cat(fresh, -1).view(len(slots), -1)
    layer.rows.index_copy_(0, slots, rows.to(layer.rows.dtype))
    found = scratch.gather("latents", layer.pages, contexts.pages).view(-1, layer.dim)
    if contexts.stale is not None:
        found.index_fill_(0, contexts.stale, 0)
    latents, keys = found[None, None].to(rows.dtype).split(dims, -1)
    return latents, keys


def bucket_keys(
    expanded: torch.Tensor, layer: LatentPages, start: int, bucket: DecodeBucket
) -> torch.Tensor:
    """expanded: [heads, tokens, dim], the bucket's from ``start`` on. Returns what its queries
    see, [b, heads, n, dim]."""
    tokens = bucket.count * bucket.width * layer.page_tokens
    own = expanded[:, start : start + tokens].unflatten(1, (bucket.count, -1))
    return own.transpose(0, 1)[:, :, bucket.keys]


def context_keys(expanded: torch.Tensor, start: int, chunk: PrefillChunk) -> torch.Tensor:
    """expanded: [heads, tokens, dim], the chunk's pages from ``start`` on. Returns its keys
    [heads, n, dim], oldest first; what is behind the last one its blocks leave alone."""
    return expanded[:, start + chunk.skip :]

"""What one step of a model with an indexer reads and writes, worked out once for all its layers.

Owns the records between runner and model: where a layer keeps its rows, what each query may see,
and what an indexer has selected of it. Latents may lie on other pages than index keys, and those
of a spilled request not all on the device. Must not score anything (``v32_indexer``,
``v32_attention``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from stratakv.core.ids import LayerId
from stratakv.engine.attention.kernels import AttentionKernels
from stratakv.engine.attention.spilled_rows import SpilledContext, SpilledStep
from stratakv.engine.attention.step_meta import (
    DecodeBucket,
    GroupStep,
    PrefillBlock,
    PrefillChunk,
    StepShape,
)
from stratakv.engine.attention.swap_ins import Missing, SpilledBucket
from stratakv.engine.deepseek.common_rope import Rotation
from stratakv.transfer.engine import LayerGate


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlace:
    """Rows of one layer, [pages * P, dim] each, that share memory with the pools. ``index_keys`` is
    None in a layer that takes another's selection. ``plan``: which selection of a step it reads."""

    latents: torch.Tensor
    index_keys: torch.Tensor | None
    plan: int


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What b one-token queries see: rows of the pools, int64 [b, n].

    hidden: bool [b, n], the ones that only pad a shorter query's list; None if there are none.
    Padding names the query's own newest row, which is written: not even weight 0 makes a NaN
    harmless, and of another request's rows nobody knows.
    """

    rows: torch.Tensor
    hidden: torch.Tensor | None

    @classmethod
    def of(cls, bucket: DecodeBucket, slots: torch.Tensor, page_tokens: int) -> "Seen":
        """slots: int64 [T], where the step's tokens are written."""
        inside = torch.arange(page_tokens, device=slots.device)
        rows = bucket.pages.view(bucket.count, -1, 1) * page_tokens + inside
        rows = rows.view(bucket.count, -1)[:, bucket.keys].contiguous()
        if bucket.mask is None:
            return cls(rows, None)
        hidden = bucket.mask[:, 0, 0] != 0
        own = slots[: bucket.count] if bucket.tokens is None else slots[bucket.tokens]
        return cls(torch.where(hidden, own[:, None], rows), hidden)

    def only(self, places: torch.Tensor) -> "Seen":
        """places: int64 [b, k] into the n."""
        hidden = None if self.hidden is None else self.hidden.gather(1, places)
        return Seen(self.rows.gather(1, places), hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What queries attend to: rows of the pool of latents, once what is ``missing`` is there."""

    seen: Seen
    missing: Missing | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """b decoding queries. tokens: their places in the packed batch. seen: index keys; latents: the
    same tokens' latents."""

    tokens: torch.Tensor | slice
    seen: Seen
    latents: Seen
    spilled: SpilledBucket | None

    def chosen(self, plan: int, places: torch.Tensor | None) -> Chosen:
        """places: int64 [b, k] into what is seen; None: all of it."""
        seen = self.latents if places is None else self.latents.only(places)
        if self.spilled is None:
            return Chosen(seen)
        rows, missing = self.spilled.read(plan, seen.rows, places, seen.hidden)
        return Chosen(Seen(rows, seen.hidden), missing)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """m consecutive queries of one chunk. tokens: their places in the packed batch. rows: of the
    keys that the last one sees, int64 [keys], oldest first. hidden: bool [m, keys]."""

    tokens: slice
    rows: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def of(cls, block: PrefillBlock, rows: torch.Tensor) -> "Block":
        """rows: int64 [n >= keys], of the whole chunk."""
        count, keys = block.tokens.stop - block.tokens.start, block.keys.stop
        if block.mask is not None:
            return cls(block.tokens, rows[:keys], block.mask != 0)
        hidden = torch.ones(count, keys, dtype=torch.bool, device=rows.device)
        return cls(block.tokens, rows[:keys], hidden.triu(keys - count + 1))

    def only(self, places: torch.Tensor) -> Seen:
        """places: int64 [m, k] into the keys. What is hidden is written all the same: it belongs
        to the chunk."""
        return Seen(self.rows[places], self.hidden.gather(1, places))


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One request's chunk, cut into blocks. blocks: what their queries see of index keys; latents:
    the same of latents, which of a spilled request are places in its ``context``."""

    blocks: tuple[Block, ...]
    latents: tuple[Block, ...]
    context: SpilledContext | None

    @classmethod
    def of(
        cls,
        keys: PrefillChunk,
        latents: PrefillChunk,
        page_tokens: int,
        spilled: tuple[SpilledStep, int] | None,
    ) -> "Chunk":
        rows = _context(latents, page_tokens)
        blocks = _blocks(keys, _context(keys, page_tokens))
        if spilled is None:
            return cls(blocks, _blocks(latents, rows), None)
        read = torch.arange(len(rows), device=rows.device)
        return cls(blocks, _blocks(latents, read), SpilledContext(*spilled, rows))

    def pool(self, layer: LayerId, latents: torch.Tensor) -> torch.Tensor:
        """What the rows of its blocks are rows of."""
        return latents if self.context is None else self.context.pool(layer, latents)


def _context(chunk: PrefillChunk, page_tokens: int) -> torch.Tensor:
    inside = torch.arange(page_tokens, device=chunk.pages.device)
    rows = (chunk.pages[:, None] * page_tokens + inside).view(-1)
    # The last page may end in rows that nobody has written.
    return rows[: chunk.blocks[-1].keys.stop]


def _blocks(chunk: PrefillChunk, rows: torch.Tensor) -> tuple[Block, ...]:
    return tuple(Block.of(block, rows) for block in chunk.blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What every query attends to, by bucket and by block of each chunk; None where a block has
    nothing to select from: all that it sees."""

    buckets: tuple[Chosen, ...]
    chunks: tuple[tuple[Seen | None, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class V32Step:
    """slots: int64 [T], the row of each packed token's index key; latent_slots: of its latent."""

    layers: Mapping[LayerId, LayerPlace]
    slots: torch.Tensor
    latent_slots: torch.Tensor
    rotation: Rotation
    buckets: tuple[Bucket, ...]
    chunks: tuple[Chunk, ...]
    gate: LayerGate | None
    kernels: AttentionKernels


@dataclass(frozen=True, slots=True, eq=False)
class GroupSteps:
    """One step of index keys and latents, which may be one group's. spilled: None where every
    request has its latents on the device."""

    shape: StepShape
    keys: GroupStep
    latents: GroupStep
    spilled: SpilledStep | None

    def buckets(self, page_tokens: int) -> tuple[Bucket, ...]:
        return tuple(
            self._bucket(keys, latents, page_tokens)
            for keys, latents in zip(self.keys.buckets, self.latents.buckets, strict=True)
        )

    def _bucket(self, keys: DecodeBucket, latents: DecodeBucket, page_tokens: int) -> Bucket:
        count = keys.count
        tokens = slice(count) if keys.tokens is None else keys.tokens
        seen = latent = Seen.of(keys, self.keys.slots, page_tokens)
        if latents is not keys:
            latent = Seen.of(latents, self.latents.slots, page_tokens)
        which = np.arange(count) if keys.tokens is None else keys.tokens.numpy(force=True)
        spilled = None if self.spilled is None else self.spilled.bucket(which)
        return Bucket(tokens, seen, latent, spilled)

    def chunks(self, page_tokens: int) -> tuple[Chunk, ...]:
        found: list[Chunk] = []
        for at, (keys, latents) in enumerate(
            zip(self.keys.chunks, self.latents.chunks, strict=True), self.shape.decodes
        ):
            spilled = self.spilled
            away = None
            if spilled is not None and spilled.which.item(at):
                away = spilled, self.shape.rows.item(at)
            found.append(Chunk.of(keys, latents, page_tokens, away))
        return tuple(found)

"""What one step of a model with an indexer reads and writes, worked out once for all its layers.

Owns the records between runner and model: where a layer keeps its rows, what each query may see,
and what an indexer has selected of it. Must not score anything (``v32_indexer``,
``v32_attention``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stratakv.core.ids import LayerId
from stratakv.engine.deepseek.common_rope import Rotation
from stratakv.engine.kernels import AttentionKernels
from stratakv.engine.step_meta import DecodeBucket, GroupStep, PrefillBlock, PrefillChunk
from stratakv.transfer.engine import LayerGate


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlace:
    """Rows of one layer, [pages * P, dim] each, that share memory with the pools. ``index_keys`` is
    None in a layer that takes another's selection."""

    latents: torch.Tensor
    index_keys: torch.Tensor | None


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
class Bucket:
    """b decoding queries. tokens: their places in the packed batch."""

    tokens: torch.Tensor | slice
    seen: Seen


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
    """One request's chunk, cut into blocks. rows: of all its context, int64 [n], oldest first."""

    rows: torch.Tensor
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, chunk: PrefillChunk, page_tokens: int) -> "Chunk":
        inside = torch.arange(page_tokens, device=chunk.pages.device)
        rows = (chunk.pages[:, None] * page_tokens + inside).view(-1)
        # The last page may end in rows that nobody has written.
        rows = rows[: chunk.blocks[-1].keys.stop]
        return cls(rows, tuple(Block.of(block, rows) for block in chunk.blocks))


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What every query attends to, by bucket and by block of each chunk; None where a block has
    nothing to select from: all that it sees."""

    buckets: tuple[Seen, ...]
    chunks: tuple[tuple[Seen | None, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class V32Step:
    """slots: int64 [T], the pool row of each packed token; it is the same in every buffer."""

    layers: Mapping[LayerId, LayerPlace]
    slots: torch.Tensor
    rotation: Rotation
    buckets: tuple[Bucket, ...]
    chunks: tuple[Chunk, ...]
    gate: LayerGate | None
    kernels: AttentionKernels

    @classmethod
    def of(
        cls,
        layers: Mapping[LayerId, LayerPlace],
        group: GroupStep,
        page_tokens: int,
        rotation: Rotation,
        gate: LayerGate | None,
        kernels: AttentionKernels,
    ) -> "V32Step":
        return cls(
            layers=layers,
            slots=group.slots,
            rotation=rotation,
            buckets=tuple(
                Bucket(
                    slice(bucket.count) if bucket.tokens is None else bucket.tokens,
                    Seen.of(bucket, group.slots, page_tokens),
                )
                for bucket in group.buckets
            ),
            chunks=tuple(Chunk.of(chunk, page_tokens) for chunk in group.chunks),
            gate=gate,
            kernels=kernels,
        )

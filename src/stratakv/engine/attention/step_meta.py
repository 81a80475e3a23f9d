"""What one step's attention reads and writes in each cache group, worked out once for all layers.

Owns the records between planner and attention. Must not touch keys or values (``attention``,
``hf_cache``).
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from stratakv.engine.batch import StepBatch

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepShape:
    """What all groups share of a batch; int64.

    rows, starts, ends: [R]. offsets: where each request's tokens begin in the packed batch, [R].
    token_rows, positions: [T]. ``decodes``: how many leading requests compute one token each.
    """

    rows: Ints
    starts: Ints
    ends: Ints
    offsets: Ints
    token_rows: Ints
    positions: Ints
    decodes: int

    @classmethod
    def of(cls, batch: StepBatch) -> "StepShape":
        counts = batch.counts.astype(np.int64)
        starts = batch.starts.astype(np.int64)
        rows = batch.rows.astype(np.int64)
        ends, offsets = starts + counts, np.cumsum(counts) - counts
        longer = np.flatnonzero(counts != 1)
        if not len(longer):
            return cls(rows, starts, ends, offsets, rows, starts, len(rows))
        positions = np.arange(len(batch.tokens)) + np.repeat(starts - offsets, counts)
        token_rows = np.repeat(rows, counts)
        return cls(rows, starts, ends, offsets, token_rows, positions, int(longer[0]))


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBucket:
    """b one-token queries whose pages are gathered together, ``width`` pages of P tokens each.

    tokens: int64 [b], their places in the packed batch; None where they are 0 .. b - 1.
    pages: int64 [b * width]. keys: the gathered tokens that the queries see, where that is one
    slice for all of them. Otherwise it is every token, and ``mask`` [b, 1, 1, width * P] is 0 or
    -inf.
    stale: int64, gathered tokens that nobody may have written: they must be zeroed before use,
    because neither -inf + NaN nor 0 x NaN is harmless.
    """

    count: int
    width: int
    tokens: torch.Tensor | None
    pages: torch.Tensor
    keys: slice
    mask: torch.Tensor | None
    stale: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class PrefillBlock:
    """n consecutive queries of one chunk, and the consecutive keys that any of them sees.

    tokens: their places in the packed batch. keys: places among the chunk's keys. mask: [n, keys],
    0 or -inf; None where queries and keys cover the same positions and causality is all.
    """

    tokens: slice
    keys: slice
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class PrefillChunk:
    """One request's chunk. Its keys are those of ``pages`` (int64) from token ``skip`` on.
    ``fresh``: it sees nothing before itself, so the step's own keys will do."""

    tokens: slice
    pages: torch.Tensor
    skip: int
    fresh: bool
    blocks: tuple[PrefillBlock, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GroupStep:
    """slots: int64 [T], the row (page * P + offset) where each token's key and value belong."""

    slots: torch.Tensor
    buckets: tuple[DecodeBucket, ...]
    chunks: tuple[PrefillChunk, ...]

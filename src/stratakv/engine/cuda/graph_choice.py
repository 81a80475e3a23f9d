"""Which steps are replayed as CUDA graphs, of which size, and why others are not.

Owns the sizes that are captured, how long a context may be in each, and the choice for a step.
Arithmetic alone: must not import torch, nor know what a graph is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from stratakv.engine.batch import StepBatch

SMALL_SIZES: Final = (1, 2, 4)
SIZE_STEP: Final = 8
DEFAULT_MAX_BS: Final = 256
"""Rows of the largest graph, where nothing else is said and so many run at once."""
SPLITS: Final = 4096
"""Parts of contexts, over all rows, that a graph's attention has room for: what the parts find is
kept between two kernels, and a part that a shorter context has not got is launched nonetheless."""


class Eager(Enum):
    """Why a step is not replayed."""

    CHUNKS = "it computes prompts"
    LOADING = "pages that it reads are still being copied"
    ROWS = "it has more rows than the largest graph"
    LONG = "a context is longer than graphs of so many rows take"
    ADAPTERS = "requests name adapters"
    SCORED = "log-probabilities of prompts are wanted"


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """What an operator wants. ``max_bs``: rows of the largest graph; None: ``DEFAULT_MAX_BS``."""

    enabled: bool = True
    max_bs: int | None = None

    def most(self, running: int) -> int:
        """Rows of the largest graph where ``running`` requests may run at once."""
        return min(running, DEFAULT_MAX_BS if self.max_bs is None else self.max_bs)


SizeOrEager: TypeAlias = "int | Eager"
"""Rows of the graph that is replayed, or why none is."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """``sizes``: rows of each graph, ascending. ``split_tokens``: context of one part."""

    sizes: Sequence[int]
    split_tokens: int

    @classmethod
    def upto(cls, most: int, split_tokens: int) -> "GraphSizes":
        """1, 2, 4, 8, 16, 24 and so on, and ``most`` >= 1 itself."""
        small = [size for size in SMALL_SIZES if size < most]
        return cls((*small, *range(SIZE_STEP, most, SIZE_STEP), most), split_tokens)

    def tokens(self, size: int) -> int:
        """The longest context of a row, its own token among it, in graphs of ``size`` rows."""
        return max(1, SPLITS // size) * self.split_tokens

    def choose(self, batch: StepBatch) -> SizeOrEager:
        """For a step of at least one row."""
        # A request's first token is a prompt's, and has no state before it.
        if batch.counts.max() > 1 or batch.starts.min() == 0:
            return Eager.CHUNKS
        if batch.gate is not None:
            return Eager.LOADING
        if batch.adapters is not None:
            return Eager.ADAPTERS
        if batch.scored is not None:
            return Eager.SCORED
        size = next((size for size in self.sizes if size >= len(batch.rows)), None)
        if size is None:
            return Eager.ROWS
        return Eager.LONG if batch.starts.max() >= self.tokens(size) else size

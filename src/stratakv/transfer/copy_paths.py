"""Two ways of a copy between host and GPU, and which one is taken.

Owns the choice, from what both took at start. A kernel moves small pieces well and takes processors
of the GPU for it; the copy engines take none, and some microseconds for each piece. Must not copy.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.streams import Moves

PIECE_BYTES: Final = (1 << 10, 16 << 10, 128 << 10, 1 << 20)
"""Sizes that are tried: a row, and one layer of a page, small and large."""
TRIAL_BYTES: Final = 32 << 20
SPARES: Final = 1.1
"""How much longer the copy engines may take: they leave the processors to the model."""
NEVER: Final = 1 << 62


class CopyPath(Enum):
    KERNEL = "kernel"
    ENGINE = "copy engine"


@dataclass(frozen=True, slots=True)
class CopyTrial:
    """``TRIAL_BYTES`` in pieces of ``piece_bytes`` each took ``seconds``; None: that failed, or the
    bytes did not arrive."""

    path: CopyPath
    direction: Direction
    piece_bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """``engine_from``: by direction, bytes of a piece from which on the copy engine is taken.
    ``unaligned``: what moves pieces that are not whole words, which a kernel reads byte by byte."""

    engine_from: Mapping[Direction, int]
    unaligned: CopyPath

    @classmethod
    def of(cls, trials: Sequence[CopyTrial]) -> "CopyChoice":
        """Where one has failed at a size the other is taken. AssertionError where both have."""
        engine_from = {direction: _crossover(trials, direction) for direction in Direction}
        works = max(engine_from.values()) < NEVER
        return cls(engine_from, CopyPath.ENGINE if works else CopyPath.KERNEL)

    def path(self, direction: Direction, moves: Moves) -> CopyPath:
        """By the mean of the pieces: those of one route are alike."""
        if not moves.wide:
            return self.unaligned
        large = int(moves.sizes.sum()) >= self.engine_from[direction] * len(moves.sizes)
        return CopyPath.ENGINE if large else CopyPath.KERNEL

    def __str__(self) -> str:
        return ", ".join(
            f"{direction.value}: copy engine from {size} bytes" if size < NEVER
            else f"{direction.value}: kernel alone"
            for direction, size in self.engine_from.items()
        )  # fmt: skip


def _crossover(trials: Sequence[CopyTrial], direction: Direction) -> int:
    """The smallest size from which on the engine is as good at every size that was tried."""
    times: dict[int, dict[CopyPath, float | None]] = defaultdict(dict)
    for trial in trials:
        if trial.direction is direction:
            times[trial.piece_bytes][trial.path] = trial.seconds
    found = NEVER
    for size in sorted(times, reverse=True):
        engine, kernel = times[size].get(CopyPath.ENGINE), times[size].get(CopyPath.KERNEL)
        assert engine is not None or kernel is not None, f"nothing copies pieces of {size} bytes"
        if engine is None or (kernel is not None and engine > kernel * SPARES):
            return found
        found = size
    alone = all(one.get(CopyPath.KERNEL) is None for one in times.values())
    return 0 if alone else found

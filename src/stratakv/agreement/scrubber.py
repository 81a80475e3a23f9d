"""Compares all that large tables hold, a piece per ballot.

Owns whose turn it is. Counts and what moves next are compared at once, elsewhere; a difference that
shows in neither (an order of eviction, a pin, a row that nobody reads yet) is found here, after at
most one round: the tables' bytes over ``PIECE_BYTES`` ballots, 125 for 2 MB. What a round costs a
step does not depend on how much is cached. Must not know what the tables mean.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from stratakv.agreement.agreement import DigestInputs

PIECE_BYTES: Final = 16384


@dataclass(frozen=True, slots=True, eq=False)
class ScrubbedTable:
    """``cells``: an array that stays where it is, of any shape, C-contiguous."""

    name: str
    cells: npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    table: ScrubbedTable
    first: int
    cells: npt.NDArray[Any]


class Scrubber:
    """``tables``: the same names and shapes on every rank."""

    def __init__(self, tables: Iterable[ScrubbedTable]) -> None:
        self._pieces = [piece for table in tables for piece in _pieces(table)]
        self._at = -1

    def __len__(self) -> int:
        """Ballots in a round."""
        return len(self._pieces)

    def figures(self) -> DigestInputs:
        """Of the next piece."""
        self._at = (self._at + 1) % len(self._pieces)
        return {"piece": self._at, "sum": crc32(self._pieces[self._at].cells.data)}

    def description(self) -> Sequence[str]:
        """What lies in the piece that ``figures`` was last of, cell by cell."""
        piece = self._pieces[self._at]
        shape, values = piece.table.cells.shape, piece.cells.tolist()
        return [
            f"{piece.table.name}{list(_index(shape, piece.first + at))} {value}"
            for at, value in enumerate(values)
        ]


def _pieces(table: ScrubbedTable) -> Iterator[_Piece]:
    assert table.cells.flags.c_contiguous, f"{table.name} does not lie in one piece"
    cells = table.cells.reshape(-1)  # a view
    count = max(1, PIECE_BYTES // cells.itemsize)
    for first in range(0, len(cells), count):
        yield _Piece(table, first, cells[first : first + count])


def _index(shape: tuple[int, ...], at: int) -> tuple[int, ...]:
    return tuple(int(part) for part in np.unravel_index(at, shape))

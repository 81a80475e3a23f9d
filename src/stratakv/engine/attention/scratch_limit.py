"""How much is computed at once, so that scratch does not grow with contexts and batches.

Owns the limit and the cutting. Every choice here changes speed and memory, none a result.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

SCRATCH_BYTES: Final = 2**26
"""Most bytes that scoring or attending takes at once beside what goes in and comes out; one query
over as many keys as are selected for it is never cut, even if it takes more."""
QUERIES_FIRST: Final = 16
"""So many queries are scored together before keys are: what is selected in one piece of keys is
compared with the next piece's once more."""
TILES: Final = 32
"""A product that is worked on many times over takes this part of the limit: it stays in a core's
cache."""
TILE_QUERIES, TILE_KEYS = 4, 64
"""Least that a tile is good for, if there are so many: rows of a product, and columns."""
ATTENDED_BYTES: Final = 16
"""Scratch of one query, head and key in attention: the score, its softmax and copies of either."""


def pieces(count: int, each_bytes: int) -> Iterator[slice]:
    """``count`` queries in as few runs as the limit allows; one run where all fit. each_bytes:
    scratch of one of them."""
    some = max(1, SCRATCH_BYTES // each_bytes)
    for start in range(0, count, some):
        yield slice(start, min(count, start + some))


@dataclass(frozen=True, slots=True)
class PairCost:
    """Scratch of scoring: of each key that a piece's queries share, and of each query and key."""

    key_bytes: int
    pair_bytes: int

    def cut(self, queries: int, keys: int, least: int) -> tuple[int, int]:
        """How many queries and how many keys, ``least`` or more, are scored together. All of both
        where that fits."""
        return self._within(SCRATCH_BYTES, min(queries, QUERIES_FIRST), (queries, keys), least)

    def tile(self, queries: int, keys: int) -> tuple[int, int]:
        """How many of either go through one product. Keys of their own make a product per query."""
        first = min(queries, TILE_QUERIES) if self.key_bytes else 1
        return self._within(SCRATCH_BYTES // TILES, first, (queries, keys), TILE_KEYS)

    def _within(
        self, limit_bytes: int, first: int, shape: tuple[int, int], least: int
    ) -> tuple[int, int]:
        queries, keys = shape
        width = limit_bytes // (self.key_bytes + first * self.pair_bytes)
        width = min(keys, max(least, width))
        some = (limit_bytes // width - self.key_bytes) // self.pair_bytes
        return min(queries, max(1, some)), width

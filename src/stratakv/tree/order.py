"""In which order pages leave: a rank per page, and a queue of ranked batches per group and tier.

Owns recency and the queues. A batch is rows of one path, top first, with a key no higher than any
of their ranks; a page is looked at only when its batch comes up, so a lease costs one push and an
eviction never walks the leaves. Must not change residency, pins or the tree's shape.

A page is queued whenever it loses its last pin, arrives, or becomes a leaf, and again whenever its
rank rises; a batch that comes up too early for a page is dropped, or queued again where nothing
else would queue the page.

The invariant that ``check`` verifies: every page that could leave now (resident, unpinned, and for
the anchor without a child on the tier) is covered by a queued batch whose key is not above its
rank.
"""

import heapq
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NodeIds

COLD: Final = 0
"""Rank of a page that nothing is expected to need again; below every stamp."""


class EvictionPolicy(Protocol):
    """Ranks pages when they are used. A rank must not fall with use, and of two pages of one path
    the upper must never rank below the lower, given that it has at least as many hits."""

    def rank(
        self, stamp: int, hits: npt.NDArray[np.int32], rows: NodeIds
    ) -> int | npt.NDArray[np.int64]:
        """``stamp``: logical time, counts up from 1. ``hits``: uses of every node, of which
        ``rows`` are meant. Returns one rank > 0 for all of them or int64 [n]."""
        ...


class LeastRecentlyUsed:
    """Rank is the time of the last use."""

    def rank(self, stamp: int, hits: npt.NDArray[np.int32], rows: NodeIds) -> int:
        del hits, rows  # only the time counts
        return stamp


Batch = tuple[int, int, int, NodeIds]  # key, -depth of the last row, serial, rows


class EvictionQueue:
    """Batches of one group on one tier, coldest first; equal keys give the deepest first."""

    __slots__ = ("_heap", "_serial", "weight")

    def __init__(self) -> None:
        self._heap: list[Batch] = []
        self._serial = 0
        self.weight = 0  # rows queued, stale ones included: tells when to rebuild

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, key: int, depth: int, rows: NodeIds) -> None:
        """``depth`` is that of ``rows[-1]``; ``rows`` is kept, not copied."""
        self._serial += 1
        self.weight += len(rows) + 1
        heapq.heappush(self._heap, (key, -depth, self._serial, rows))

    def pop(self) -> tuple[int, NodeIds]:
        key, _, _, rows = heapq.heappop(self._heap)
        self.weight -= len(rows) + 1
        return key, rows

    def clear(self) -> None:
        self._heap.clear()
        self.weight = 0

    def batches(self) -> list[tuple[int, NodeIds]]:
        """Every batch, for ``check``."""
        return [(key, rows) for key, _, _, rows in self._heap]

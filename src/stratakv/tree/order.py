"""In which order pages leave: a rank per page, and a queue of ranked batches per group and tier.

Owns what a policy is, recency, and the plain queue. A batch is rows of one path, top first, with a
key no higher than any of their ranks; a page is looked at only when its batch comes up, so a lease
costs one push and an eviction never walks the leaves. Must not change residency, pins or the tree's
shape.

A page is queued whenever it loses its last pin, arrives, or becomes a leaf, and again whenever its
rank rises; a batch that comes up too early for a page is dropped, or queued again where nothing
else would queue the page.

The invariant that ``check`` verifies: every page that could leave now (resident, unpinned, and for
the anchor without a child on the tier) is covered by a queued batch whose key is not above its
rank.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final, Protocol, TypeAlias

from stratakv.core.ids import NodeIds
from stratakv.tree.nodes import NodeTable, Tier
from stratakv.tree.path_columns import EvictionRanks, PathRanks

COLD: Final = 0
"""Rank of a page that nothing is expected to need again; below every other rank."""
WARM: Final = 1 << 43
"""Lowest rank of a policy. Between it and ``COLD`` is what milestones alone need, by its last use:
``rank & LAST_USE`` of the rank that it had, as every policy has the stamp in its low bits."""
LAST_USE: Final = WARM - 1


class Queue(Protocol):
    """Batches of one group on one tier, in the order in which they come up."""

    @property
    def weight(self) -> int:
        """Rows queued, stale ones included, and one per batch: shows when to rebuild, and is 0
        where there is nothing."""
        ...

    @property
    def first(self) -> int:
        """The lowest key. Only while there is a batch."""
        ...

    def push(self, key: int, depth: int, rows: NodeIds) -> None:
        """``depth`` is that of ``rows[-1]``; ``rows`` is kept, not copied."""
        ...

    def pop(self) -> tuple[int, NodeIds]:
        """The next batch and its key; it may hold no row. Only while there is one."""
        ...

    def clear(self) -> None: ...

    def batches(self) -> list[tuple[int, NodeIds]]:
        """Every batch, for ``check``."""
        ...


class EvictionPolicy(Protocol):
    """Ranks pages when they are used, and makes the queues. One instance serves one tree.

    ``rows`` are of one path, top first. Of two pages of the anchor on one path, the upper should
    never rank below the lower. ``stamp``: logical time, from ``WARM`` to below 2 ** 44; a rank has
    that of some use in its low 44 bits.
    """

    def queue(self, tier: Tier, group: int) -> Queue:
        """A new queue. It may rank pages anew when they come up, and then queues them again."""
        ...

    def enter(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        """Pages that were nowhere have been computed or fetched."""
        ...

    def hit(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        """A request leases pages that are there."""
        ...

    def touch(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        """The request that holds them still uses them, or has just let go: no other use."""
        ...

    def on_path(self, path: NodeIds, starts: list[int], stamp: int, *, hit: bool) -> PathRanks:
        """``hit`` or else ``touch`` of ``path[starts[g]:]`` of every group g."""
        ...

    def gone(self, group: int, rows: Sequence[int] | NodeIds) -> None:
        """The last copies of pages have left; their nodes still have their keys."""
        ...


class RanksByGroup(ABC):
    """A policy that ranks the pages of a path group by group."""

    @abstractmethod
    def hit(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks: ...

    @abstractmethod
    def touch(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks: ...

    def on_path(self, path: NodeIds, starts: list[int], stamp: int, *, hit: bool) -> PathRanks:
        rank = self.hit if hit else self.touch
        return [rank(group, path[start:], stamp) for group, start in enumerate(starts)]


MakePolicy: TypeAlias = Callable[[NodeTable], EvictionPolicy]


class LeastRecentlyUsed:
    """Rank is the time of the last use."""

    def __init__(self, nodes: NodeTable) -> None:
        del nodes  # only the time counts

    def queue(self, tier: Tier, group: int) -> Queue:
        del tier, group
        return EvictionQueue()

    def enter(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        del group, rows
        return stamp

    hit = enter
    touch = enter

    def on_path(self, path: NodeIds, starts: list[int], stamp: int, *, hit: bool) -> PathRanks:
        del path, hit
        return [stamp] * len(starts)

    def gone(self, group: int, rows: Sequence[int] | NodeIds) -> None:
        """Nothing is remembered."""


SMALL: Final = 64
"""Up to this weight nobody looks whether batches are repeated."""
Batch = tuple[int, int, int, NodeIds]  # key, -depth of the last row, serial, rows


class EvictionQueue:
    """Coldest first; equal keys give the deepest first."""

    __slots__ = ("_heap", "_most", "_serial", "weight")

    def __init__(self) -> None:
        self._heap: list[Batch] = []
        self._serial = 0
        self._most = SMALL
        self.weight = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> int:
        """The key that comes up next. Only while there is a batch."""
        return self._heap[0][0]

    def push(self, key: int, depth: int, rows: NodeIds) -> None:
        self._serial += 1
        self.weight += len(rows) + 1
        heapq.heappush(self._heap, (key, -depth, self._serial, rows))
        if self.weight > self._most:
            self._compact()

    def pop(self) -> tuple[int, NodeIds]:
        key, _, _, rows = heapq.heappop(self._heap)
        self.weight -= len(rows) + 1
        return key, rows

    def clear(self) -> None:
        self._heap.clear()
        self.weight = 0

    def _compact(self) -> None:
        """Forget batches that a newer one repeats: every lease of a path queues it once more."""
        seen: set[bytes] = set()
        kept: list[Batch] = []
        for batch in sorted(self._heap, key=itemgetter(2), reverse=True):  # the newest first
            name = batch[3].tobytes()
            if name not in seen:
                seen.add(name)
                kept.append(batch)
        heapq.heapify(kept)
        self._heap = kept
        self.weight = sum(len(batch[3]) + 1 for batch in kept)
        self._most = max(SMALL, 2 * self.weight)

    def batches(self) -> list[tuple[int, NodeIds]]:
        return [(key, rows) for key, _, _, rows in self._heap]

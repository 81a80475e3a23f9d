"""Eviction policies beside LRU: what a page is worth, as a rank.

Owns their columns and the table of names. A policy ranks; who may leave is for ``pins`` and
``eviction``. Must not change residency, pins or the tree's shape.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.choices import EVICTIONS
from stratakv.core.ids import NodeIds
from stratakv.spec.groups import ANCHOR
from stratakv.tree.nodes import NodeTable, Tier
from stratakv.tree.order import EvictionQueue, LeastRecentlyUsed, MakePolicy, Queue, RanksByGroup
from stratakv.tree.path_columns import EvictionRanks
from stratakv.tree.s3_fifo import S3Fifo
from stratakv.tree.slru import SegmentedLru

STAMP_BITS: Final = 44
MOST: Final = (1 << 18) - 1
"""Highest count or priority that a rank distinguishes."""

UseCounts = npt.NDArray[np.int64]


class LeastFrequentlyUsed(RanksByGroup):
    """Rank is how often a group's page was leased since it came, then the time of the last use."""

    def __init__(self, nodes: NodeTable) -> None:
        self._uses: list[UseCounts] = [np.zeros(len(state), np.int64) for state in nodes.state]

    def queue(self, tier: Tier, group: int) -> Queue:
        del tier, group
        return EvictionQueue()

    def enter(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        self._uses[group][rows] = 0
        return stamp

    def hit(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        self._uses[group][rows] += 1
        return self.touch(group, rows, stamp)

    def touch(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        return (np.minimum(self._uses[group][rows], MOST) << STAMP_BITS) + stamp

    def gone(self, group: int, rows: Sequence[int] | NodeIds) -> None:
        """A page that comes again counts from nothing."""


class ByPriority(RanksByGroup):
    """Rank is the highest priority of any request that used the page, then the time of the last
    use. Priorities below 0 rank as 0."""

    def __init__(self, nodes: NodeTable) -> None:
        self._priority = nodes.priority

    def queue(self, tier: Tier, group: int) -> Queue:
        del tier, group
        return EvictionQueue()

    def enter(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        if group == ANCHOR:  # a new node: only those who use this one count
            self._priority[rows] = 0
        return self.touch(group, rows, stamp)

    def hit(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        return self.touch(group, rows, stamp)

    def touch(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        del group
        return (np.minimum(self._priority[rows].astype(np.int64), MOST) << STAMP_BITS) + stamp

    def gone(self, group: int, rows: Sequence[int] | NodeIds) -> None:
        """``enter`` forgets."""


EVICTION_POLICIES: Final[Mapping[str, MakePolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "slru": SegmentedLru,
    "s3-fifo": S3Fifo,
    "priority": ByPriority,
}
assert tuple(EVICTION_POLICIES) == EVICTIONS, "every policy that a flag allows, and no other"

"""Segmented LRU: a page that was used again is protected from those that were not.

Owns the protected share. A page comes on probation and is protected by its first further use; where
more than the share is protected, the coldest of those go back on probation, as if at the last such
use. That is done when a page must leave, by the share of what is there then. Must not change
residency or pins.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from stratakv.core.ids import NodeIds
from stratakv.tree.nodes import NodeTable, Tier
from stratakv.tree.order import Queue, RanksByGroup
from stratakv.tree.path_columns import EvictionRanks
from stratakv.tree.segmented_queue import HIGH, Pair, Segments

PROTECTED_SHARE: Final = 0.8


class SegmentedLru(RanksByGroup):
    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._pairs = [Pair(nodes, group) for group in range(len(nodes.state))]
        self.last_hit = 0

    def queue(self, tier: Tier, group: int) -> Queue:
        made = SlruQueue(self, self._nodes, self._pairs[group], tier, group)
        self._pairs[group].tiers.append(made)
        return made

    def enter(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        del group, rows
        return stamp

    def hit(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        del group, rows
        self.last_hit = stamp
        return HIGH + stamp

    def touch(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        return np.where(self._nodes.rank[group][rows] >= HIGH, HIGH + stamp, stamp)

    def gone(self, group: int, rows: Sequence[int] | NodeIds) -> None:
        """Nothing is remembered."""


class SlruQueue(Segments):
    """Gives those on probation first, once no more than the share is protected."""

    def __init__(
        self, policy: SegmentedLru, nodes: NodeTable, pair: Pair, tier: Tier, group: int
    ) -> None:
        super().__init__(nodes, tier, group)
        self._policy = policy
        self._pair = pair
        self._rank = nodes.rank[group]
        self._depth = nodes.depth

    def pop(self) -> tuple[int, NodeIds]:
        self.count()
        while (over := self.high_pages - int(PROTECTED_SHARE * self.pages)) > 0 and len(self.high):
            key, rows = self.take(self.high)
            if not self._demote(key, rows, over):
                return key, rows  # stale, or too early: the evictor knows what to do
        return self.take(self.low if len(self.low) else self.high)

    def _demote(self, key: int, rows: NodeIds, most: int) -> bool:
        """Put up to ``most`` due rows back on probation, from the end; False where none is due."""
        due = self.due(key, rows).nonzero()[0][-most:]
        if not len(due):
            return False
        stays = self.idle(rows)
        stays[due] = False
        self._pair.rank_anew(rows[due], self._policy.last_hit)
        self.high_pages -= len(due)
        if stays.any():
            rest = rows[stays]
            self.push(int(self._rank[rest].min()), self._depth.item(rest.item(-1)), rest)
        return True

"""A queue of two segments, for policies that keep newcomers and proven pages apart.

Owns the two heaps and the count of pages in each. The segment of a page is the top bit of its rank.
Which segment gives a page, and who changes segment when it comes up, is for the policy. Must not
change residency or pins.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NodeIds
from stratakv.spec.groups import ANCHOR
from stratakv.tree.nodes import NodeTable, Tier
from stratakv.tree.order import WARM, EvictionQueue
from stratakv.tree.residency import ON_TIER

HIGH: Final = 1 << 60
"""Lowest rank of the high segment; stamps end far below."""
Bools: TypeAlias = npt.NDArray[np.bool_]


class Segments:
    """The heaps of one group on one tier. ``high_pages`` of ``pages`` resident ones are in the high
    segment: counted anew whenever a sixteenth of them may have come or gone, so a little late.
    ``most`` is the most that were ever counted."""

    def __init__(self, nodes: NodeTable, tier: Tier, group: int) -> None:
        self.low = EvictionQueue()
        self.high = EvictionQueue()
        self.pages = self.high_pages = self.most = 0
        self._nodes = nodes
        self._tier = tier
        self._group = group
        self._until_count = 0

    @property
    def weight(self) -> int:
        return self.low.weight + self.high.weight

    @property
    def first(self) -> int:
        return (self.low if len(self.low) else self.high).first

    def push(self, key: int, depth: int, rows: NodeIds) -> None:
        (self.high if key >= HIGH else self.low).push(key, depth, rows)

    def clear(self) -> None:
        self.low.clear()
        self.high.clear()

    def batches(self) -> list[tuple[int, NodeIds]]:
        return self.low.batches() + self.high.batches()

    def count(self) -> None:
        """Bring ``pages`` and ``high_pages`` up to date, if they may be far off."""
        if self._until_count > 0:
            return
        nodes = self._nodes
        here = ON_TIER[self._tier][nodes.state[self._group]]
        self.pages = int(np.count_nonzero(here))
        self.high_pages = int(np.count_nonzero(here & (nodes.rank[self._group] >= HIGH)))
        self.most = max(self.most, self.pages)
        self._until_count = self.pages >> 4

    def take(self, heap: EvictionQueue) -> tuple[int, NodeIds]:
        """The next batch of one heap; all of its rows may leave now."""
        key, rows = heap.pop()
        self._until_count -= len(rows)
        return key, rows

    def idle(self, rows: NodeIds) -> Bools:
        """Those of ``rows`` that are resident and unpinned."""
        nodes = self._nodes
        free = nodes.pins[self._tier][self._group][rows] == 0
        return free & ON_TIER[self._tier][nodes.state[self._group][rows]]

    def due(self, key: int, rows: NodeIds) -> Bools:
        """Those of a batch that come up for the policy's say. Of the anchor on the device only the
        last row can be a leaf; unless it is one, nothing of the batch comes up. A page that no
        checkpoint needs any more comes up before all others: nobody has a say in it."""
        rank = self._nodes.rank[self._group][rows]
        due = self.idle(rows) & (rank <= key)
        if key >= WARM:
            due &= rank >= WARM
        if self.only_leaves:
            due &= due[-1] & (self._nodes.kids[self._tier].item(rows.item(-1)) == 0)
        return due

    @property
    def only_leaves(self) -> bool:
        return self._group == ANCHOR and self._tier == Tier.DEVICE


class Pair:
    """The queues of one group on both tiers: a page has one rank, so a new one counts on both."""

    def __init__(self, nodes: NodeTable, group: int) -> None:
        self._nodes = nodes
        self._group = group
        self.tiers: list[Segments] = []

    def rank_anew(self, rows: NodeIds, rank: int) -> None:
        """Give ``rows`` of one path another rank and queue them at it wherever they may leave."""
        nodes = self._nodes
        nodes.rank[self._group][rows] = rank
        for tier in self.tiers:
            free = rows[tier.idle(rows)]
            if len(free):
                tier.push(rank, nodes.depth.item(free.item(-1)), free)

"""S3-FIFO (Yang et al., SOSP 2023): most pages are used once, and should leave soon.

Owns the use counts, the segments and the memory of what left. A page comes into the small segment,
a tenth of the pool. One that was used more than once by the time it comes up moves to the main
segment; the others leave, and their keys are remembered, as many as the pool has held pages: one
that is computed again while it is remembered goes to main, and so does one that left the device,
stayed on the host and is loaded. Main is a clock: a page that was used comes up again later. Must
not change residency or pins.

A tree needs one thing more: a page of the anchor is never younger than what lies below it.
"""

from collections import deque
from collections.abc import Sequence
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NodeIds, PageKey
from stratakv.spec.groups import ANCHOR
from stratakv.tree.nodes import NodeTable, Tier
from stratakv.tree.order import WARM, EvictionQueue, Queue, RanksByGroup
from stratakv.tree.path_columns import EvictionRanks
from stratakv.tree.residency import ON_DEVICE
from stratakv.tree.segmented_queue import HIGH, Bools, Pair, Segments

SMALL_SHARE: Final = 0.1
MOST_USES: Final = 3
"""Two bits."""
TO_MAIN: Final = 2
"""Uses of a page in the small segment that save it."""


class S3Fifo(RanksByGroup):
    def __init__(self, nodes: NodeTable) -> None:
        groups, size = range(len(nodes.state)), len(nodes.depth)
        self._nodes = nodes
        self._pairs = [Pair(nodes, group) for group in groups]
        self._ghosts: list[dict[PageKey, None]] = [{} for _ in groups]
        self.uses = [np.zeros(size, np.uint8) for _ in groups]
        self.main = [np.zeros(size, np.bool_) for _ in groups]
        self.now = 0

    def queue(self, tier: Tier, group: int) -> Queue:
        made = S3Queue(self, self._nodes, self._pairs[group], tier, group)
        self._pairs[group].tiers.append(made)
        return made

    def enter(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        nodes, ghost = self._nodes, self._ghosts[group]
        self.uses[group][rows] = 0
        self.main[group][rows] = False
        if ghost:
            at = nodes.depth[rows]
            first, last = at.item(0), at.item(-1)
            keys = nodes.keys_to(rows.item(-1), last - first + 1)
            if len(keys) > len(rows):
                keys = list(map(keys.__getitem__, (at - first).tolist()))
            back = np.fromiter(map(ghost.__contains__, keys), np.bool_, len(keys))
            deque(map(ghost.pop, compress(keys, back)), maxlen=0)
            self.main[group][rows[back]] = True
        return self._ranks(group, rows, np.zeros(len(rows), np.int64), stamp)

    def hit(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        uses, rank = self.uses[group], self._nodes.rank[group][rows]
        uses[rows] = np.minimum(uses[rows] + 1, MOST_USES)
        away = ~ON_DEVICE[self._nodes.state[group][rows]]
        if away.any():
            self.main[group][rows[away]] = True
            rank[away] = HIGH + stamp
        return self._ranks(group, rows, rank, stamp)

    def touch(self, group: int, rows: NodeIds, stamp: int) -> EvictionRanks:
        return self._ranks(group, rows, self._nodes.rank[group][rows], stamp)

    def _ranks(
        self, group: int, rows: NodeIds, rank: npt.NDArray[np.int64], stamp: int
    ) -> EvictionRanks:
        """A page keeps the rank it came with; one that no checkpoint needed comes anew."""
        self.now = stamp
        cold = rank < WARM
        rank[cold] = stamp + HIGH * self.main[group][rows[cold]].astype(np.int64)
        if group == ANCHOR:
            rank = np.maximum.accumulate(rank[::-1])[::-1]
        return rank

    def gone(self, group: int, rows: Sequence[int] | NodeIds) -> None:
        rows = np.asarray(rows, np.intp)
        rank = self._nodes.rank[group][rows]
        small = rows[(rank >= WARM) & (rank < HIGH)]
        ghost = self._ghosts[group]
        ghost.update(dict.fromkeys(map(self._nodes.key_of, small.tolist())))
        most = max(tier.most for tier in self._pairs[group].tiers)
        for _ in range(len(ghost) - most):
            del ghost[next(iter(ghost))]

    def remembered(self, group: int) -> int:
        """Keys of pages that have left."""
        return len(self._ghosts[group])


class S3Queue(Segments):
    """Gives from the small segment while that holds its share, from main otherwise."""

    def __init__(
        self, policy: S3Fifo, nodes: NodeTable, pair: Pair, tier: Tier, group: int
    ) -> None:
        super().__init__(nodes, tier, group)
        self._policy = policy
        self._pair = pair
        self._uses = policy.uses[group]
        self._main = policy.main[group]
        self._giving: EvictionQueue | None = None

    def pop(self) -> tuple[int, NodeIds]:
        self.count()
        while True:  # every page that is spared has one use fewer, so this ends
            key, rows = self.take(self._source())
            due = self.due(key, rows)
            if not due.any():
                return key, rows  # stale, or too early: the evictor knows what to do
            if key >= WARM:
                rows = self._spare(key, rows, due)
            if len(rows):
                self._giving = None
                return key, rows

    def _source(self) -> EvictionQueue:
        """The segment to take from: the same one until it has given something."""
        if not len(self.high) or (len(self.low) and self.low.first < WARM):
            return self.low
        if not len(self.low):
            return self.high
        if self._giving is None:
            small = self.pages - self.high_pages
            self._giving = self.low if small >= SMALL_SHARE * self.pages else self.high
        return self._giving

    def _spare(self, key: int, rows: NodeIds, due: Bools) -> NodeIds:
        """Send used pages that come up to main; what is left of the batch."""
        uses = self._uses[rows]
        used = due & (uses >= (1 if key >= HIGH else TO_MAIN))
        if not used.any():
            return rows
        some = rows[used]
        self._uses[some] = uses[used] - 1 if key >= HIGH else 0
        self._main[some] = True
        self._pair.rank_anew(some, HIGH + self._policy.now)
        if key < HIGH:
            self.high_pages += len(some)
        if self.only_leaves:  # what lies above is offered when this has gone
            return rows[used.nonzero()[0].item(-1) + 1 :]
        return rows[~used]

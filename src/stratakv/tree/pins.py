"""Pins, and the exact counts of what could be evicted.

Owns the pin columns, the counts and who re-enters a queue when a pin goes. A page is pinned on a
tier by every lease that stands on it there and by every copy that touches it. Must not move a
residency or free a page.
"""

from typing import Final

import numpy as np

from stratakv.core.ids import GroupId, NodeIds
from stratakv.spec.groups import ANCHOR
from stratakv.tree.nodes import CHECKPOINT, TIERS, NodeTable, Tier
from stratakv.tree.observer import PageWatcher
from stratakv.tree.order import COLD, LAST_USE, WARM, MakePolicy
from stratakv.tree.path_columns import SOME_WARM
from stratakv.tree.residency import ON_DEVICE, ON_TIER, count_on_tier

DEVICE = Tier.DEVICE
TIERS_BY_BITS: Final = ((), (0,), (1,), (0, 1))


class Pins:
    """``watcher``: who is notified of uses."""

    def __init__(
        self,
        nodes: NodeTable,
        groups: int,
        policy: MakePolicy,
        watcher: PageWatcher | None = None,
    ) -> None:
        self._nodes = nodes
        self._watcher = watcher
        self._most_queued = 4 * nodes.capacity + 4096
        self._anchor_last = range(groups - 1, -1, -1)  # its node waits for them
        self.policy = policy(nodes)
        self.evictable = [[0] * groups for _ in TIERS]
        """``evictable[tier][group]``: resident pages of the group that nothing pins on the tier."""
        self.queues = [
            [self.policy.queue(tier, group) for group in range(groups)] for tier in TIERS
        ]
        self._clock = WARM

    # -- recency -------------------------------------------------------------------------------

    def tick(self) -> int:
        """A new logical time; one per operation, so one rank belongs to one path."""
        self._clock += 1
        return self._clock

    def enter(self, group: int, rows: NodeIds, stamp: int) -> None:
        """Pages that were nowhere have come to ``rows`` (one path)."""
        nodes = self._nodes
        ranks = self.policy.enter(group, rows, stamp)
        if group != ANCHOR:  # a lease or a checkpoint warms what it needs
            needs = nodes.need[group][rows]
            spare = np.where(needs > 0, ranks & LAST_USE, COLD)
            ranks = np.where(needs >= CHECKPOINT, ranks, spare)
        nodes.rank[group][rows] = ranks

    def hit(self, group: int, rows: NodeIds, stamp: int) -> None:
        """A request uses ``rows`` (one path)."""
        self._nodes.rank[group][rows] = self.policy.hit(group, rows, stamp)
        if self._watcher is not None:
            self._watcher.used(group, rows, hit=True)

    def stamp(self, group: int, rows: NodeIds, stamp: int) -> None:
        """A request still uses ``rows`` (one path), or has just let them go."""
        self._nodes.rank[group][rows] = self.policy.touch(group, rows, stamp)
        if self._watcher is not None:
            self._watcher.used(group, rows, hit=False)

    # -- pins ----------------------------------------------------------------------------------

    def pin(self, tier: Tier, group: int, rows: NodeIds) -> None:
        """Add one pin to resident pages; ``rows`` are distinct."""
        pins = self._nodes.pins[tier][group]
        before = pins[rows]
        pins[rows] = before + 1
        self.evictable[tier][group] -= len(rows) - int(np.count_nonzero(before))

    def unpin(self, tier: Tier, group: int, rows: NodeIds) -> None:
        """Take one pin from each; pages that lose their last one may be evicted again."""
        if not len(rows):
            return
        pins = self._nodes.pins[tier][group]
        after = pins[rows] - 1
        pins[rows] = after
        free = len(rows) - int(np.count_nonzero(after))
        if not free:
            return
        self.evictable[tier][group] += free
        if group == ANCHOR:
            self.queue(tier, group, rows)
            if tier == Tier.HOST:
                self.offer_above(rows.item(-1))
        else:
            self.cool(group, rows if free == len(rows) else rows[after == 0])

    def born(self, tier: Tier, group: int, rows: NodeIds) -> None:
        """Pages that have just become resident on ``tier`` without a pin."""
        self.evictable[tier][group] += len(rows)
        self.queue(tier, group, rows)

    def arrive(self, tier: Tier, group: int, rows: NodeIds, stamp: int) -> None:
        """``enter`` and ``born`` of new nodes, whose pages nothing warms as a rule."""
        nodes = self._nodes
        if group == ANCHOR or np.count_nonzero(nodes.need[group][rows]):
            self.enter(group, rows, stamp)
            self.born(tier, group, rows)
            return
        self.policy.enter(group, rows, stamp)
        nodes.rank[group][rows] = COLD
        self.evictable[tier][group] += len(rows)
        self._push(tier, group, COLD, nodes.depth.item(rows.item(-1)), rows)

    def born_pinned(self, tier: Tier, group: int, rows: NodeIds, pins: int) -> None:
        """Pages that have just become resident with ``pins`` pins of their makers."""
        self._nodes.pins[tier][group][rows] = pins

    def died(self, tier: Tier, group: int, rows: NodeIds) -> None:
        """Unpinned pages that have just left ``tier``."""
        self.evictable[tier][group] -= len(rows)

    # -- pins of a whole path ------------------------------------------------------------------

    def lease(self, path: NodeIds, starts: list[int], *, again: bool) -> None:
        """A request uses ``path[starts[g]:]`` of every group g: rank them by that, and pin them on
        the device. ``again``: it has counted as a use of them before."""
        self._clock += 1
        ranks = self.policy.on_path(path, starts, self._clock, hit=not again)
        self._nodes.paths.lease(path, starts, ranks, not again, self.evictable[DEVICE])
        if self._watcher is not None:
            self._used(path, starts, hit=not again)

    def release(self, path: NodeIds, starts: list[int]) -> None:
        """The reverse of ``lease``; pages that lose their last pin may be evicted again."""
        self._clock += 1
        ranks = self.policy.on_path(path, starts, self._clock, hit=False)
        become = self._nodes.paths.release(path, starts, ranks, self.evictable[DEVICE])
        deepest = len(path) - 1
        for group in self._anchor_last:
            if what := become[group]:
                rows = path[starts[group] :]
                if group == ANCHOR:
                    self._push(DEVICE, group, what, deepest, rows)
                elif what == SOME_WARM:
                    pins = self._nodes.pins[DEVICE][group]
                    self.cool(group, rows[pins[rows] == 0])
                else:
                    for tier in TIERS_BY_BITS[what]:
                        self._push(tier, group, COLD, deepest, rows)
        if self._watcher is not None:
            self._used(path, starts, hit=False)

    def _used(self, path: NodeIds, starts: list[int], *, hit: bool) -> None:
        assert self._watcher is not None
        for group, start in enumerate(starts):
            self._watcher.used(group, path[start:], hit=hit)

    # -- queues --------------------------------------------------------------------------------

    def queue(self, tier: int, group: int, rows: NodeIds) -> None:
        """Offer rows of one path, top first, for eviction in their rank's order."""
        if not len(rows):
            return
        rank = self._nodes.rank[group]
        # On the device only the last row of a path can be a leaf; elsewhere any of them may leave.
        lone = len(rows) == 1 or (group == ANCHOR and tier == Tier.DEVICE)
        key = rank.item(rows.item(-1)) if lone else int(rank[rows].min())
        self._push(tier, group, key, self._nodes.depth.item(rows.item(-1)), rows)

    def _push(self, tier: int, group: int, key: int, depth: int, rows: NodeIds) -> None:
        queue = self.queues[tier][group]
        queue.push(key, depth, rows)
        if queue.weight > self._most_queued:
            self.rebuild(tier, group)

    def cool(self, group: int, rows: NodeIds) -> None:
        """Offer pages that a lease or a checkpoint has let go: those that no other lease and no
        checkpoint needs go to the cold end, or right behind it where a milestone needs them."""
        nodes = self._nodes
        state = nodes.state[group][rows]
        pins = [nodes.pins[tier][group][rows] for tier in TIERS]
        needs = nodes.need[group][rows]
        if not any(map(np.count_nonzero, (*pins, needs))):  # as a rule nobody holds them
            nodes.rank[group][rows] = COLD
            for tier in TIERS:
                if count_on_tier(tier, state):
                    self.queue(tier, group, rows)
            return
        free = [held == 0 for held in pins]
        idle = free[0] & free[1]
        cold, spare = idle & (needs == 0), idle & (needs > 0) & (needs < CHECKPOINT)
        rank = nodes.rank[group]
        rank[rows[cold]] = COLD
        rank[rows[spare]] &= LAST_USE
        for tier in TIERS:
            here = ON_TIER[tier][state] & free[tier]
            for some in (cold, spare, ~(cold | spare)):
                self.queue(tier, group, rows[here & some])

    def offer_above(self, row: int) -> None:
        """``row`` has become idle: a device-only page above it that waited for that may go."""
        nodes = self._nodes
        if ON_DEVICE.item(nodes.state[ANCHOR].item(row)):
            return
        path = nodes.path(row)
        on_device = int(np.count_nonzero(ON_DEVICE[nodes.state[ANCHOR][path]]))
        if on_device:
            self.queue(Tier.DEVICE, ANCHOR, nodes.segment(path.item(on_device - 1)))

    def offer_nodes(self, group: GroupId, rows: NodeIds) -> None:
        """An operation on ``rows`` (one path, top first) has ended: an anchor page whose node it
        kept by a pin on another group may go now."""
        if group != ANCHOR:
            for tier in TIERS:
                self.queue(tier, ANCHOR, rows)
            self.offer_above(rows.item(-1))

    def rebuild(self, tier: int, group: int) -> None:
        """Throw stale batches away: O(n log n), amortised over 4 n queued rows."""
        nodes = self._nodes
        rows = nodes.rows()
        keep = ON_TIER[tier][nodes.state[group][rows]] & (nodes.pins[tier][group][rows] == 0)
        rows = rows[keep]
        self.queues[tier][group].clear()
        if group == ANCHOR:  # the leaves: what lies above follows when its child goes
            for leaf in rows[nodes.kids[tier][rows] == 0].tolist():
                self.queue(tier, group, nodes.segment(leaf))
            return
        rank = nodes.rank[group][rows]
        order = np.lexsort((nodes.depth[rows], rank))
        rows, rank = rows[order], rank[order]
        for batch in np.split(rows, np.flatnonzero(np.diff(rank)) + 1):
            self.queue(tier, group, batch)

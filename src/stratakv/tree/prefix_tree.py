"""The prefix tree: what is cached, where, and who stands on it.

One node is one page, so nothing ever splits. Pure: no tensors, no threads, no clock. Mutators
return effects in the order in which they must be executed. Owns leases and insertion; matching,
eviction, checkpoints and copies are the modules beside it, on the same columns.
"""

from collections.abc import Sequence

import numpy as np

from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, PageKey
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.tree.checkpoints import Checkpoints
from stratakv.tree.cleaning import Cleaning
from stratakv.tree.copies import Copies
from stratakv.tree.effects import Backup, Effect, FreeDevice, FreeHost, Remap
from stratakv.tree.eviction import Evictor
from stratakv.tree.journal import Journal
from stratakv.tree.lease import DeviceLease
from stratakv.tree.leases import Leases
from stratakv.tree.matching import Beyond, Match, Matcher
from stratakv.tree.nodes import TIERS, NodeTable, Tier
from stratakv.tree.order import WARM, EvictionPolicy, LeastRecentlyUsed
from stratakv.tree.pins import Pins
from stratakv.tree.residency import (
    ON_DEVICE,
    ON_TIER,
    Event,
    Residency,
)
from stratakv.tree.stored import Stored

DEVICE, HOST = Tier.DEVICE, Tier.HOST


class PrefixTree:
    """``capacity``: the most nodes there can be, that is device plus host pages of the anchor."""

    def __init__(
        self,
        spec: CacheSpec,
        capacity: int,
        policy: EvictionPolicy | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.spec = spec
        self.nodes = NodeTable(spec, capacity)
        if journal is not None:
            journal.bind(self.nodes)
        self.pins = Pins(self.nodes, len(spec.groups), policy or LeastRecentlyUsed())
        self.checkpoints = Checkpoints(spec, self.nodes, self.pins)
        self.stored = Stored(spec, self.nodes, self.pins)
        self.copies = Copies(self.nodes, self.pins, self.stored)
        self._matcher = Matcher(spec, self.nodes)
        self.leases = Leases(spec, self.nodes, self.pins, self._matcher, self.copies)
        self._evictor = Evictor(spec, self.nodes, self.pins, self.checkpoints)
        self.cleaning = Cleaning(self.nodes, self.pins, self._evictor)
        self._groups = range(len(spec.groups))
        self._keep_all = [group.id for group in spec.groups if group.keeps_all]
        self._partial = [group.id for group in spec.groups if not group.keeps_all]

    # -- match ---------------------------------------------------------------------------------

    def match(self, keys: Sequence[PageKey], limit: int) -> Match:
        """How far ``keys`` is usable, looking at no more than ``limit`` pages. Read-only."""
        return self._matcher.match(keys, limit)

    def beyond(self, keys: Sequence[PageKey], found: Match) -> Beyond:
        """What there is of ``keys`` that the match ``found`` could not use. Read-only."""
        return self._matcher.beyond(keys, found)

    def starts(self, end: int) -> list[int]:
        """First page that every group needs at ``end`` pages."""
        return self._matcher.starts(end)

    def holds(self, key: PageKey, group: GroupId) -> bool:
        """Whether the page at ``key`` has the group on the device."""
        row = self.nodes.index.get(key)
        return row is not None and ON_DEVICE.item(self.nodes.state[group].item(row))

    def is_checkpoint(self, lease: DeviceLease, end: int) -> bool:
        return 0 < end <= lease.end and self.nodes.checkpoint.item(lease.path.item(end - 1))

    def unsaved(self, lease: DeviceLease) -> list[Backup]:
        """Pages of a lease that are on the device alone, of the groups that keep all."""
        found = ((group, self.copies.unsaved(group, lease.path)) for group in self._keep_all)
        return [Backup(group, rows) for group, rows in found if len(rows)]

    def kept_unsaved(self, lease: DeviceLease) -> list[Backup]:
        """``unsaved``, and of the other groups what the lease holds and a checkpoint needs."""
        found = self.unsaved(lease)
        for group in self._partial:
            rows = self.copies.unsaved(group, lease.path[lease.starts[group] :])
            rows = rows[self.nodes.need[group][rows] > 0]
            if len(rows):
                found.append(Backup(group, rows))
        return found

    # -- insert --------------------------------------------------------------------------------

    def insert(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> list[Effect]:
        """Adopt a request's device pages for page indices [first, len(keys)).

        ``pages[g]``: int32 [len(keys) - first], NONE where the group holds none. The pages above
        ``first`` are in the tree and leased by the caller. A page the tree holds already comes back
        as ``Remap`` then ``FreeDevice``; one that is just being loaded stays the request's own.
        """
        return self._place(DEVICE, keys, first, pages)

    def land(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> list[Effect]:
        """Adopt host pages that storage delivered; arguments as for ``insert``. The pages above
        ``first`` are leased by the caller. What the host holds already is freed."""
        return self._place(HOST, keys, first, pages)

    def _place(
        self, tier: Tier, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]
    ) -> list[Effect]:
        nodes, pins = self.nodes, self.pins
        effects: list[Effect] = []
        if first >= len(keys):
            return effects
        known = nodes.reach(keys, first, len(keys))
        stamp = pins.tick()
        if known > first:
            rows = nodes.tail(nodes.index[keys[known - 1]], known - first)
            for group in self._groups:
                mine = pages[group][: known - first]
                effects += self._meet(tier, GroupId(group), rows, mine)
        if known < len(keys):
            parent = nodes.index[keys[known - 1]] if known else NONE
            fresh_rows = nodes.grow(tier, parent, keys[known:])
            self.stored.grown(fresh_rows)
            for group in self._groups:
                mine = pages[group][known - first :]
                fresh = fresh_rows
                if group != ANCHOR:
                    held = mine != NONE
                    fresh, mine = fresh[held], mine[held]
                if len(fresh):
                    self.pins.enter(group, fresh, stamp)
                    self.stored.entered(GroupId(group), fresh, fetched=tier == HOST)
                    self._adopt(tier, GroupId(group), fresh, mine)
        if tier == DEVICE:
            effects += self._unsaved(keys, first, known)
        return effects

    def _adopt(self, tier: Tier, group: GroupId, rows: NodeIds, pages: PageIds) -> None:
        """Pages of one path that enter a tier."""
        nodes = self.nodes
        nodes.residency[group].move(rows, (Event.INSERTED, Event.FETCHED)[tier])
        nodes.page[tier][group][rows] = pages
        self.pins.born(tier, group, rows)

    def _meet(self, tier: Tier, group: GroupId, rows: NodeIds, mine: PageIds) -> list[Effect]:
        """A request's (or storage's) pages for nodes that exist already."""
        nodes = self.nodes
        state = nodes.state[group][rows]
        held = mine != NONE
        there = ON_TIER[tier][state]
        take = held & ~there
        if take.any():
            adopted = rows[take]
            absent = state[take] == Residency.ABSENT  # a second copy is no use of the first
            if absent.any():
                self.pins.enter(group, adopted[absent], self.pins.tick())
            if tier == HOST or absent.any():
                self.stored.entered(group, adopted[absent | (tier == HOST)], fetched=tier == HOST)
            self._adopt(tier, group, adopted, mine[take])
            if group == ANCHOR:
                np.add.at(nodes.kids[tier], nodes.parent[adopted], 1)
            # The other copy is not the last one any more.
            other = TIERS[1 - tier]
            free = nodes.pins[other][group][adopted] == 0
            free &= ON_TIER[other][nodes.state[group][adopted]]
            self.pins.queue(other, group, adopted[free])
        spare = held & there
        if tier == DEVICE:
            spare &= (state != Residency.LOADING) & (nodes.page[DEVICE][group][rows] != mine)
        if not spare.any():
            return []
        if tier == HOST:
            return [FreeHost(group, mine[spare])]
        canonical = nodes.page[DEVICE][group][rows[spare]]
        at = nodes.depth[rows[spare]].astype(np.int64)
        return [Remap(group, at, canonical), FreeDevice(group, mine[spare])]

    def _unsaved(self, keys: Sequence[PageKey], first: int, known: int) -> list[Effect]:
        """Pages without a host copy among those just inserted, of the groups that keep all; those
        from ``known`` on are new and have none."""
        rows = self.nodes.tail(self.nodes.index[keys[-1]], len(keys) - first)
        met = known - first
        effects: list[Effect] = []
        for group in self._keep_all:
            found = rows
            if met or group != ANCHOR:
                found = self.copies.unsaved(group, rows)
            if len(found):
                effects.append(Backup(group, found))
        return effects

    # -- keep and evict ------------------------------------------------------------------------

    def keep(
        self, lease: DeviceLease, end: int, continued: int, instead_of: int = 0
    ) -> list[Effect]:
        """Make ``end`` (pages, at most the lease's) a checkpoint of the lease's path; the request
        matched ``continued`` pages when it came. It takes the place of the one at ``instead_of``,
        if any."""
        if not 0 < end <= lease.end:
            return []
        return self.checkpoints.keep(lease.path[:end], continued, instead_of)

    def evict(self, tier: Tier, group: GroupId, count: int) -> list[Effect]:
        """Take up to ``count`` pages of a group off a tier, coldest first; it may be fewer."""
        return self._evictor.evict(tier, group, count)

    def evict_spare(self, tier: Tier, group: GroupId, count: int) -> list[Effect]:
        """``evict``, but only what no checkpoint needs."""
        return self._evictor.evict(tier, group, count, below=WARM)

    @property
    def dropped_dirty(self) -> int:
        """Pages of any group that have left the device for good though they were worth keeping."""
        return self._evictor.dropped_dirty

    @property
    def dropped_cold(self) -> int:
        """Pages that have left the device for good and that no checkpoint needed."""
        return self._evictor.dropped_cold

    def evictable(self, tier: Tier, group: GroupId) -> int:
        """Resident pages that nothing pins; exact but for pages that a copy below them holds."""
        return self.pins.evictable[tier][group]

"""The prefix tree: what is cached, where, and who stands on it.

One node is one page, so nothing ever splits. Pure: no tensors, no threads, no clock. Mutators
return effects in the order in which they must be executed. Owns leases and insertion; matching,
eviction, checkpoints and copies are the modules beside it, on the same columns.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, PageKey
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.tree.checkpoints import Checkpoints
from stratakv.tree.copies import Copies
from stratakv.tree.effects import Backup, Effect, FreeDevice, FreeHost, Inserted, Remap
from stratakv.tree.eviction import Evictor
from stratakv.tree.lease import DeviceLease
from stratakv.tree.leases import Leases
from stratakv.tree.matching import Beyond, Match, Matcher
from stratakv.tree.nodes import TIERS, NodeTable, Tier
from stratakv.tree.observer import CacheObserver
from stratakv.tree.order import WARM, EvictionPolicy, LeastRecentlyUsed
from stratakv.tree.pins import Pins
from stratakv.tree.residency import (
    ON_DEVICE,
    ON_TIER,
    READABLE_ON_HOST,
    Residency,
    ResidencyEvent,
)
from stratakv.tree.stored import StorageMarks
from stratakv.tree.write_back import WriteBackEviction

DEVICE, HOST = Tier.DEVICE, Tier.HOST


class PrefixTree:
    """``capacity``: the most nodes there can be, that is device plus host pages of the anchor."""

    def __init__(
        self,
        spec: CacheSpec,
        capacity: int,
        policy: EvictionPolicy | None = None,
        observer: CacheObserver | None = None,
    ) -> None:
        self.spec = spec
        self.nodes = NodeTable(spec, capacity, observer)
        self.pins = Pins(self.nodes, len(spec.groups), policy or LeastRecentlyUsed())
        self.checkpoints = Checkpoints(spec, self.nodes, self.pins)
        self.stored = StorageMarks(spec, self.nodes, self.pins)
        self.copies = Copies(self.nodes, self.pins, self.stored)
        self._matcher = Matcher(spec, self.nodes)
        self.leases = Leases(spec, self.nodes, self.pins, self._matcher, self.copies)
        self._evictor = Evictor(spec, self.nodes, self.pins, self.checkpoints)
        self.write_back = WriteBackEviction(self.nodes, self.pins, self._evictor)
        self._groups = range(len(spec.groups))
        self._keep_all = [group.id for group in spec.groups if group.keeps_all]
        self._partial = [group.id for group in spec.groups if not group.keeps_all]

    # -- match ---------------------------------------------------------------------------------

    def match(self, keys: Sequence[PageKey], limit: int) -> Match:
        """How far ``keys`` is usable, looking at no more than ``limit`` pages. Read-only."""
        return self._matcher.match(keys, limit)

    def beyond(self, keys: Sequence[PageKey], found: Match, limit: int) -> Beyond:
        """What there is, or was, of the first ``limit`` pages of ``keys`` that the match ``found``
        could not use. Read-only."""
        return self._matcher.beyond(keys, found, limit)

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

    def insert(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> Inserted:
        """Adopt a request's device pages for page indices [first, len(keys)).

        ``pages[g]``: int32 [len(keys) - first], NONE where the group holds none. The pages above
        ``first`` are in the tree and leased by the caller. A page the tree holds already comes back
        as ``Remap`` and ``FreeDevice``; one that is just being loaded stays the request's own.
        """
        return self._place(ResidencyEvent.INSERTED, keys, first, pages)

    def land(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> list[Effect]:
        """Adopt host pages that storage delivered; arguments as for ``insert``. The pages above
        ``first`` are leased by the caller. What the host holds already is freed."""
        return self._place(ResidencyEvent.FETCHED, keys, first, pages).effects

    def adopt_saved(
        self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]
    ) -> list[Effect]:
        """Adopt host pages that a foreign engine's were copied to; as ``land``, and what of them is
        worth a stored object is asked for."""
        effects = self._place(ResidencyEvent.SAVED, keys, first, pages).effects
        if first < len(keys):
            rows = self.nodes.tail(self.nodes.index[keys[-1]], len(keys) - first)
            for group in self._groups:
                there = rows[READABLE_ON_HOST[self.nodes.state[group][rows]]]
                effects += self.stored.wanted(GroupId(group), there)
        return effects

    def _place(
        self, event: ResidencyEvent, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]
    ) -> Inserted:
        tier = DEVICE if event is ResidencyEvent.INSERTED else HOST
        nodes, pins = self.nodes, self.pins
        found = Inserted([], [])
        if first >= len(keys):
            return found
        known = nodes.reach(keys, first, len(keys))
        stamp = pins.tick()
        if known > first:
            rows = nodes.tail(nodes.index[keys[known - 1]], known - first)
            for group in self._groups:
                mine = pages[group][: known - first]
                self._meet(event, GroupId(group), rows, mine, found)
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
                    fetched = event is ResidencyEvent.FETCHED
                    self.stored.entered(GroupId(group), fresh, fetched=fetched)
                    self._adopt(event, GroupId(group), fresh, mine)
        if tier == DEVICE:
            found.effects.extend(self._unsaved(keys, first, known))
        return found

    def _adopt(self, event: ResidencyEvent, group: GroupId, rows: NodeIds, pages: PageIds) -> None:
        """Pages of one path that enter a tier."""
        tier = DEVICE if event is ResidencyEvent.INSERTED else HOST
        nodes = self.nodes
        nodes.residency[group].move(rows, event)
        nodes.page[tier][group][rows] = pages
        self.pins.born(tier, group, rows)

    def _meet(
        self, event: ResidencyEvent, group: GroupId, rows: NodeIds, mine: PageIds, found: Inserted
    ) -> None:
        """A request's (or storage's) pages for nodes that exist already."""
        tier = DEVICE if event is ResidencyEvent.INSERTED else HOST
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
                fetched = event is ResidencyEvent.FETCHED
                self.stored.entered(group, adopted[absent | (tier == HOST)], fetched=fetched)
            self._adopt(event, group, adopted, mine[take])
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
            return
        if tier == HOST:
            found.effects.append(FreeHost(group, mine[spare]))
            return
        canonical = nodes.page[DEVICE][group][rows[spare]]
        at = nodes.depth[rows[spare]].astype(np.int64)
        found.remaps.append(Remap(group, at, canonical))
        found.effects.append(FreeDevice(group, mine[spare]))

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

    def clear(self) -> list[Effect]:
        """Drop everything; nothing is pinned. Nobody lost what was dropped on purpose: what has
        left is not remembered."""
        effects: list[Effect] = []
        for tier in reversed(TIERS):
            effects += self.evict(tier, ANCHOR, len(self.nodes))
        assert not len(self.nodes), "a flush left pages behind"
        self.nodes.gone.clear()
        return effects

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

    # -- for those who look on ---------------------------------------------------------------------

    def __len__(self) -> int:
        """Nodes, that is pages of prefixes."""
        return len(self.nodes)

    def held(self, tier: Tier, group: GroupId) -> PageIds:
        """Every page that the tree has on a tier, in no order."""
        pages = self.nodes.page[tier][group][self.nodes.rows()]
        return pages[pages != NONE]

    def newest_key(self) -> PageKey | None:
        """The last key of the newest chain that is still there; None: there is none."""
        return self.nodes.newest_key()

    def columns(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Every array by name, for those who compare two trees."""
        yield from self.nodes.columns()
        yield from self.stored.columns()

"""The prefix tree: what is cached, where, and who stands on it.

One node is one page, so nothing ever splits. Pure: no tensors, no threads, no clock. Mutators
return effects in the order in which they must be executed. Owns leases and insertion; matching,
eviction, checkpoints and copies are the modules beside it, on the same columns.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, PageKey, TicketId
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.tree.checkpoints import Checkpoints
from stratakv.tree.cleaning import Cleaning
from stratakv.tree.copies import Copies
from stratakv.tree.effects import Backup, Effect, FreeDevice, FreeHost, Remap
from stratakv.tree.eviction import Evictor
from stratakv.tree.journal import Journal
from stratakv.tree.lease import Lease
from stratakv.tree.matching import Beyond, Match, Matcher
from stratakv.tree.nodes import TIERS, NodeTable, Tier
from stratakv.tree.order import WARM, EvictionPolicy, LeastRecentlyUsed
from stratakv.tree.pins import Pins
from stratakv.tree.residency import (
    ON_DEVICE,
    ON_TIER,
    Event,
    Residency,
    all_on_device,
    count_on_tier,
)
from stratakv.tree.stored import Stored

DEVICE, HOST = Tier.DEVICE, Tier.HOST
HIGHEST_PRIORITY: Final = 2**31 - 1


class Price(NamedTuple):
    """Pages of one group: those a lease would make unevictable, and those it would have to load."""

    to_pin: int
    to_load: int


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
        self.leases: set[Lease] = set()  # open ones
        self.stored = Stored(spec, self.nodes, self.pins, self.leases)
        self.copies = Copies(self.nodes, self.pins, self.stored)
        self._matcher = Matcher(spec, self.nodes)
        self._evictor = Evictor(spec, self.nodes, self.pins, self.checkpoints)
        self.cleaning = Cleaning(self.nodes, self.pins, self._evictor)
        self._groups = range(len(spec.groups))
        self._keep_all = [group.id for group in spec.groups if group.keeps_all]
        self._partial = [group.id for group in spec.groups if not group.keeps_all]

    # -- match and lease -----------------------------------------------------------------------

    def match(self, keys: Sequence[PageKey], limit: int) -> Match:
        """How far ``keys`` is usable, looking at no more than ``limit`` pages. Read-only."""
        return self._matcher.match(keys, limit)

    def beyond(self, keys: Sequence[PageKey], found: Match) -> Beyond:
        """What there is of ``keys`` that the match ``found`` could not use. Read-only."""
        return self._matcher.beyond(keys, found)

    def starts(self, end: int) -> list[int]:
        """First page that every group needs at ``end`` pages."""
        return self._matcher.starts(end)

    def lease(
        self,
        keys: Sequence[PageKey],
        end: int,
        *,
        load: bool,
        starts: Sequence[int] | None = None,
        priority: int = 0,
        again: bool = False,
    ) -> Lease:
        """Pin exactly what every group needs at ``end``, and stamp recency and hits on it.

        ``end`` must come from ``match``: its ``device_end``, or with ``load`` its ``end``, in which
        case pages on the host alone are pinned there for ``copies.begin_load``. ``starts``: the
        first page of each group where fewer are needed, as by a request that brings live pages.
        ``priority``: the request's; every page that it uses counts by its highest one. ``again``:
        the request has counted as a use of these pages before, and only comes back to them.
        """
        first = list(self._matcher.starts(end) if starts is None else starts)
        if not end:
            lease = Lease(starts=first, priority=priority)
            self.leases.add(lease)
            return lease
        nodes, pins = self.nodes, self.pins
        tip = nodes.index[keys[end - 1]]
        path = nodes.tail(tip, end)
        lease = Lease(tip, end, first, path, priority=priority)
        self.leases.add(lease)
        nodes.hits[path] += not again
        use = pins.stamp if again else pins.hit
        if priority > 0:
            self._raise_priority(path, priority)
        stamp = pins.tick()
        host: list[NodeIds] = []
        for group in self._groups:
            rows = path[lease.starts[group] :]
            use(group, rows, stamp)
            if load:
                there = ON_DEVICE[nodes.state[group][rows]]
                host.append(rows[~there])
                pins.pin(HOST, group, host[-1])
                rows = rows[there]
            pins.pin(DEVICE, group, rows)
        if self.copies.loads:
            lease.loading = self._tickets(lease, path)
        if load and any(len(rows) for rows in host):
            lease.host = host
        return lease

    def _raise_priority(self, rows: NodeIds, priority: int) -> None:
        column = self.nodes.priority
        column[rows] = np.maximum(column[rows], min(priority, HIGHEST_PRIORITY))

    def _tickets(self, lease: Lease, path: NodeIds) -> tuple[TicketId, ...]:
        found: set[int] = set()
        for group in self._groups:
            rows = path[lease.starts[group] :]
            found.update(np.unique(self.nodes.ticket[group][rows]).tolist())
        found.discard(NONE)
        return tuple(TicketId(ticket) for ticket in sorted(found))

    def hold(self, keys: Sequence[PageKey], end: int, starts: Sequence[int]) -> Lease:
        """Pin pages [starts[g], ``end``) of every group on the host alone: all of them must have a
        host page by now. Neither recency nor hits change; ``release`` ends it."""
        nodes = self.nodes
        lease = Lease(starts=list(starts), parked=True)
        self.leases.add(lease)
        if end:
            lease.tip, lease.end = nodes.index[keys[end - 1]], end
            lease.path = nodes.tail(lease.tip, end)
        lease.host = [lease.path[start:] for start in starts]
        for group, rows in enumerate(lease.host):
            here = count_on_tier(HOST, nodes.state[group][rows])
            assert here == len(rows), "a page to hold is not on the host"
            self.pins.pin(HOST, group, rows)
        return lease

    def price(
        self, keys: Sequence[PageKey], end: int, starts: Sequence[int], group: GroupId
    ) -> Price:
        """What a lease of [starts[g], ``end``) would take of one group. Read-only."""
        if not end:
            return Price(0, 0)
        count = end - starts[group]
        rows = self.nodes.tail(self.nodes.index[keys[end - 1]], count)
        to_load = count - count_on_tier(DEVICE, self.nodes.state[group][rows])
        pinned = int(np.count_nonzero(self.nodes.pins[DEVICE][group][rows]))
        return Price(to_pin=count - to_load - pinned, to_load=to_load)

    def holds(self, key: PageKey, group: GroupId) -> bool:
        """Whether the page at ``key`` has the group on the device."""
        row = self.nodes.index.get(key)
        return row is not None and ON_DEVICE.item(self.nodes.state[group].item(row))

    def sole(self, lease: Lease, group: GroupId) -> int:
        """Pages of a group that could be evicted if ``lease`` let go of them."""
        rows = lease.path[lease.starts[group] :]
        return int(np.count_nonzero(self.nodes.pins[DEVICE][group][rows] == 1))

    def is_checkpoint(self, lease: Lease, end: int) -> bool:
        return 0 < end <= lease.end and self.nodes.checkpoint.item(lease.path.item(end - 1))

    def unsaved(self, lease: Lease) -> list[Backup]:
        """Pages of a lease that are on the device alone, of the groups that keep all."""
        found = ((group, self.copies.unsaved(group, lease.path)) for group in self._keep_all)
        return [Backup(group, rows) for group, rows in found if len(rows)]

    def kept_unsaved(self, lease: Lease) -> list[Backup]:
        """``unsaved``, and of the other groups what the lease holds and a checkpoint needs."""
        found = self.unsaved(lease)
        for group in self._partial:
            rows = self.copies.unsaved(group, lease.path[lease.starts[group] :])
            rows = rows[self.nodes.need[group][rows] > 0]
            if len(rows):
                found.append(Backup(group, rows))
        return found

    def advance(self, lease: Lease, keys: Sequence[PageKey], end: int) -> None:
        """Move a lease on along its own path: ``keys`` up to ``end`` are on the device by now.

        Of a group whose requests carry a state, it holds the page at ``end`` where there is one;
        elsewhere the request's live page stands for it.
        """
        assert not lease.released, "a released lease cannot move"
        assert lease.host is None, "a lease cannot move before its load has begun"
        if end <= lease.end:
            return
        nodes, pins = self.nodes, self.pins
        tip = nodes.index[keys[end - 1]]
        if lease.priority > 0:
            self._raise_priority(nodes.tail(tip, end - lease.end), lease.priority)
        starts = self._matcher.starts(end)
        stamp = pins.tick()
        for group in self._groups:
            old, new = lease.starts[group], starts[group]
            rows = nodes.tail(tip, end - old)
            entering = rows[max(lease.end, new) - old :]
            if not all_on_device(nodes.state[group][entering]):
                assert self.spec.groups[group].stateful, "a needed page is not there"
                new = starts[group] = end
                entering = rows[:0]
            pins.stamp(group, entering, stamp)
            pins.pin(DEVICE, group, entering)
            pins.unpin(DEVICE, group, rows[: max(0, min(new, lease.end) - old)])
        lease.tip, lease.end, lease.starts = tip, end, starts
        lease.path = nodes.tail(tip, end)

    def let_go(self, lease: Lease, end: int) -> None:
        """Pin no more of what a lease holds than its request needs at ``end`` pages: the request
        has gone on, and the lease does not move on with it."""
        starts = [min(start, lease.end) for start in self._matcher.starts(end)]
        for group in self._groups:
            behind = lease.path[lease.starts[group] : starts[group]]
            self.pins.unpin(DEVICE, group, behind)
        lease.starts = [max(pair) for pair in zip(lease.starts, starts, strict=True)]

    def release(self, lease: Lease) -> None:
        """End a lease; what it held may leave from now on."""
        assert not lease.released, "a lease was released twice"
        lease.released = True
        self.leases.remove(lease)
        if not lease.end:
            return
        pins, path = self.pins, lease.path
        stamp = pins.tick()
        for group in reversed(self._groups):  # the anchor last: its node waits for the others
            rows = path[lease.starts[group] :]
            if not lease.parked:  # a use of the host copy must not warm a device copy in its queue
                pins.stamp(group, rows, stamp)
            if lease.host is not None:
                pins.unpin(HOST, group, lease.host[group])
                rows = rows[~np.isin(rows, lease.host[group])]
            if not lease.parked:
                pins.unpin(DEVICE, group, rows)
        if lease.host is not None:
            lease.host = None

    def pages(self, lease: Lease, group: GroupId) -> PageIds:
        """Device pages of ``[starts[group], end)`` under a lease."""
        return self.nodes.page[DEVICE][group][lease.path[lease.starts[group] :]]

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

    def keep(self, lease: Lease, end: int, continued: int, instead_of: int = 0) -> list[Effect]:
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

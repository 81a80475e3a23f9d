"""Retracted requests: off the device, with everything they need to go on kept on the host.

Owns the host pages of live pages, and the hold on the tree's. A retraction saves exactly
``needed(n)`` of every group: pages of the tree under their own keys, live pages into host pages of
the request's own. Where the host has no room nothing is held, and the request is recomputed. Must
not choose who is retracted (``engine``), nor seat anybody.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stratakv.cache.footprint import Footprints, LivePage
from stratakv.cache.live import LivePages
from stratakv.cache.seats import Seat
from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, TicketId
from stratakv.memory.block_table import BlockTable
from stratakv.tiers.tiered_cache import TieredCache
from stratakv.tree.lease import DeviceLease, HostHold
from stratakv.tree.nodes import Tier


@dataclass(slots=True, eq=False)
class Parked:
    """A retracted request of which ``tokens`` had their KV. ``hold`` pins pages [starts[g], end) of
    every group on the host; None where the request must be recomputed. ``tickets``: the copies of
    its live pages that are under way."""

    seat: Seat
    tokens: int
    end: int
    starts: list[int]
    hold: HostHold | None = None
    live: list[LivePage] = field(default_factory=list[LivePage])
    tickets: tuple[TicketId, ...] = ()


class Parking:
    def __init__(
        self,
        tiers: TieredCache,
        tables: BlockTable,
        live: LivePages,
    ) -> None:
        self._spec = tiers.spec
        self._unsaved, self._leases = tiers.tree.copies.unsaved, tiers.tree.leases
        self._pools, self._copies = tiers.pools, tiers.copies
        self._tables = tables
        self._live = live
        self._footprints = Footprints(tiers.spec, tables, live)
        self._held: list[Parked] = []
        # Live pages under a copy, with its tickets: those to free on a tier when it has ended.
        self._moving: list[tuple[tuple[TicketId, ...], Tier, list[LivePage]]] = []
        self._landing: dict[int, tuple[TicketId, ...]] = {}  # loads of live pages, by row

    def __len__(self) -> int:
        return len(self._held) + len(self._moving)

    def __contains__(self, parked: Parked) -> bool:
        return parked in self._held

    # -- leaving the device ----------------------------------------------------------------------

    def park(self, row: int, seat: Seat, tokens: int) -> Parked:
        """Save what the request at ``row`` needs to go on after ``tokens``. Its lease and its row
        stay the caller's to end; live pages that are being saved have left it."""
        need = self._footprints.of(row, seat, tokens)
        parked = Parked(seat, tokens, need.end, need.starts)
        rows = [seat.lease.path[start:] for start in need.starts]
        self._copies.begin_backups()
        if not tokens or not self._room(rows, need.live):
            self._pools.counters.retracted_unsaved += 1
            return parked
        self._save(row, parked, rows, need.live)
        return parked

    def _room(self, rows: Sequence[NodeIds], own: Sequence[LivePage]) -> bool:
        """Make the host pages free that a save needs. Making them may cost some of its own pages
        their host copy, so it looks again."""
        for _ in range(3):
            wanted = [
                len(self._unsaved(group.id, rows[group.id]))
                + sum(live.group == group.id for live in own)
                for group in self._spec.groups
            ]
            host = self._pools.tiers[Tier.HOST]
            if all(space.available() >= n for space, n in zip(host, wanted, strict=True)):
                return True
            for group, count in zip(self._spec.groups, wanted, strict=True):
                if self._pools.make_room(Tier.HOST, group.id, count) < count:
                    return False
        return False

    def _save(
        self, row: int, parked: Parked, rows: Sequence[NodeIds], own: Sequence[LivePage]
    ) -> None:
        counters = self._pools.counters
        for group in self._spec.groups:
            counters.retracted_pages += self._copies.save(group.id, rows[group.id])
        keys = parked.seat.prefix.keys
        parked.hold = self._leases.hold(keys, parked.end, parked.starts)
        for live in own:
            pages = self._pools.tiers[Tier.HOST][live.group].alloc(1)
            assert pages is not None, "room was made for every live page"
            parked.live.append(replace(live, host=int(pages[0])))
            if live.index == NONE:
                self._live.restore(row, live.group, NONE)
            else:
                self._tables.pages(live.group)[row, live.index] = NONE
        counters.retracted_pages += len(own)
        parked.tickets = self._copies.save_live(_pages(parked.live))
        self._moving.append((parked.tickets, Tier.DEVICE, parked.live))
        self._held.append(parked)

    # -- coming back -----------------------------------------------------------------------------

    def saved(self, parked: Parked) -> bool:
        """Whether its live pages have arrived on the host."""
        return not self._copies.under_way(parked.tickets)

    def take(self, parked: Parked) -> list[LivePage] | None:
        """Device pages for its live pages, which ``land`` uses or ``give_back`` frees. None, and
        nothing taken, where the device has no page for one of them."""
        taken: list[LivePage] = []
        for live in parked.live:
            pages = None
            if self._pools.make_room(Tier.DEVICE, live.group, 1):
                pages = self._pools.tiers[Tier.DEVICE][live.group].alloc(1)
            if pages is None:
                self.give_back(taken)
                return None
            taken.append(replace(live, device=int(pages[0])))
        return taken

    def give_back(self, taken: Sequence[LivePage]) -> None:
        self._free(Tier.DEVICE, taken)

    def land(
        self, row: int, parked: Parked, lease: DeviceLease, taken: list[LivePage]
    ) -> tuple[TicketId, ...]:
        """Give ``row`` its live pages back, on the device pages ``taken``, and end the hold, which
        ``lease`` replaces. Cannot fail; returns the loads."""
        self._live.open(row, lease)
        for live in taken:
            if live.index == NONE:
                self._live.restore(row, live.group, live.device)
            else:
                self._tables.pages(live.group)[row, live.index] = live.device
        tickets = self._copies.load_live(_pages(taken))
        self._moving.append((tickets, Tier.HOST, taken))
        self._landing[row] = tickets
        parked.live = []
        self.forget(parked)
        return tickets

    def landed(self, row: int, wait: Callable[[], bool]) -> None:
        """See to it that nothing is written to the row's live pages any more."""
        tickets = self._landing.pop(row, ())
        while self._copies.under_way(tickets):
            wait()

    def _free(self, tier: Tier, pages: Sequence[LivePage]) -> None:
        for live in pages:
            page = (live.device, live.host)[tier]
            self._pools.tiers[tier][live.group].free(np.array([page], np.int32))

    def forget(self, parked: Parked) -> None:
        """Hold nothing for a request any more: it has come back, or ends, or was lost."""
        if parked not in self._held:
            return
        assert parked.hold is not None
        self._leases.release(parked.hold)
        self._let_go(parked)

    def _let_go(self, parked: Parked) -> None:
        """Its hold has ended."""
        self._held.remove(parked)
        parked.hold = None
        if parked.live:  # a host page that is still being written is not free
            self._moving.append((parked.tickets, Tier.HOST, parked.live))
            parked.live = []

    # -- time ------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Free the live pages whose copy has ended; give up what could not be saved."""
        for parked in list(self._held):
            assert parked.hold is not None
            if not self._leases.is_open(parked.hold):  # the backup of a page has failed
                self._pools.counters.retracted_unsaved += 1
                self._let_go(parked)
            elif self._copies.failed(parked.tickets):
                self._pools.counters.retracted_unsaved += 1
                self.forget(parked)
        moving, self._moving = self._moving, []
        for tickets, tier, pages in moving:
            if self._copies.under_way(tickets):
                self._moving.append((tickets, tier, pages))
                continue
            self._copies.failed(tickets)  # whoever cared has heard of it
            self._free(tier, pages)

    def owned(self, tier: Tier, group: GroupId) -> PageIds:
        """Live pages on a tier that no seat has, for ``check``."""
        found = [
            (live.device, live.host)[tier]
            for _, of, pages in self._moving
            if of == tier
            for live in pages
            if live.group == group
        ]
        if tier == Tier.HOST:
            held = (live for parked in self._held for live in parked.live)
            found += [live.host for live in held if live.group == group]
        return np.array(found, np.int32)


def _pages(live: Sequence[LivePage]) -> list[tuple[GroupId, PageIds, PageIds]]:
    """Group, device pages and host pages, one entry per live page."""
    return [
        (page.group, np.array([page.device], np.int32), np.array([page.host], np.int32))
        for page in live
    ]

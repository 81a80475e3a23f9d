"""Retracted requests: off the device, with everything they need to go on kept on the host.

Owns the host pages of live pages, and the hold on the tree's. A retraction saves exactly
``needed(n)`` of every group, and of a prompt in the middle what another engine may take at its end:
pages of the tree under their own keys, live pages into host pages of the request's own. Where the
host has no room nothing is held, and the request is recomputed. Must not choose who is retracted
(``engine``), nor sequence anybody.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stratakv.cache.footprint import Footprint, Footprints, LivePage
from stratakv.cache.live import LivePages
from stratakv.cache.sequence_states import SequenceState
from stratakv.core.ids import NONE, GroupId, PageIds, TicketId
from stratakv.memory.block_table import BlockTable
from stratakv.tiers.tiered_cache import TieredCache
from stratakv.tree.lease import DeviceLease, HostHold
from stratakv.tree.nodes import Tier


@dataclass(slots=True, eq=False)
class RetractedState:
    """A retracted request of which ``tokens`` had their KV. ``hold`` pins pages [starts[g], end) of
    every group on the host; None where the request must be recomputed. ``tickets``: the copies of
    its live pages that are under way."""

    sequence: SequenceState
    tokens: int
    end: int
    starts: list[int]
    hold: HostHold | None = None
    live: list[LivePage] = field(default_factory=list[LivePage])
    tickets: tuple[TicketId, ...] = ()


class Retraction:
    def __init__(
        self,
        tiers: TieredCache,
        tables: BlockTable,
        live: LivePages,
    ) -> None:
        self._spec = tiers.spec
        self._backups, self._leases = tiers.tree.backups, tiers.tree.leases
        self._pools, self._copies = tiers.pools, tiers.copies
        self._wait = tiers.progress.wait
        self._tables = tables
        self._live = live
        self._footprints = Footprints(tiers.spec, tables, live)
        self._held: list[RetractedState] = []
        # Live pages under a copy, with its tickets: those to free on a tier when it has ended.
        self._moving: list[tuple[tuple[TicketId, ...], Tier, list[LivePage]]] = []
        self._landing: dict[int, tuple[TicketId, ...]] = {}  # loads of live pages, by row

    def __len__(self) -> int:
        return len(self._held) + len(self._moving)

    def __contains__(self, retracted: RetractedState) -> bool:
        return retracted in self._held

    # -- leaving the device ----------------------------------------------------------------------

    def retract(self, row: int, sequence: SequenceState, tokens: int) -> RetractedState:
        """Save what the request at ``row`` needs to go on after ``tokens``. Its lease and its row
        stay the caller's to end; live pages that are being saved have left it."""
        need = self._footprints.of(row, sequence, tokens)
        retracted = RetractedState(sequence, tokens, need.end, need.starts)
        self._copies.backups.begin()
        if not tokens or not self._room(sequence.lease, need):
            self._pools.counters.add(retracted_unsaved=1)
            return retracted
        self._save(row, retracted, need.live)
        return retracted

    def _room(self, lease: DeviceLease, need: Footprint) -> bool:
        """Make the host pages free that a save needs. Making them may cost some of its own pages
        their host copy, so it looks again."""
        for _ in range(3):
            if self._has_room(wanted := self._to_save(lease, need)):
                return True
            for group, count in zip(self._spec.groups, wanted, strict=True):
                if self._pools.make_room(Tier.HOST, group.id, count) < count:
                    return False
        return False

    def could_save(self, row: int, sequence: SequenceState, tokens: int) -> bool:
        """Whether the host has pages for all that a retraction would save, free or cached, without
        those of its own prefix: what is evicted of them had to be saved again."""
        need = self._footprints.of(row, sequence, tokens)
        wanted, own = self._to_save(sequence.lease, need), sequence.lease.end
        if self._has_room(wanted):
            return True
        host = self._pools.tiers[Tier.HOST]
        return all(
            space.available() + self._pools.evictable(Tier.HOST, group.id) - own >= count
            for space, group, count in zip(host, self._spec.groups, wanted, strict=True)
        )

    def _to_save(self, lease: DeviceLease, need: Footprint) -> list[int]:
        """Host pages that a save needs, by group."""
        return [
            len(self._backups.behind(lease, group.id, need.starts[group.id]))
            + sum(live.group == group.id for live in need.live)
            for group in self._spec.groups
        ]

    def _has_room(self, wanted: Sequence[int]) -> bool:
        host = self._pools.tiers[Tier.HOST]
        return all(space.available() >= n for space, n in zip(host, wanted, strict=True))

    def _save(self, row: int, retracted: RetractedState, own: Sequence[LivePage]) -> None:
        counters, lease = self._pools.counters, retracted.sequence.lease
        for group in self._spec.groups:
            rows = self._backups.behind(lease, group.id, retracted.starts[group.id])
            counters.add(retracted_pages=self._copies.backups.save(group.id, rows))
        keys = retracted.sequence.prefix.keys
        retracted.hold = self._leases.hold(keys, retracted.end, retracted.starts)
        for live in own:
            pages = self._pools.tiers[Tier.HOST][live.group].alloc(1)
            assert pages is not None, "room was made for every live page"
            retracted.live.append(replace(live, host=int(pages[0])))
            if live.index == NONE:
                self._live.restore(row, live.group, NONE)
            else:
                self._tables.pages(live.group)[row, live.index] = NONE
        counters.add(retracted_pages=len(own))
        retracted.tickets = self._copies.save_live(_pages(retracted.live))
        self._moving.append((retracted.tickets, Tier.DEVICE, retracted.live))
        self._held.append(retracted)

    # -- coming back -----------------------------------------------------------------------------

    def saved(self, retracted: RetractedState) -> bool:
        """Whether its live pages have arrived on the host."""
        return not self._copies.flights.under_way(retracted.tickets)

    def take(self, retracted: RetractedState) -> list[LivePage] | None:
        """Device pages for its live pages, which ``land`` uses or ``give_back`` frees. None, and
        nothing taken, where the device has no page for one of them."""
        taken: list[LivePage] = []
        for live in retracted.live:
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
        self, row: int, retracted: RetractedState, lease: DeviceLease, taken: list[LivePage]
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
        retracted.live = []
        self._release(retracted)
        return tickets

    def assert_restored(self, row: int, retracted: RetractedState, taken: list[LivePage]) -> None:
        """AssertionError unless the row, seated again with the live pages ``taken``, has exactly
        what was saved."""
        saved = Footprint(retracted.tokens, retracted.end, retracted.starts, taken)
        self._footprints.assert_restored(row, saved, retracted.sequence)

    def landed(self, row: int) -> None:
        """See to it that nothing is written to the row's live pages any more."""
        tickets = self._landing.pop(row, ())
        while self._copies.flights.under_way(tickets):
            self._wait()

    def _free(self, tier: Tier, pages: Sequence[LivePage]) -> None:
        for live in pages:
            page = (live.device, live.host)[tier]
            self._pools.tiers[tier][live.group].free(np.array([page], np.int32))

    def forget(self, retracted: RetractedState) -> None:
        """The request ends without coming back."""
        if retracted in self._held:
            self._release(retracted)
        self.poll()

    def give_up(self, but: RetractedState | None = None) -> bool:
        """Let go of what the newest of those that hold anything holds, which must be computed again
        then; False where none ``but`` one holds anything."""
        for retracted in reversed(self._held):
            if retracted is not but:
                self._pools.counters.add(retracted_unsaved=1)
                self._release(retracted)
                self.poll()  # its live pages may be all that somebody lacks
                return True
        return False

    def _release(self, retracted: RetractedState) -> None:
        """Hold nothing for a request any more: it has come back, or ends, or was lost."""
        assert retracted.hold is not None
        self._leases.release(retracted.hold)
        self._let_go(retracted)

    def _let_go(self, retracted: RetractedState) -> None:
        """Its hold has ended."""
        self._held.remove(retracted)
        retracted.hold = None
        if retracted.live:  # a host page that is still being written is not free
            self._moving.append((retracted.tickets, Tier.HOST, retracted.live))
            retracted.live = []

    # -- time ------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Free the live pages whose copy has ended; give up what could not be saved."""
        for retracted in list(self._held):
            assert retracted.hold is not None
            if not self._leases.is_open(retracted.hold):  # the backup of a page has failed
                self._pools.counters.add(retracted_unsaved=1)
                self._let_go(retracted)
            elif self._copies.failed(retracted.tickets):
                self._pools.counters.add(retracted_unsaved=1)
                self._release(retracted)
        moving, self._moving = self._moving, []
        for tickets, tier, pages in moving:
            if self._copies.flights.under_way(tickets):
                self._moving.append((tickets, tier, pages))
                continue
            self._copies.failed(tickets)  # whoever cared knows of it
            self._free(tier, pages)

    def owned(self, tier: Tier, group: GroupId) -> PageIds:
        """Live pages on a tier that no sequence has, for ``check``."""
        found = [
            (live.device, live.host)[tier]
            for _, of, pages in self._moving
            if of == tier
            for live in pages
            if live.group == group
        ]
        if tier == Tier.HOST:
            held = (live for retracted in self._held for live in retracted.live)
            found += [live.host for live in held if live.group == group]
        return np.array(found, np.int32)


def _pages(live: Sequence[LivePage]) -> list[tuple[GroupId, PageIds, PageIds]]:
    """Group, device pages and host pages, one entry per live page."""
    return [
        (page.group, np.array([page.device], np.int32), np.array([page.host], np.int32))
        for page in live
    ]

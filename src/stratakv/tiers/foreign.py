"""Device pages that are somebody else's: another engine names them, and keeps them.

Owns the copies between those and the host tier, and the host pages that a save fills. Residency on
the device is the other engine's affair: here a page is on the host, or it is not. Must not allocate
a device page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stratakv.core.ids import NONE, GroupId, PageIds, PageKey, TicketId
from stratakv.spec.groups import ANCHOR
from stratakv.tiers.pools import Pools, check_pages
from stratakv.tiers.transfer_manager import LivePageCopies, TransferManager
from stratakv.tree.lease import HostHold
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    tickets: tuple[TicketId, ...]
    hold: HostHold


@dataclass(frozen=True, slots=True, eq=False)
class _Save:
    """``pages[g]``: host pages for page indices [first, len(keys)), NONE where none is saved."""

    tickets: tuple[TicketId, ...]
    hold: HostHold
    keys: Sequence[PageKey]
    first: int
    pages: Sequence[PageIds]


class ForeignTransfers:
    """``capacity``: device pages of the other engine, by group. What it names is checked before
    anything is taken: ValueError, and all is as it was."""

    def __init__(
        self, tree: PrefixTree, pools: Pools, copies: TransferManager, capacity: Sequence[int]
    ) -> None:
        self._capacity = capacity
        self._tree = tree
        self._pools = pools
        self._copies = copies
        self._loads: list[_Load] = []
        self._saves: list[_Save] = []

    def load_into(self, hold: HostHold, pages: Sequence[PageIds]) -> tuple[TicketId, ...]:
        """Begin to copy what ``hold`` pins to device ``pages`` (int32, one for each of its rows, by
        group). Nothing may touch them until ``ended``; the host pages stay pinned as long, whatever
        becomes of ``hold``. They leave with ``Flights.gate``, at the latest in a
        tick. ValueError where ``pages`` are not that, or ``hold`` was released."""
        leases = self._tree.leases
        if not leases.is_open(hold):
            raise ValueError("load_into: the hold was released")
        self._check("load_into", pages, [len(rows) for rows in hold.host])
        if any(np.any(mine == NONE) for mine in pages):
            raise ValueError("load_into: NONE is no page")
        moves: list[tuple[GroupId, PageIds, PageIds]] = []
        sources = self._tree.copies.sources(hold.host)
        for group, (source, mine) in enumerate(zip(sources, pages, strict=True)):
            if len(source):
                moves.append((GroupId(group), mine, source))
        tickets = self._copies.load_live(moves)
        if tickets:
            self._loads.append(_Load(tickets, leases.again(hold)))
        return tickets

    def save_from(
        self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]
    ) -> tuple[TicketId, ...] | None:
        """Begin to copy device ``pages`` (int32, by group, for page indices [first, len(keys)),
        NONE where a group has none; the anchor has all) to the host. They are in the tree when the
        copies have ended well. None, and nothing has begun, where the host has no room, or lacks a
        page above ``first``. Nothing may write the pages until ``ended``. ValueError where
        ``pages`` are not that."""
        if not 0 <= first <= len(keys):
            raise ValueError(f"save_from: page {first} of {len(keys)}")
        self._check("save_from", pages, [len(keys) - first] * len(self._capacity))
        if np.any(pages[ANCHOR] == NONE):
            raise ValueError(f"save_from: group {ANCHOR} keeps all, so none of its pages is NONE")
        reach = self._tree.match(keys, first).anchor_end
        hold = self._tree.leases.hold_present(keys, reach, self._nothing(first))
        if hold.end < first:
            self._tree.leases.release(hold)
            return None
        host = self._allocate(pages)
        if host is None:
            self._tree.leases.release(hold)
            return None
        moves: LivePageCopies = [
            (GroupId(group), mine[mine != NONE], taken[taken != NONE])
            for group, (mine, taken) in enumerate(zip(pages, host, strict=True))
            if (mine != NONE).any()
        ]
        tickets = self._copies.save_live(moves)
        self._saves.append(_Save(tickets, hold, list(keys), first, host))
        return tickets

    def _check(self, verb: str, pages: Sequence[PageIds], lengths: Sequence[int]) -> None:
        where = "(TierOptions.foreign_pages)"
        check_pages(verb, pages, lengths, self._capacity, f"device pages {where}")

    def _nothing(self, first: int) -> list[int]:
        """Of the pages above ``first`` the last anchor page: it keeps all above it."""
        return [
            max(0, first - 1) if group.id == ANCHOR else first for group in self._tree.spec.groups
        ]

    def _allocate(self, pages: Sequence[PageIds]) -> list[PageIds] | None:
        """A host page for each that is to be saved, or none."""
        host = self._pools.tiers[Tier.HOST]
        wanted = [int(np.count_nonzero(mine != NONE)) for mine in pages]
        for group, count in enumerate(wanted):
            if self._pools.make_room(Tier.HOST, GroupId(group), count) < count:
                return None
        found: list[PageIds] = []
        for group, mine in enumerate(pages):
            taken = host[group].alloc(wanted[group])
            assert taken is not None, "room was made for every page"
            column = np.full(len(mine), NONE, np.int32)
            column[mine != NONE] = taken
            found.append(column)
        return found

    def ended(self, tickets: Sequence[TicketId]) -> bool:
        """Whether these copies are over, and what they were for is state."""
        under_way = {ticket for move in (*self._loads, *self._saves) for ticket in move.tickets}
        return under_way.isdisjoint(tickets)

    def poll(self) -> None:
        """Turn copies that have ended into state."""
        if self._loads:
            self._loads = [load for load in self._loads if not self._loaded(load)]
        if self._saves:
            self._saves = [save for save in self._saves if not self._saved(save)]

    def _loaded(self, load: _Load) -> bool:
        if self._copies.flights.under_way(load.tickets):
            return False
        self._tree.leases.release(load.hold)
        return True

    def _saved(self, save: _Save) -> bool:
        if self._copies.flights.under_way(save.tickets):
            return False
        if self._copies.failed(save.tickets):
            for group, pages in enumerate(save.pages):
                self._pools.tiers[Tier.HOST][group].free(pages[pages != NONE])
        else:
            self._pools.execute(self._tree.adopt_saved(save.keys, save.first, save.pages))
        self._tree.leases.release(save.hold)
        return True

    def owned(self, group: GroupId) -> list[PageIds]:
        """Host pages that saves are filling, for ``check``."""
        return [save.pages[group][save.pages[group] != NONE] for save in self._saves]

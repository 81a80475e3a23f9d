"""Copies between device and host: what they hold in the tree, and what their end means.

Owns the device pages of a load, and the turning of completions, which come when every rank has its
own, into state. What is saved is ``backup_queue``'s, how copies are merged and named ``flights``'.
Must not choose what to copy (``policy``), nor touch bytes (``transfer``).
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from stratakv.agreement.agreement import DigestInputs
from stratakv.agreement.ballot import BallotResult, Work
from stratakv.core.ids import GroupId, PageIds, TicketId
from stratakv.tiers.backup_queue import BackupQueue
from stratakv.tiers.flights import Flight, Flights, Part
from stratakv.tiers.pools import Pools
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.engine import Completion
from stratakv.tree.lease import DeviceLease, LoadLease
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree

LivePageCopies: TypeAlias = Sequence[tuple[GroupId, PageIds, PageIds]]
"""Group, device pages and host pages of what belongs to a request, not to the tree."""


class TransferManager:
    """Its parts: ``backups``, what is to be saved; ``flights``, what is under way."""

    def __init__(
        self, tree: PrefixTree, pools: Pools, backups: BackupQueue, flights: Flights
    ) -> None:
        self._moves, self._leases = tree.copies, tree.leases
        self._pools = pools
        self.backups = backups
        self.flights = flights
        self._saves: dict[TicketId, int] = {}  # pages by which a plan's loads carry matches on
        self._failed: set[TicketId] = set()  # of live pages; asked about once
        self._failed_in_a_row = 0

    def failed(self, tickets: Sequence[TicketId]) -> bool:
        """Whether a copy of live pages has failed; reported once."""
        lost = self._failed.intersection(tickets)
        self._failed -= lost
        return bool(lost)

    @property
    def failed_in_a_row(self) -> int:
        """Plans of copies to the host that have failed since the last one that did not."""
        return self._failed_in_a_row

    @property
    def loading_pages(self) -> int:
        """What the loads under way save, in pages of a prefix: the load-back budget's unit."""
        return sum(self._saves.values())

    @property
    def busy(self) -> bool:
        return bool(self.backups or self.flights)

    def figures(self) -> DigestInputs:
        """What is under way, for ranks to compare."""
        failed = len(self._failed)
        return {**self.flights.figures(), **self.backups.figures(), "saves failed": failed}

    def submit(self) -> None:
        """Hand over all that was begun: the loads first, as one plan, then a step's backups."""
        self.flights.submit_loads()
        self.flights.back_up(self.backups.take())

    def save_live(self, pages: LivePageCopies) -> tuple[TicketId, ...]:
        """Copy live pages, which no node stands for, to the host."""
        self.submit()  # completions come in order: what was begun before ends before
        return self.flights.back_up(_live_parts(pages))

    # -- load ----------------------------------------------------------------------------------

    def load(self, lease: LoadLease, saved_pages: int) -> DeviceLease | None:
        """Begin the load that ``lease`` plans, which takes a match ``saved_pages`` further. It
        leaves with ``submit_loads``, and cannot fail any more. None without device pages: nothing
        has begun, and something may have been evicted all the same."""
        if any(self._pools.available(GroupId(g)) < len(rows) for g, rows in enumerate(lease.host)):
            return None
        device: list[PageIds] = []
        for group, rows in enumerate(lease.host):
            self._pools.make_room(Tier.DEVICE, GroupId(group), len(rows))
            pages = self._pools.tiers[Tier.DEVICE][group].alloc(len(rows))
            if pages is None:
                for taken, back in enumerate(device):
                    self._pools.tiers[Tier.DEVICE][taken].free(back)
                return None
            device.append(pages)
        sources = self._moves.sources(lease.host)
        parts = [
            Part(GroupId(g), rows, device[g], sources[g])
            for g, rows in enumerate(lease.host)
            if len(rows)
        ]
        ticket = self.flights.begin_load(parts)
        self._saves[ticket] = self._saves.get(ticket, 0) + saved_pages
        return self._leases.begin_load(lease, device, ticket)

    def load_live(self, pages: LivePageCopies) -> tuple[TicketId, ...]:
        """Begin to copy live pages back to the device, as ``load`` does others."""
        return (self.flights.begin_load(_live_parts(pages)),) if pages else ()

    # -- completion ----------------------------------------------------------------------------

    def apply(self, agreed: BallotResult) -> bool:
        """Turn the copies that have ended on every rank into state; whether any has. A backup that
        has failed on one of them has failed. Called by ``Progress`` alone."""
        loads, saved = agreed.ended(Work.LOAD), agreed.flags(Work.BACKUP)
        for done, flags in zip(
            self.flights.taken(Direction.BACKUP, len(saved)), saved, strict=True
        ):
            self._backed_up(done, ok=flags.item(0))
        for done in self.flights.taken(Direction.LOAD, loads):
            self._loaded(done)
        return bool(loads or saved)

    def _loaded(self, ended: tuple[Completion, Flight]) -> None:
        done, flight = ended
        self._pools.counters.add(load_pages=flight.pages, load_bytes=done.bytes_moved)
        self._saves.pop(flight.ticket, None)
        for part in flight.parts:
            if len(part.rows):
                self._moves.end_load(part.group, part.rows)

    def _backed_up(self, ended: tuple[Completion, Flight], *, ok: bool) -> None:
        done, flight = ended
        counters, pages = self._pools.counters, flight.pages
        self._failed_in_a_row = 0 if ok else self._failed_in_a_row + 1
        if ok:
            counters.add(backup_pages=pages, backup_bytes=done.bytes_moved)
        else:
            counters.add(backup_failed_pages=pages)
        for part in flight.parts:
            self._end_backup(flight.ticket, part, ok=ok)

    def _end_backup(self, ticket: TicketId, part: Part, *, ok: bool) -> None:
        if not len(part.rows):
            if not ok:
                self._failed.add(ticket)
            return
        if not ok:
            self._leases.lose(part.group, part.rows)
        self._pools.execute(self._moves.end_backup(part.group, part.rows, ok=ok))


def _live_parts(pages: LivePageCopies) -> list[Part]:
    none = np.empty(0, np.intp)
    return [Part(group, none, device, host) for group, device, host in pages]

"""Copies between device and host: what they hold in the tree, and what their end means.

Owns which backups a step begins, the device pages of a load, and the turning of completions, which
come when every rank has its own, into state. How copies are merged and named is ``flights``'. Must
not choose what to copy (``policy``), nor touch bytes (``transfer``).
"""

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from stratakv.agreement.agreement import Agreement, Figures
from stratakv.agreement.ballot import Ballot, Result, Work
from stratakv.core.ids import GroupId, NodeIds, PageIds, TicketId
from stratakv.policy.write import WritePolicy, safe_wanted, to_clean, weighs_uses, worth_backup
from stratakv.tiers.flights import Flight, Flights, Part
from stratakv.tiers.pools import Pools
from stratakv.transfer.copy_plan import Direction, Launched, nothing_launched
from stratakv.transfer.engine import Completion, LayerGate, TransferEngine
from stratakv.tree.effects import Backup
from stratakv.tree.lease import DeviceLease, LoadLease
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree

POLL_S: Final = 2e-4
LivePages: TypeAlias = Sequence[tuple[GroupId, PageIds, PageIds]]
"""Group, device pages and host pages of what belongs to a request, not to the tree."""


class TransferManager:
    def __init__(
        self,
        tree: PrefixTree,
        pools: Pools,
        transfer: TransferEngine,
        write: WritePolicy,
        agreement: Agreement,
        sleep: Callable[[float], None] = time.sleep,
        launched: Launched = nothing_launched,
    ) -> None:
        self._agreement = agreement
        self._sleep = sleep
        self._moves, self._backups, self._leases = tree.copies, tree.backups, tree.leases
        self._eviction, self._write_back = tree.eviction, tree.write_back
        self._pools = pools
        self._flights = Flights(tree.spec, transfer, launched)
        self._write = write
        self._weighs_uses = weighs_uses(write)
        self._safe_wanted = [safe_wanted(write, s.capacity) for s in pools.tiers[Tier.DEVICE]]
        self._wanted: list[Backup] = []  # not yet begun in the tree
        self._pending: list[Part] = []  # backups begun in the tree, not yet submitted
        self._saves: dict[TicketId, int] = {}  # pages by which a plan's loads carry matches on
        self._failed: set[TicketId] = set()  # of live pages; asked about once

    def gate(self, tickets: Sequence[TicketId]) -> LayerGate | None:
        """A gate over those of ``tickets`` that are still in flight; None when none is."""
        return self._flights.gate(tickets)

    def under_way(self, tickets: Sequence[TicketId]) -> bool:
        """Whether any of ``tickets`` has not ended."""
        return self._flights.under_way(tickets)

    def failed(self, tickets: Sequence[TicketId]) -> bool:
        """Whether a copy of live pages has failed; told once."""
        lost = self._failed.intersection(tickets)
        self._failed -= lost
        return bool(lost)

    @property
    def loading_pages(self) -> int:
        """What the loads under way save, in pages of a prefix: the load-back budget's unit."""
        return sum(self._saves.values())

    @property
    def busy(self) -> bool:
        return bool(self._wanted or self._pending or self._flights)

    def figures(self) -> Figures:
        """What is under way, for ranks to compare."""
        return {
            **self._flights.figures(),
            "backups wanted": len(self._wanted),
            "backups begun": len(self._pending),
            "saves failed": len(self._failed),
        }

    # -- backup --------------------------------------------------------------------------------

    def back_up(self, backups: Sequence[Backup]) -> None:
        """Remember what the tree wants saved. Its nodes stay what they are only until the next
        eviction: ``begin_backups`` comes first."""
        self._wanted += backups

    def used(self, lease: DeviceLease) -> None:
        """A request has leased ``lease``: some of it may be worth a backup now."""
        if self._weighs_uses:
            self.back_up(self._backups.kept(lease))

    def clean(self) -> None:
        """Back up the coldest pages, where too few of a group are free or saved."""
        for group, wanted in enumerate(self._safe_wanted):
            free = self._pools.tiers[Tier.DEVICE][group].available()
            if free >= wanted:
                continue
            id_ = GroupId(group)
            saved = self._write_back.saved(id_)
            if count := to_clean(wanted, free + saved):
                self._clean(id_, count)
        if self._pending:
            self.submit()

    def _clean(self, group: GroupId, count: int) -> None:
        """Back up ``count`` pages, those first that milestones alone need, as they leave first: but
        on the host they have only what no checkpoint needs, now or before."""
        host, write_back = self._pools.tiers[Tier.HOST][group], self._write_back
        # A copy that pushes another page's copy off the host saves nothing, and would be made and
        # lost for ever.
        room = host.available() + write_back.spare_room(group)
        spare = write_back.coldest_spare(group, min(count, room)) if room else []
        count -= sum(map(len, spare))
        room = host.available() + self._eviction.evictable(Tier.HOST, group)
        count = min(count, max(host.available(), room - write_back.saved_warm(group)))
        paths = write_back.coldest(group, count) if count else []
        if paths:
            self._pools.make_room(Tier.HOST, group, sum(map(len, paths)))
            self._begin_backups(group, paths)
        if spare:
            self._pools.make_spare_room(Tier.HOST, group, sum(map(len, spare)))
            self._begin_backups(group, spare)

    def _begin_backups(self, group: GroupId, paths: Sequence[NodeIds]) -> None:
        """Of those that have not gone with what made room for them."""
        for rows in paths:
            self._begin_backup(group, self._backups.unsaved(group, rows))

    def begin_backups(self) -> None:
        """Begin the backups that the write policy wants, as many pages of each, from the root
        down, as the host has room for. It makes room once per group: an eviction costs far more
        than a page of it."""
        if not self._wanted:
            return
        unsaved = self._backups.unsaved
        backups, self._wanted = self._wanted, []
        kept: dict[GroupId, list[NodeIds]] = {}
        spare: dict[GroupId, list[NodeIds]] = {}
        for backup in backups:
            worth = backup.nodes[worth_backup(self._write, self._backups.hits(backup.nodes))]
            rows = unsaved(backup.group, worth)
            needed = self._backups.needed(backup.group, rows)
            for by_group, some in ((kept, rows[needed]), (spare, rows[~needed])):
                if len(some):
                    by_group.setdefault(backup.group, []).append(some)
        # What milestones need comes last, and has only what no checkpoint needs.
        for by_group, make_room in (
            (kept, self._pools.make_room),
            (spare, self._pools.make_spare_room),
        ):
            for group in sorted(by_group):
                paths = by_group[group]
                wanted = paths[0] if len(paths) == 1 else np.unique(np.concatenate(paths))
                make_room(Tier.HOST, group, len(wanted))
            for group, paths in by_group.items():
                self._begin_backups(group, paths)  # one may be here twice

    def _begin_backup(self, group: GroupId, rows: NodeIds) -> None:
        space = self._pools.tiers[Tier.HOST][group]
        room = space.available()
        self._pools.counters.dropped_backup_pages += max(0, len(rows) - room)
        rows = rows[:room]
        if not len(rows):
            return
        host = space.alloc(len(rows))
        assert host is not None, "the host pool has lost pages"
        device = self._moves.begin_backup(group, rows, host)
        self._pending.append(Part(group, rows.copy(), device, host))

    def save(self, group: GroupId, rows: NodeIds) -> int:
        """Back up what of ``rows`` has no host copy, whatever the write policy: host pages for it
        are free. Returns how many pages that is."""
        rows = self._backups.unsaved(group, rows)
        self._begin_backup(group, rows)
        return len(rows)

    def submit(self) -> None:
        """Hand over all that was begun: the loads first, as one plan, then a step's backups."""
        self._flights.submit_loads()
        self.begin_backups()
        parts, self._pending = self._pending, []
        self._flights.back_up(parts)

    def save_live(self, pages: LivePages) -> tuple[TicketId, ...]:
        """Copy live pages, which no node stands for, to the host."""
        self.submit()  # completions come in order: what was begun before ends before
        return self._flights.back_up(_live_parts(pages))

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
        ticket = self._flights.begin_load(parts)
        self._saves[ticket] = self._saves.get(ticket, 0) + saved_pages
        return self._leases.begin_load(lease, device, ticket)

    def load_live(self, pages: LivePages) -> tuple[TicketId, ...]:
        """Begin to copy live pages back to the device, as ``load`` does others."""
        return (self._flights.begin_load(_live_parts(pages)),) if pages else ()

    def submit_loads(self) -> None:
        """Hand over all loads that were begun, as one plan."""
        self._flights.submit_loads()

    # -- completion ----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a copy has ended here that is not state yet."""
        return self._flights.ready

    def vote(self, ballot: Ballot) -> None:
        """Say which copies have ended here, and which backups with success."""
        self._flights.vote(ballot)

    def apply(self, agreed: Result) -> bool:
        """Turn the copies that have ended on every rank into state; whether any has. A backup that
        has failed on one of them has failed. Called from ``TieredCache.collect`` and, where an
        allocation cannot go on without it, from ``wait``."""
        loads, saved = agreed.ended(Work.LOAD), agreed.flags(Work.BACKUP)
        for done, flags in zip(
            self._flights.taken(Direction.BACKUP, len(saved)), saved, strict=True
        ):
            self._backed_up(done, ok=flags.item(0))
        for done in self._flights.taken(Direction.LOAD, loads):
            self._loaded(done)
        return bool(loads or saved)

    def _loaded(self, ended: tuple[Completion, Flight]) -> None:
        done, flight = ended
        self._pools.counters.load_pages += flight.pages
        self._pools.counters.load_bytes += done.bytes_moved
        self._saves.pop(flight.ticket, None)
        for part in flight.parts:
            if len(part.rows):
                self._moves.end_load(part.group, part.rows)

    def _backed_up(self, ended: tuple[Completion, Flight], *, ok: bool) -> None:
        done, flight = ended
        counters, pages = self._pools.counters, flight.pages
        if ok:
            counters.backup_pages += pages
            counters.backup_bytes += done.bytes_moved
        else:
            counters.backup_failed_pages += pages
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

    def wait(self) -> bool:
        """Block until one more copy has ended everywhere; False when none is under way. All ranks
        wait at the same point, so they vote as often as each other."""
        self.submit()
        while self._flights:
            ballot = self._agreement.ballot()
            self.vote(ballot)
            if self.apply(self._agreement.agree(ballot)):
                return True
            self._sleep(POLL_S)
        return False


def _live_parts(pages: LivePages) -> list[Part]:
    none = np.empty(0, np.intp)
    return [Part(group, none, device, host) for group, device, host in pages]

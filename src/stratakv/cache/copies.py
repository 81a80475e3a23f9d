"""Copies under way between device and host: what they hold in the tree, and how they end.

Owns the merging of a step's backups into one plan and the order of completions, which come when
every rank has its own. Must not choose what to copy (``policy``), nor touch bytes (``transfer``).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stratakv.agreement.agreement import Agreement, Figures
from stratakv.agreement.ballot import Ballot, Result, Work
from stratakv.cache.pools import Pools
from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, TicketId
from stratakv.policy.write import WritePolicy, safe_wanted, to_clean, weighs_uses, worth_backup
from stratakv.transfer.engine import Completion, LayerGate, TransferEngine
from stratakv.transfer.plan import CopyPlan, Direction, GroupCopy
from stratakv.tree.effects import Backup
from stratakv.tree.lease import Lease
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree

POLL_S: Final = 2e-4
PLAN_BYTES: Final = 64 * 2**20
"""The most that one backup plan moves; a retraction may have gigabytes to save."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Nodes of one path in one group, whose pages one copy moves; live pages have no nodes."""

    group: GroupId
    rows: NodeIds
    device: PageIds
    host: PageIds


class CopyDesk:
    def __init__(
        self,
        tree: PrefixTree,
        pools: Pools,
        transfer: TransferEngine,
        write: WritePolicy,
        agreement: Agreement,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._agreement = agreement
        self._sleep = sleep
        self._tree = tree
        self._pools = pools
        self._transfer = transfer
        self._write = write
        self._weighs_uses = weighs_uses(write)
        self._safe_wanted = [safe_wanted(write, s.capacity) for s in pools.tiers[Tier.DEVICE]]
        if any(self._safe_wanted):
            pools.evict_device = tree.cleaning.evict
        self._wanted: list[Backup] = []  # not yet begun in the tree
        self._pending: list[_Part] = []  # backups begun in the tree, not yet submitted
        self._in_flight: dict[Direction, deque[tuple[TicketId, list[_Part]]]] = {
            direction: deque() for direction in Direction
        }
        self._saves: dict[TicketId, int] = {}  # pages by which each load carries its match on
        self._failed: set[TicketId] = set()  # of live pages; asked about once
        self.on_lost: Callable[[GroupId, NodeIds], None] = _nobody_stands_there
        """Called with nodes whose backup has failed, before their host pages go."""

    def gate(self, tickets: Sequence[TicketId]) -> LayerGate | None:
        """A gate over those of ``tickets`` that are still in flight; None when none is."""
        live = {ticket for ticket, _ in self._in_flight[Direction.LOAD]}
        waiting = [ticket for ticket in tickets if ticket in live]
        return self._transfer.gate(waiting) if waiting else None

    def under_way(self, tickets: Sequence[TicketId]) -> bool:
        """Whether any of ``tickets`` is still in flight."""
        if not tickets:
            return False
        live = {ticket for queue in self._in_flight.values() for ticket, _ in queue}
        return not live.isdisjoint(tickets)

    def failed(self, tickets: Sequence[TicketId]) -> bool:
        """Whether a copy of live pages has failed; told once."""
        lost = self._failed.intersection(tickets)
        self._failed -= lost
        return bool(lost)

    @property
    def loading_pages(self) -> int:
        """What the loads in flight save, in pages of a prefix: the load-back budget's unit."""
        return sum(self._saves.values())

    @property
    def busy(self) -> bool:
        return bool(self._wanted or self._pending) or any(self._in_flight.values())

    def figures(self) -> Figures:
        """What is under way, for ranks to compare."""
        backups, loads = self._in_flight[Direction.BACKUP], self._in_flight[Direction.LOAD]
        return {
            "backups": len(backups),
            "newest backup": backups[-1][0] if backups else NONE,
            "loads": len(loads),
            "newest load": loads[-1][0] if loads else NONE,
            "backups wanted": len(self._wanted),
            "backups begun": len(self._pending),
            "saves failed": len(self._failed),
        }

    # -- backup --------------------------------------------------------------------------------

    def back_up(self, backups: Sequence[Backup]) -> None:
        """Remember what the tree wants saved. Its nodes stay what they are only until the next
        eviction: ``begin_backups`` comes first."""
        self._wanted += backups

    def used(self, lease: Lease) -> None:
        """A request has leased ``lease``: some of it may be worth a backup now."""
        if self._weighs_uses:
            self.back_up(self._tree.kept_unsaved(lease))

    def clean(self) -> None:
        """Back up the coldest pages, where too few of a group are free or saved."""
        for group, wanted in enumerate(self._safe_wanted):
            free = self._pools.tiers[Tier.DEVICE][group].available()
            if free >= wanted:
                continue
            id_ = GroupId(group)
            saved = self._tree.cleaning.saved(id_)
            # A copy that pushes another page's copy off the host saves nothing, and would be made
            # and lost for ever.
            host = self._pools.tiers[Tier.HOST][group].available()
            room = host + max(0, self._tree.evictable(Tier.HOST, id_) - saved)
            count = min(to_clean(wanted, free + saved), room)
            paths = self._tree.cleaning.coldest(id_, count) if count else []
            if paths:
                self._pools.make_room(Tier.HOST, id_, sum(map(len, paths)))
            for rows in paths:
                self._begin_backup(id_, self._tree.copies.unsaved(id_, rows))
        if self._pending:
            self.submit()

    def begin_backups(self) -> None:
        """Begin the backups that the write policy wants, as many pages of each, from the root
        down, as the host has room for. It makes room once per group: an eviction costs far more
        than a page of it."""
        if not self._wanted:
            return
        unsaved, hits = self._tree.copies.unsaved, self._tree.nodes.hits
        backups, self._wanted = self._wanted, []
        by_group: dict[GroupId, list[NodeIds]] = {}
        for backup in backups:
            worth = backup.nodes[worth_backup(self._write, hits[backup.nodes])]
            rows = unsaved(backup.group, worth)
            if len(rows):
                by_group.setdefault(backup.group, []).append(rows)
        for group in sorted(by_group):
            paths = by_group[group]
            wanted = paths[0] if len(paths) == 1 else np.unique(np.concatenate(paths))
            self._pools.make_room(Tier.HOST, group, len(wanted))
        for group, paths in by_group.items():
            for rows in paths:  # one may be here twice, or have gone with what made room
                self._begin_backup(group, unsaved(group, rows))

    def _begin_backup(self, group: GroupId, rows: NodeIds) -> None:
        space = self._pools.tiers[Tier.HOST][group]
        room = space.available()
        self._pools.counters.dropped_backup_pages += max(0, len(rows) - room)
        rows = rows[:room]
        if not len(rows):
            return
        host = space.alloc(len(rows))
        assert host is not None, "the host pool has lost pages"
        device = self._tree.copies.begin_backup(group, rows, host)
        self._pending.append(_Part(group, rows.copy(), device, host))

    def save(self, group: GroupId, rows: NodeIds) -> int:
        """Back up what of ``rows`` has no host copy, whatever the write policy: host pages for it
        are free. Returns how many pages that is."""
        rows = self._tree.copies.unsaved(group, rows)
        self._begin_backup(group, rows)
        return len(rows)

    def submit(self) -> None:
        """Hand a step's backups over as one plan; as several where it would keep the copier from
        everything else for long."""
        self.begin_backups()
        parts, self._pending = self._pending, []
        for plan in self._bounded(parts):
            self._send(Direction.BACKUP, plan)

    def carry(
        self, direction: Direction, pages: Sequence[tuple[GroupId, PageIds, PageIds]]
    ) -> tuple[TicketId, ...]:
        """Copy live pages (group, device pages, host pages), which no node stands for."""
        if direction is Direction.BACKUP:
            self.submit()  # completions come in order: what was begun before ends before
        none = np.empty(0, np.intp)
        parts = [_Part(group, none, device, host) for group, device, host in pages]
        return tuple(self._send(direction, plan) for plan in self._bounded(parts))

    def _bounded(self, parts: Sequence[_Part]) -> Iterator[list[_Part]]:
        """Cut into plans of at most ``PLAN_BYTES``, or of one page."""
        plan: list[_Part] = []
        room = PLAN_BYTES
        for part in parts:
            page_bytes = self._tree.spec.groups[part.group].page_bytes
            at = 0
            while at < len(part.device):
                fits = len(part.device) if not page_bytes else max(not plan, room // page_bytes)
                some = slice(at, at + fits)
                if fits:
                    plan.append(
                        _Part(part.group, part.rows[some], part.device[some], part.host[some])
                    )
                    at += fits
                    room -= len(plan[-1].device) * page_bytes
                if room <= 0 or not fits:
                    yield plan
                    plan, room = [], PLAN_BYTES
        if plan:
            yield plan

    def _send(self, direction: Direction, parts: list[_Part]) -> TicketId:
        groups = sorted({part.group for part in parts})
        copies = tuple(
            GroupCopy(
                group,
                np.concatenate([part.device for part in parts if part.group == group]),
                np.concatenate([part.host for part in parts if part.group == group]),
            )
            for group in groups
        )
        ticket = self._transfer.submit(CopyPlan(direction, copies))
        self._in_flight[direction].append((ticket, parts))
        return ticket

    # -- load ----------------------------------------------------------------------------------

    def load(self, lease: Lease, saved_pages: int) -> bool:
        """Start the load that ``lease`` plans, which takes a match ``saved_pages`` further; False
        without device pages, when something may have been evicted all the same."""
        assert lease.host is not None, "this lease plans no load"
        if any(self._pools.available(GroupId(g)) < len(rows) for g, rows in enumerate(lease.host)):
            return False
        device: list[PageIds] = []
        for group, rows in enumerate(lease.host):
            self._pools.make_room(Tier.DEVICE, GroupId(group), len(rows))
            pages = self._pools.tiers[Tier.DEVICE][group].alloc(len(rows))
            if pages is None:
                for taken, back in enumerate(device):
                    self._pools.tiers[Tier.DEVICE][taken].free(back)
                return False
            device.append(pages)
        parts = [
            _Part(GroupId(g), rows, device[g], self._tree.nodes.page[Tier.HOST][g][rows])
            for g, rows in enumerate(lease.host)
            if len(rows)
        ]
        ticket = self._send(Direction.LOAD, parts)
        self._tree.copies.begin_load(lease, device, ticket)
        self._saves[ticket] = saved_pages
        return True

    # -- completion ----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a copy has ended here that is not state yet."""
        return any(map(self._transfer.ready, Direction))

    def vote(self, ballot: Ballot) -> None:
        """Say which copies have ended here, and which backups with success."""
        for direction in Direction:
            count = self._transfer.ready(direction)
            if not count:
                continue
            match direction:
                case Direction.BACKUP:
                    ended = self._transfer.peek(direction, count)
                    ballot.cast(Work.BACKUP, (np.array([done.ok]) for done in ended))
                case Direction.LOAD:
                    ballot.count(Work.LOAD, count)

    def apply(self, agreed: Result) -> bool:
        """Turn the copies that have ended on every rank into state; whether any has. A backup that
        has failed on one of them has failed. Called from ``KVCache.tick`` and, where an allocation
        cannot go on without it, from ``wait``."""
        loads, saved = agreed.ended(Work.LOAD), agreed.flags(Work.BACKUP)
        for done, flags in zip(self._taken(Direction.BACKUP, len(saved)), saved, strict=True):
            self._backed_up(done, ok=flags.item(0))
        for done in self._taken(Direction.LOAD, loads):
            self._loaded(done)
        return bool(loads or saved)

    def _taken(self, direction: Direction, count: int) -> list[tuple[Completion, list[_Part]]]:
        if not count:
            return []
        found: list[tuple[Completion, list[_Part]]] = []
        for done in self._transfer.take(direction, count):
            ticket, parts = self._in_flight[direction].popleft()
            assert ticket == done.ticket, "completions out of order"
            found.append((done, parts))
        return found

    def _loaded(self, ended: tuple[Completion, list[_Part]]) -> None:
        done, parts = ended
        self._pools.counters.load_pages += sum(len(part.device) for part in parts)
        self._pools.counters.load_bytes += done.bytes_moved
        self._saves.pop(done.ticket, None)
        for part in parts:
            if len(part.rows):
                self._tree.copies.end_load(part.group, part.rows)

    def _backed_up(self, ended: tuple[Completion, list[_Part]], *, ok: bool) -> None:
        done, parts = ended
        counters, pages = self._pools.counters, sum(len(part.device) for part in parts)
        if ok:
            counters.backup_pages += pages
            counters.backup_bytes += done.bytes_moved
        else:
            counters.backup_failed_pages += pages
        for part in parts:
            self._end_backup(done.ticket, part, ok=ok)

    def _end_backup(self, ticket: TicketId, part: _Part, *, ok: bool) -> None:
        if not len(part.rows):
            if not ok:
                self._failed.add(ticket)
            return
        if not ok:
            self.on_lost(part.group, part.rows)
        self._pools.execute(self._tree.copies.end_backup(part.group, part.rows, ok=ok), -1)

    def wait(self) -> bool:
        """Block until one more copy has ended everywhere; False when none is under way. All ranks
        wait at the same point, so they vote as often as each other."""
        self.submit()
        while any(self._in_flight.values()):
            ballot = self._agreement.ballot()
            self.vote(ballot)
            if self.apply(self._agreement.agree(ballot)):
                return True
            self._sleep(POLL_S)
        return False


def _nobody_stands_there(group: GroupId, rows: NodeIds) -> None:
    del group, rows

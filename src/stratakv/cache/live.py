"""Live pages of running requests: the state that changes with every token.

Owns taking, giving and freeing them. A snapshot costs no copy: the request gives its live page to
the tree, reads from it in its next step and writes to a fresh one. Keeping a snapshot may fail,
where no page is left for that; going on may not. Must not decide when a snapshot is due.
"""

from collections.abc import Mapping

import numpy as np

from stratakv.core.ids import NONE, GroupId, PageIds, PageKey, RowIds
from stratakv.memory.block_table import BlockTable
from stratakv.tiers.tiered_cache import TieredCache
from stratakv.tree.lease import DeviceLease
from stratakv.tree.nodes import Tier

Given = Mapping[GroupId, int]
"""The page that a request gives to the tree, by group."""


class LivePages:
    def __init__(self, tiers: TieredCache, tables: BlockTable) -> None:
        self.groups = [group.id for group in tiers.spec.groups if group.stateful]
        self._tree, self._leases, self._pools = tiers.tree, tiers.tree.leases, tiers.pools
        self._wait = tiers.progress.wait
        self._slots = tables.slots
        self._seated = np.zeros(tables.rows, np.bool_)
        # The snapshot that a row's next step starts from, where it does not go on from its own.
        self._start = {group: np.full(tables.rows, NONE, np.int32) for group in self.groups}

    def open(self, row: int, lease: DeviceLease) -> None:
        """Seat a request that starts from the snapshots under ``lease``, if it holds any."""
        self._seated[row] = True
        for group in self.groups:
            pages = self._leases.pages(lease, group)
            self._start[group][row] = pages[-1] if len(pages) else NONE

    def restore(self, row: int, group: GroupId, page: int) -> None:
        """The row's own state lies in ``page``: a retracted request has come back."""
        self._slots.own(group)[row] = page

    def receive(self, row: int, group: GroupId, page: int) -> None:
        """The row's state will come into ``page``, which is its own, from another engine."""
        self._slots.own(group)[row] = page
        self._start[group][row] = NONE

    def current(self, row: int, group: GroupId) -> int:
        """The page that holds the request's state, its own or a snapshot; NONE where it is zero."""
        own = self.owned(row, group)
        return self._start[group].item(row) if own == NONE else own

    def extend(self, rows: RowIds) -> None:
        """Say where each row's state is read and written in its next step: a row without a page
        of its own and without a snapshot begins with a state of zero."""
        for group in self.groups:
            own, start = self._slots.own(group), self._start[group]
            self._slots.source(group)[rows] = np.where(start[rows] != NONE, start[rows], own[rows])
            start[rows] = NONE
            lacking = rows[own[rows] == NONE]
            if len(lacking):
                own[lacking] = self._pools.take(group, len(lacking), self._wait)

    def owned(self, row: int, group: GroupId) -> int:
        """The request's own page, NONE where its state is a snapshot or zero."""
        return self._slots.own(group).item(row)

    def give(
        self, row: int, lease: DeviceLease, key: PageKey, end: int, *, last: bool, spare: bool
    ) -> Given:
        """The pages to insert at ``key``, the last page before ``end``, whose state they hold;
        empty where the tree has it already, or where the pool has no page to go on with, unless
        the request ends here (``last``). One for a milestone (``spare``) costs no checkpoint."""
        starts = self._tree.starts(end)
        wanted = [g for g in self.groups if starts[g] < end and not self._tree.holds(key, g)]
        given = {group: self.owned(row, group) for group in wanted}
        if NONE in given.values():
            return {}
        for group in () if last else given:
            owed = int((self._seated & (self._slots.own(group) == NONE)).sum())
            if spare:  # its page may be under a copy when those who run keep their next checkpoints
                owed += int(self._seated.sum())
                room = self._pools.make_spare_room(Tier.DEVICE, group, owed + 1)
            else:  # what the lease stands on is let go of as it moves on to the new snapshot
                room = self._pools.available(group) + self._leases.sole(lease, group)
            if room <= owed:
                self._pools.counters.add(snapshots_skipped=1)
                return {}
        self._pools.counters.add(snapshots=len(given) > 0)
        return given

    def gave(self, row: int, given: Given) -> None:
        """The tree has adopted ``given``: the next step starts from there."""
        for group, page in given.items():
            self._slots.own(group)[row] = NONE
            self._start[group][row] = page

    def close(self, row: int) -> None:
        """Free what the request owns."""
        self._seated[row] = False
        for group in self.groups:
            page = self.owned(row, group)
            if page != NONE:
                self._pools.tiers[Tier.DEVICE][group].free(np.array([page], np.int32))
            self._start[group][row] = NONE
            self._slots.own(group)[row] = NONE

    def all_owned(self, group: GroupId) -> PageIds:
        """Pages that requests own, for ``check``."""
        own = self._slots.own(group)
        return own[own != NONE]

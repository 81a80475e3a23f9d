"""Slots and segments that are made free by taking pages.

Owns the rest after a disk gave nothing back for a segment, and counts what leaves. Which pages are
the oldest is for ``eviction_order``; must not decide when to evict.
"""

import numpy as np

from stratakv.core.clock import Clock
from stratakv.storage.breaker import Breaker
from stratakv.storage.file.catalog import Catalog, Placed
from stratakv.storage.file.counters import FileStoreCounters
from stratakv.storage.file.disk import free_bytes
from stratakv.storage.file.eviction_order import coldest_first, older_group, oldest_of
from stratakv.storage.file.index import RowIds
from stratakv.storage.file.ledger import Ledger
from stratakv.storage.file.quota import Quota
from stratakv.storage.file.slots import Slots


class Eviction:
    """``drains`` is off for a while after giving a segment back made no room."""

    def __init__(
        self, ledger: Ledger, catalog: Catalog, slots: Slots, quota: Quota, clock: Clock
    ) -> None:
        self.counters = FileStoreCounters()
        self.drains = Breaker(clock)
        self._ledger, self._catalog, self._index = ledger, catalog, catalog.index
        self._slots, self._quota = slots, quota

    def evict(self, group: int, need: int, before_ns: int) -> int:
        """Free slots of ``group``, ``need`` or more if there are so many; how many."""
        self._catalog.merge_uses(group)
        rows = oldest_of(self._index, group, need, before_ns)
        self._slots.clear(rows)
        self.counters.add(evicted=len(rows))
        return len(rows)

    def older_group(self, group: int, before_ns: int) -> int | None:
        """Another group whose oldest pages, a segment's worth, should leave before ``group``'s."""
        worth: dict[int, int] = {}
        for placed in self._catalog.placed.values():
            of = placed.segment.geometry.group
            worth[of] = max(worth.get(of, 0), placed.slots)
        return older_group(self._index, group, before_ns, worth)

    def drain_for(self, other: int, group: int) -> bool:
        """Whether a segment of ``other`` that is given back to the disk made room for one of
        ``group``. Where the disk is full all the same, no second one is tried for a while: a file
        system with snapshots gets nothing back, and the store would empty itself."""
        before = free_bytes(self._ledger.directory)
        self.drain(other)
        if self._quota.create(group):
            self.drains.worked()
            return True
        if not self._quota.growth.closed and free_bytes(self._ledger.directory) <= before:
            self.drains.failed()
        return False

    def drain(self, group: int) -> None:
        """Give one segment of ``group`` back to the disk: its oldest pages leave, in whichever
        segment they are, and what is younger moves into their places."""
        index = self._index
        self._catalog.merge_uses(group)
        number, gone = self._least_used(group)
        rows = gone.rows
        free = self._slots.free.get(group, [])
        elsewhere = [row for row in free if not rows.start <= row < rows.stop]
        short = int(index.present[rows].sum()) - len(elsewhere)
        if short > 0:
            leaving = coldest_first(index, group, short)
            self._slots.clear(leaving)
            self.counters.add(evicted=len(leaving))
        self._move(np.flatnonzero(index.present[rows]) + rows.start, gone)
        self._quota.delete(number)

    def _least_used(self, group: int) -> tuple[int, Placed]:
        """The segment that this process writes whose slots were used longest ago on average."""
        mine = {
            number: placed
            for number, placed in self._catalog.placed.items()
            if placed.segment.owned and placed.segment.geometry.group == group
        }
        used = self._index.used
        return min(mine.items(), key=lambda item: float(used[item[1].rows].mean()))

    def _move(self, rows: RowIds, gone: Placed) -> None:
        """Copy pages of ``gone`` to free slots elsewhere; one that is no good is left behind."""
        index, out = self._index, gone.rows
        if not len(rows):
            return
        group = gone.segment.geometry.group
        free = self._slots.free[group]
        free[:] = [row for row in free if not out.start <= row < out.stop]
        page = memoryview(bytearray(gone.segment.geometry.page_bytes))
        for row in rows.tolist():
            table, used = index.headers[[row]], index.used[row]
            if gone.segment.read_page(row - gone.base, page) == table["payload_hash"][0]:
                (to,) = self._slots.take(group, 1)
                target = self._catalog.placed[int(index.segment[to])]
                _, error = target.segment.write_pages([to - target.base], [page])
                if error is not None:
                    raise error
                self._slots.fill([to], table)
                index.used[to] = used
                self.counters.add(moved=1)

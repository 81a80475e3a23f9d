"""Free slots of the segments that this process writes, and how a slot becomes free or taken.

Owns the free lists and the order of writes to the disk: a header is zeroed before its slot is free,
and written after the payload. Must not choose what to evict (``room``).
"""

import numpy as np

from stratakv.storage.file.catalog import Catalog
from stratakv.storage.file.index import FOREIGN, Rows, servable
from stratakv.storage.header import HEADER, MAGIC, QUARANTINED, Headers, is_blank, seal


class Slots:
    """``free`` rows by group. A list is a stack: what was freed last is used first."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.free: dict[int, list[int]] = {}

    def take(self, group: int, count: int) -> list[int]:
        """Up to ``count`` free rows, neighbours in order where there are any."""
        free = self.free.get(group, [])
        at = max(0, len(free) - count)
        taken = free[at:]
        del free[at:]
        return taken[::-1]

    def give_back(self, group: int, rows: list[int]) -> None:
        """Rows that were taken and not filled."""
        self.free.setdefault(group, []).extend(rows[::-1])

    def fill(self, rows: list[int], table: Headers) -> None:
        """Publish objects whose payloads are written. OSError: none of them may be counted on; a
        slot whose header did not reach the disk is free again."""
        if rows != sorted(rows):
            order = np.argsort(rows)
            rows, table = np.array(rows)[order].tolist(), table[order]
        try:
            self._put_headers(rows, table)
        except OSError:
            self._reclaim(rows)
            raise
        self._catalog.index.put(np.array(rows), table)
        self._count_change(rows)

    def _put_headers(self, rows: list[int], table: Headers) -> None:
        done = 0
        for placed, run in self._catalog.runs(rows):
            part = table[done : done + len(run)]
            placed.segment.put_headers(run.start - placed.base, part)
            done += len(run)

    def _reclaim(self, rows: list[int]) -> None:
        """The others stay out of use until the store is opened again, which finds what they are."""
        for placed, run in self._catalog.runs(rows):
            blank = is_blank(placed.segment.headers(run.start - placed.base, len(run)))
            free = [row for row, unused in zip(run, blank.tolist(), strict=True) if unused]
            self.give_back(placed.segment.geometry.group, free)

    def clear(self, rows: Rows) -> None:
        """Make rows free; they must be of segments that this process writes."""
        if len(rows):
            for placed, run in self._catalog.runs(np.sort(rows).tolist()):
                blank = np.zeros(len(run), HEADER)
                placed.segment.put_headers(run.start - placed.base, blank)
                group = placed.segment.geometry.group
                self._catalog.index.clear(np.arange(run.start, run.stop))
                self.free.setdefault(group, []).extend(reversed(run))
            self._count_change(rows.tolist())

    def quarantine(self, row: int) -> None:
        """Never serve this object, nor use its slot, until ``fsck`` was there. One that a live peer
        wrote is only hidden here: the peer sees for itself."""
        index = self._catalog.index
        if index.writable[row] == FOREIGN:
            self.adopt(int(index.segment[row]))
        rows = np.array([row])
        table = index.headers[rows]
        table["magic"] = QUARANTINED
        if index.present[row]:
            index.drop(rows)
        if index.writable[row] != FOREIGN:
            index.headers[rows] = seal(table)
            placed = self._catalog.placed[int(index.segment[row])]
            placed.segment.put_headers(row - placed.base, table)
            self._count_change([row])

    def adopt(self, number: int) -> bool:
        """Become the writer of a segment that has none, and gather its free slots; a second copy of
        an object that is found elsewhere is freed."""
        catalog, index = self._catalog, self._catalog.index
        if not catalog.own(number):
            return False
        placed = catalog.placed[number]
        rows = np.arange(placed.base, placed.base + placed.slots)
        absent = rows[~index.present[rows]]
        held = index.headers[absent]
        group = placed.segment.geometry.group
        self.free.setdefault(group, []).extend(absent[is_blank(held)][::-1].tolist())
        self.clear(absent[(held["magic"] == MAGIC) & servable(held, placed.segment.geometry)])
        return True

    def forget(self, number: int) -> None:
        """The segment is gone, and its free slots with it."""
        placed = self._catalog.placed[number]
        group = placed.segment.geometry.group
        gone = range(placed.base, placed.base + placed.slots)
        self.free[group] = [row for row in self.free.get(group, []) if row not in gone]
        self._catalog.forget(number)

    def _count_change(self, rows: list[int]) -> None:
        for number in set(self._catalog.index.segment[rows].tolist()):
            placed = self._catalog.placed[number]
            placed.changes = placed.segment.count_change()

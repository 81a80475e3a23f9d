"""Free slots of the segments that this process writes, and how a slot becomes free or taken.

Owns the free lists and the order of writes to the disk: a header is zeroed before its slot is free,
and written after the payload. Must not choose what to evict (``eviction_order``).
"""

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

from stratakv.storage.file.catalog import Catalog
from stratakv.storage.file.index import RowIds, same_headers, servable
from stratakv.storage.file.segment import Segment
from stratakv.storage.header import HEADER, MAGIC, QUARANTINED, Headers, is_blank, is_sound, seal


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

    def clear(self, rows: RowIds) -> None:
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
        wrote is hidden here, and marked for the peer. Who may only read does not stay the writer of
        a segment for it: it would have its room, and never use it."""
        index = self._catalog.index
        rows = np.array([row])
        placed = self._catalog.placed[int(index.segment[row])]
        segment, slot, borrowed = placed.segment, row - placed.base, not placed.segment.owned
        table = index.headers[rows]
        if index.present[row]:
            index.drop(rows)
        if not segment.own():
            segment.notes.mark(slot)
            self._catalog.report_damage()
            return
        try:
            held = segment.headers(slot, 1)
            theirs = is_blank(held)[0] or (is_sound(held)[0] and not same_headers(held, table)[0])
            if not (
                borrowed and theirs
            ):  # else another had the segment since, and put a page there
                table["magic"] = QUARANTINED
                index.headers[rows] = seal(table)
                segment.put_headers(slot, table)
                placed.count_change(ours=not borrowed)
        finally:
            if borrowed:
                segment.disown()

    def apply_damage_reports(self, number: int) -> int:
        """Put in quarantine what others marked in a segment that this process writes, where it is
        damaged indeed; how many pages."""
        index, placed = self._catalog.index, self._catalog.placed[number]
        page, bad = memoryview(bytearray(placed.segment.geometry.page_bytes)), 0
        for slot in placed.segment.notes.marks():
            table = index.headers[[placed.base + slot]]
            if table["magic"][0] == MAGIC and not _is_whole(placed.segment, slot, table, page):
                self.quarantine(placed.base + slot)
                bad += 1
            placed.segment.notes.unmark(slot)
        self._catalog.marked.discard(number)
        return bad

    def adopt(self, number: int) -> bool:
        """Become the writer of a segment that has none, and gather its free slots; a second copy of
        an object that is found elsewhere is freed."""
        catalog, index = self._catalog, self._catalog.index
        if not catalog.own(number):
            return False
        self.apply_damage_reports(number)
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
        self._lose(number)
        self._catalog.forget(number)

    @contextmanager
    def borrowed(self, numbers: set[int]) -> Generator[None, None, None]:
        """Be the writer of these segments, of those that have none, for a while. Who only reads
        must not keep them: nobody would use their free slots."""
        placed = self._catalog.placed
        foreign = [number for number in numbers if not placed[number].segment.owned]
        adopted = [number for number in foreign if self.adopt(number)]
        try:
            yield
        finally:
            for number in adopted:
                if number in placed:  # else it was deleted meanwhile
                    self._lose(number)
                    self._catalog.disown(number)

    def _lose(self, number: int) -> None:
        placed = self._catalog.placed[number]
        group = placed.segment.geometry.group
        gone = range(placed.base, placed.base + placed.slots)
        self.free[group] = [row for row in self.free.get(group, []) if row not in gone]

    def _count_change(self, rows: list[int]) -> None:
        for number in set(self._catalog.index.segment[rows].tolist()):
            self._catalog.placed[number].count_change()


def _is_whole(segment: Segment, slot: int, table: Headers, page: memoryview) -> bool:
    try:
        same = segment.header_bytes(slot, 1) == table.tobytes()
        return same and segment.read_page(slot, page) == table["payload_hash"][0]
    except OSError:
        return False

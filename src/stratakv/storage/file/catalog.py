"""The segments of a directory as this process knows them, and the index over them.

Owns open segments and keeps the index in step with what other processes do: the ledger's generation
reports segments made and deleted, a segment's own count of changed headers. Must not evict.
"""

import logging
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from stratakv.core.clock import Clock
from stratakv.core.errors import StorageError
from stratakv.storage.backend import StoreFormat
from stratakv.storage.file.index import FOREIGN, Index
from stratakv.storage.file.ledger import Ledger
from stratakv.storage.file.segment import Geometry, Segment, Uses

_logger = logging.getLogger(__name__)

_TOLERANCE_S: Final = 86_400.0
"""How far ahead another process's clock may be."""


@dataclass(slots=True, eq=False)
class Placed:
    """A segment and its rows in the index: ``base`` and as many as it has slots.
    ``marked_deleted``: to be deleted by its writer, and not served by anybody."""

    segment: Segment
    base: int
    changes: int
    marked_deleted: bool = False

    @property
    def slots(self) -> int:
        return self.segment.geometry.slots

    def count_change(self, *, ours: bool = True) -> None:
        """Its headers have changed; where not all of the change is ``ours``, the index lags."""
        changes = self.segment.count_change()
        if ours:
            self.changes = changes

    @property
    def rows(self) -> slice:
        """Of the index."""
        return slice(self.base, self.base + self.slots)


class Catalog:
    """``placed`` by number, which is what ``Index.segment`` has. ``foreign_segments`` are names of
    segments of another format: of another model, or made with other settings. ``marked``: numbers
    of our segments in which others found damage."""

    def __init__(self, ledger: Ledger, form: StoreFormat, clock: Clock) -> None:
        self.index = Index()
        self.placed: dict[int, Placed] = {}
        self.foreign_segments: set[str] = set()
        self.marked: set[int] = set()
        self.damaged_headers = 0
        self._ledger = ledger
        self._form = form
        self._clock = clock
        self._generation = -1

    def is_current(self) -> bool:
        """Whether no segment was made, deleted or marked_deleted since the last ``refresh``."""
        return self._generation == self._ledger.generation()

    def runs(self, rows: list[int]) -> Generator[tuple[Placed, range], None, None]:
        """``rows`` as runs of ascending neighbours in one segment, in their order. Lists: a batch
        has some hundred rows, and NumPy is slow on few."""
        for placed, slots in self.by_segment(rows):
            first = 0
            for at in range(1, len(slots) + 1):
                if at == len(slots) or slots[at] != slots[at - 1] + 1:
                    yield placed, range(placed.base + slots[first], placed.base + slots[at - 1] + 1)
                    first = at

    def by_segment(self, rows: list[int]) -> Generator[tuple[Placed, list[int]], None, None]:
        """Slots of ``rows``, in their order, as long as they are in one segment."""
        numbers: list[int] = self.index.segment[rows].tolist()
        first = 0
        while first < len(rows):
            number, end = numbers[first], first + 1
            if numbers.count(number) == len(rows):  # as a rule
                end = len(rows)
            while end < len(rows) and numbers[end] == number:
                end += 1
            placed = self.placed[number]
            yield placed, [row - placed.base for row in rows[first:end]]
            first = end

    def refresh(self) -> None:
        """See what other processes did. OSError or StorageError as the disk has it."""
        generation = self._ledger.generation()
        if generation != self._generation:
            self._list()
            self._generation = generation
        for number, placed in list(self.placed.items()):
            if placed.marked_deleted or placed.segment.owned:
                continue
            if placed.segment.changes() != placed.changes:
                try:
                    self._load(placed)
                except StorageError as error:  # it lost its tables: what it held are misses
                    _logger.warning("%s is not read any more: %s", placed.segment.name, error)
                    self.foreign_segments.add(placed.segment.name)
                    self.forget(number)

    def report_damage(self) -> None:
        """Have every process look at the directory when next it is called."""
        with self._ledger.locked():
            self._ledger.changed()

    def add(self, segment: Segment) -> int:
        """Take in a segment that was just made; returns its number."""
        number = max(self.placed, default=-1) + 1
        base = self.index.attach(number, segment.geometry.slots)
        self.placed[number] = Placed(segment, base, -1)
        self._load(self.placed[number])
        return number

    def own(self, number: int) -> bool:
        """Become the writer of a segment, and know exactly what it holds. False where somebody is,
        or it is to be deleted."""
        placed = self.placed[number]
        if not placed.segment.own():
            return False
        self._load(placed)
        if placed.marked_deleted:
            return False
        self.index.writable[placed.rows] = placed.segment.geometry.group
        return True

    def disown(self, number: int) -> None:
        """Let another become the writer."""
        placed = self.placed[number]
        self.index.writable[placed.rows] = FOREIGN
        placed.segment.disown()

    def forget(self, number: int) -> None:
        placed = self.placed.pop(number)
        self.marked.discard(number)
        self.index.detach(placed.base, placed.slots)
        placed.segment.close()

    def hide(self, placed: Placed) -> None:
        """Find nothing in a segment any more; its rows stay."""
        rows = np.arange(placed.base, placed.base + placed.slots)
        self.index.drop(rows[self.index.present[rows]])

    def owned(self) -> list[Placed]:
        """The segments that this process writes."""
        return [placed for placed in self.placed.values() if placed.segment.owned]

    def merge_uses(self, group: int) -> None:
        """Take in when other processes used the pages of our segments of ``group``."""
        for placed in self.owned():
            if placed.segment.geometry.group == group:
                self._merge(placed)

    def put_uses(self, number: int) -> None:
        """Write out when the pages of a segment were used, by us and by others."""
        placed = self.placed[number]
        self._merge(placed)
        placed.segment.put_uses(self.index.used[placed.rows])

    def close(self) -> None:
        for number in list(self.placed):
            self.forget(number)

    def _merge(self, placed: Placed) -> None:
        rows = np.arange(placed.base, placed.base + placed.slots)
        self.index.merge_uses(rows, self._uses(placed))

    def _uses(self, placed: Placed) -> Uses:
        """A use in the far future is a flipped bit: the table of uses has no checksum."""
        uses = placed.segment.uses()
        limit = np.uint64((self._clock.now_s() + _TOLERANCE_S) * 1e9)
        return np.where(uses > limit, np.uint64(0), uses)

    def _load(self, placed: Placed) -> None:
        segment = placed.segment
        placed.marked_deleted = segment.notes.is_marked_deleted()
        if placed.marked_deleted:
            self.hide(placed)
            return
        # First the count, then the headers: a change in between is seen again next time.
        placed.changes = segment.changes()
        bad = self.index.load(placed.base, segment.headers(), self._uses(placed), segment.geometry)
        if bad:
            self.damaged_headers += len(bad)
            _logger.warning("%s: %d damaged headers are not served", segment.name, len(bad))
            if not segment.owned:
                self._report(segment, bad)
        if not segment.owned:
            self.index.writable[placed.rows] = FOREIGN

    def _report(self, segment: Segment, slots: list[int]) -> None:
        """Notify the writer, which has these headers in memory and takes their pages for stored.
        Also of one that was being written: the writer looks for itself."""
        try:
            for slot in slots:
                segment.notes.mark(slot)
            self.report_damage()
        except OSError as error:  # on a disk that is full or read-only they stay what they are
            _logger.warning("%s: damage is not reported: %s", segment.name, error)

    def _list(self) -> None:
        names = set(self._ledger.names())
        known = {placed.segment.name: number for number, placed in self.placed.items()}
        for name in known.keys() - names:
            # Our own is only gone if an operator deleted it: its bytes are there until we close it.
            if not self.placed[known[name]].segment.owned:
                self.forget(known[name])
        for number, placed in self.placed.items():
            placed.marked_deleted = placed.segment.notes.is_marked_deleted()
            if placed.marked_deleted:
                self.hide(placed)
            elif placed.segment.owned and placed.segment.notes.marks():
                self.marked.add(number)
        self.foreign_segments &= names
        for name in sorted(names - known.keys() - self.foreign_segments):
            with suppress(FileNotFoundError):  # a peer deleted it since
                segment = Segment.open(self._ledger.directory / name)
                if segment is None:  # damaged, or a peer is making it: look again next time
                    continue
                if self._is_ours(segment.geometry):
                    self.add(segment)
                else:
                    self.foreign_segments.add(name)
                    segment.close()

    def _is_ours(self, geometry: Geometry) -> bool:
        sizes = self._form.page_bytes
        return (
            geometry.spec_digest == self._form.spec_digest
            and geometry.group < len(sizes)
            and geometry.page_bytes == sizes[geometry.group]
        )

"""Where the next page goes: a free slot, a new segment, or the place of what was used longest ago.

Owns every choice of what leaves: the oldest use first, over all groups, so that the deepest page of
a chain goes before its parent. Must not read keys, nor write payloads but to move them.
"""

import logging
from dataclasses import dataclass
from typing import Final

import numpy as np

from stratakv.core.clock import Clock
from stratakv.storage.backend import StoreFormat
from stratakv.storage.breaker import Breaker
from stratakv.storage.file.catalog import Catalog
from stratakv.storage.file.counters import Counters
from stratakv.storage.file.disk import free_bytes
from stratakv.storage.file.index import FOREIGN, Rows
from stratakv.storage.file.ledger import Ledger, Want
from stratakv.storage.file.recognise import is_unmade
from stratakv.storage.file.segment import Geometry, Segment
from stratakv.storage.file.slots import Slots
from stratakv.storage.header import HEADER

_logger = logging.getLogger(__name__)

SEGMENTS_PER_QUOTA: Final = 64
LARGEST_SEGMENT_BYTES: Final = 1 << 30
MOST_SEGMENTS: Final = 1024
"""Of a very large quota: each one is an open file."""
EVICT_SHARE: Final = 256
"""At least one page in so many is evicted at a time: finding the oldest looks at all of them."""
LOOK_S: Final = 1.0
"""How often to look for segments that lost their writer."""
_DRAINS: Final = 4
WANT_NS: Final = 30 * 10**9
"""How long a writer without room is remembered."""
AHEAD_NS: Final = 10**9
"""A want from further ahead is none: its clock was wrong, or its bytes are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """What a store may take and how it keeps it. ``ttl_s`` counts from the last use. ``slots``: of
    a new segment; None: what suits the quota."""

    quota_bytes: int
    ttl_s: float | None = None
    power_safe: bool = False
    slots: int | None = None


class SpaceManager:
    """Finds slots for one store."""

    def __init__(
        self, ledger: Ledger, catalog: Catalog, form: StoreFormat, limits: StoreLimits, clock: Clock
    ) -> None:
        self.slots = Slots(catalog)
        self.growth = Breaker(clock)
        self.counters = Counters()
        self._ledger, self._catalog, self._index = ledger, catalog, catalog.index
        self._form, self._keeping, self._clock = form, limits, clock
        self.drains = Breaker(clock)
        self._full_at: dict[int, int] = {}
        self._wanting = False
        self._yielded_to: Want | None = None
        self._asked_s = clock.now_s()
        self._alive: set[int] = set()

    def take(self, group: int, count: int, before_ns: int) -> list[int]:
        """Rows of up to ``count`` slots; nothing used at ``before_ns`` or later is evicted. None is
        taken where it ends with OSError."""
        rows = self.slots.take(group, count)
        try:
            while len(rows) < count and self._make(group, count - len(rows), before_ns):
                rows += self.slots.take(group, count - len(rows))
        except OSError:
            self.slots.give_back(group, rows)
            raise
        if len(rows) < count and self._may_fit(group):
            self._say(Want(self._ledger.writer, self._held_bytes(), self._now_ns()))
        elif self._wanting:
            self._say(None)
        return rows

    def _say(self, want: Want | None) -> None:
        try:
            self._ledger.set_want(want)
        except OSError as error:  # the disk is full to the last byte
            _logger.warning("others cannot be asked for room: %s", error)
        else:
            self._wanting = want is not None

    def close(self) -> None:
        """Want nothing any more."""
        want = self._ledger.want() if self._wanting else None
        if want is not None and want.writer == self._ledger.writer:
            self._say(None)

    def expire(self) -> None:
        """Free what nobody used for the time to live, in segments without a writer too, and give
        empty segments back to the disk."""
        if self._keeping.ttl_s is None:
            return
        limit = max(0, self._now_ns() - int(self._keeping.ttl_s * 1e9))
        index = self._index
        old = index.present & (index.used < limit)
        with self.slots.borrowed(set(index.segment[old].tolist())):
            self._expire_ours(limit)

    def _expire_ours(self, limit: int) -> None:
        index = self._index
        old = index.present & (index.used < limit)
        for group in np.unique(index.writable[old]).tolist():
            if group != FOREIGN:
                self._catalog.merge_uses(group)
        rows = np.flatnonzero(index.present & (index.used < limit) & (index.writable != FOREIGN))
        self.counters.expired += len(rows)
        self.slots.clear(rows)
        for number in np.unique(index.segment[rows]).tolist():
            if not index.headers["magic"][self._rows_of(number)].any():
                self._delete(number)

    def mark_all_deleted(self) -> int:
        """Forget every page of this format; how many there were. What a live process writes is
        hidden at once from all, and deleted by that process as soon as it is called again."""
        count = len(self._index)
        for placed in self._catalog.placed.values():
            placed.segment.mark_deleted()
            self._catalog.hide(placed)  # where another user's may not be written, it is all we can
        with self._ledger.locked():
            self._delete_unmade()
            self._ledger.changed()
        self._catalog.refresh()
        self.reap()
        return count

    def _delete_unmade(self) -> None:
        """Delete what a writer that was killed has half made; with the lock held nobody is making
        one now."""
        for name in self._ledger.names():
            if is_unmade(self._ledger.directory / name):
                self._ledger.delete_idle(name)

    def reap(self) -> None:
        """Delete marked_deleted segments that this process writes, or nobody."""
        placed = self._catalog.placed
        for number in [number for number in placed if placed[number].marked_deleted]:
            if placed[number].segment.own():
                # Who has the file open still reads it: what is there must say that it is gone.
                blank = np.zeros(placed[number].slots, HEADER)
                placed[number].segment.put_headers(0, blank)
                self._delete(number)

    def apply_damage_reports(self) -> None:
        """Look where others found damage in what this process writes: a page that is no good is
        absent, so that it is stored again."""
        for number in list(self._catalog.marked):
            self.counters.quarantined += self.slots.apply_damage_reports(number)

    def yield_to_others(self) -> None:
        """Give a segment to a writer that wants room and has clearly less than this one."""
        want = self._ledger.want()
        if want != self._yielded_to and self._owes():
            # One for each time that it says so: who is dead says nothing more.
            self._yielded_to = want
            placed = self._catalog.placed.values()
            groups = [p.segment.geometry.group for p in placed if p.segment.owned]
            self._drain(max(set(groups), key=groups.count))

    def _owes(self) -> bool:
        """Whether another writer has no room because this one has so much."""
        want = self._ledger.want()
        if want is None or want.writer == self._ledger.writer:
            return False
        placed = self._catalog.placed.values()
        sizes = [p.segment.geometry.physical_bytes for p in placed if p.segment.owned]
        fresh = 0 <= self._now_ns() + AHEAD_NS - want.since_ns <= AHEAD_NS + WANT_NS
        return fresh and bool(sizes) and sum(sizes) >= want.held_bytes + 2 * max(sizes)

    def _now_ns(self) -> int:
        return int(self._clock.now_s() * 1e9)

    def _make(self, group: int, need: int, before_ns: int) -> bool:
        """Cause at least one free slot of ``group``; False where there is no way."""
        if self._adopt_with_room(group) or self._create(group):
            return True
        self._adopt_oldest(need, before_ns)
        # Segments differ in size: one may not make room enough for another.
        for _ in range(_DRAINS):
            if not self._may_fit(group) or self._owes() or not self.drains.closed:
                break
            other = self._older_group(group, before_ns)
            if other is None:
                break
            if self._drain_for(other, group):
                return True
        return self._evict(group, need, before_ns) > 0

    def _drain_for(self, other: int, group: int) -> bool:
        """Whether a segment of ``other`` that is given back to the disk made room for one of
        ``group``. Where the disk is full all the same, no second one is tried for a while: a file
        system with snapshots gets nothing back, and the store would empty itself."""
        before = free_bytes(self._ledger.directory)
        self._drain(other)
        if self._try_create(group):
            self.drains.worked()
            return True
        if not self.growth.closed and free_bytes(self._ledger.directory) <= before:
            self.drains.failed()
        return False

    def _may_fit(self, group: int) -> bool:
        return self._geometry(group).physical_bytes <= self._keeping.quota_bytes

    def _orphans(self) -> list[int]:
        """Segments that may have lost their writer; one that was alive is asked again later."""
        now_s = self._clock.now_s()
        if not 0 <= now_s - self._asked_s < LOOK_S:
            self._asked_s = now_s
            self._alive.clear()
        placed = self._catalog.placed
        known = self._alive | {number for number in placed if placed[number].marked_deleted}
        return [n for n in placed if not placed[n].segment.owned and n not in known]

    def _adopt(self, number: int) -> bool:
        adopted = self.slots.adopt(number)
        if not adopted:
            self._alive.add(number)
        return adopted

    def _adopt_with_room(self, group: int) -> bool:
        for number in self._orphans():
            of_group = self._catalog.placed[number].segment.geometry.group == group
            full = bool(self._index.headers["magic"][self._rows_of(number)].all())
            if of_group and not full and self._adopt(number):
                return True
        return False

    def _adopt_oldest(self, need: int, before_ns: int) -> None:
        """Take over segments that lost their writer, the one with the oldest page first, as long
        as what they hold is older than what this process would evict: others may need the rest."""
        index = self._index
        oldest: dict[int, int] = {}
        for number in self._orphans():
            rows = self._rows_of(number)
            used = index.used[rows][index.present[rows]]
            oldest[number] = int(used.min()) if len(used) else 0
        for number in sorted(oldest, key=oldest.__getitem__):
            own = index.used[index.present & (index.writable != FOREIGN)]
            own = own[own < before_ns]
            if len(own) >= need and np.partition(own, need - 1)[need - 1] < oldest[number]:
                return
            self._adopt(number)

    def _create(self, group: int) -> bool:
        if self._full_at.get(group) == self._ledger.generation() or not self.growth.closed:
            return False
        return self._may_fit(group) and not self._owes() and self._try_create(group)

    def _geometry(self, group: int) -> Geometry:
        """Of a new segment."""
        page_bytes, quota = self._form.page_bytes[group], self._keeping.quota_bytes
        size = max(min(quota // SEGMENTS_PER_QUOTA, LARGEST_SEGMENT_BYTES), quota // MOST_SEGMENTS)
        return Geometry(
            spec_digest=self._form.spec_digest,
            group=group,
            slots=self._keeping.slots or Geometry.slots_in(size, page_bytes),
            page_bytes=page_bytes,
        )

    def _try_create(self, group: int) -> bool:
        geometry = self._geometry(group)
        with self._ledger.locked():
            if not self._ledger.fits(geometry.physical_bytes):
                self._delete_unmade()
            while not self._ledger.fits(geometry.physical_bytes):
                if not self._delete_stranger():
                    self._full_at[group] = self._ledger.generation()
                    return False
            try:
                segment = Segment.create(self._ledger.new_path(), geometry)
            except OSError as error:
                _logger.warning("no new segment: %s", error)
                self.growth.failed()
                return False
            self._ledger.changed()
        self.growth.worked()
        if self._keeping.power_safe:
            segment.sync()
            self._ledger.sync()
        return self.slots.adopt(self._catalog.add(segment))

    def _delete_stranger(self) -> bool:
        """Delete the segment of another format, of those that no process writes, that was used
        longest ago; lock held. Who is not running gives way to who is, however young its pages."""
        for name in self._ledger.oldest_first(self._catalog.foreign_segments):
            self._catalog.foreign_segments.discard(name)
            if self._ledger.delete_idle(name):
                return True
        return False

    def _older_group(self, group: int, before_ns: int) -> int | None:
        """Another group whose oldest segment's worth of pages is older than all of ``group``."""
        index = self._index
        candidates = index.present & (index.writable != FOREIGN) & (index.used < before_ns)
        own = index.used[candidates & (index.writable == group)]
        oldest = int(own.min()) if len(own) else before_ns
        found = None
        for other in np.unique(index.writable[candidates]).tolist():
            used = index.used[candidates & (index.writable == other)]
            worth = min(len(used), self._largest_slots(other)) - 1
            newest = int(np.partition(used, worth)[worth]) if other != group else oldest
            if newest < oldest:
                found, oldest = other, newest
        return found

    def _evict(self, group: int, need: int, before_ns: int) -> int:
        self._catalog.merge_uses(group)
        rows = self._oldest(group, need, before_ns)
        self.slots.clear(rows)
        self.counters.evicted += len(rows)
        return len(rows)

    def _oldest(self, group: int, need: int, before_ns: int | None) -> Rows:
        index = self._index
        ours = index.present & (index.writable == group)
        if before_ns is not None:
            ours &= index.used < before_ns
        rows = np.flatnonzero(ours)
        count = min(len(rows), max(need, len(rows) // EVICT_SHARE))
        return rows[np.argpartition(index.used[rows], count - 1)[:count]] if count else rows

    def _drain(self, group: int) -> None:
        """Give one segment of ``group`` back to the disk: its oldest pages leave, in whichever
        segment they are, and what is younger moves into their places."""
        index = self._index
        self._catalog.merge_uses(group)
        numbers = [
            n for n, p in self._catalog.placed.items()
            if p.segment.owned and p.segment.geometry.group == group
        ]  # fmt: skip
        number = min(numbers, key=lambda n: float(index.used[self._rows_of(n)].mean()))
        gone = self._rows_of(number)
        elsewhere = [r for r in self.slots.free.get(group, []) if not gone.start <= r < gone.stop]
        short = int(index.present[gone].sum()) - len(elsewhere)
        if short > 0:
            leaving = np.flatnonzero(index.present & (index.writable == group))
            leaving = leaving[np.argsort(index.used[leaving])[:short]]
            self.slots.clear(leaving)
            self.counters.evicted += len(leaving)
        self._move(np.flatnonzero(index.present[gone]) + gone.start, gone)
        self._delete(number)

    def _move(self, rows: Rows, gone: slice) -> None:
        """Copy pages to free slots outside ``gone``; one that is no good is left behind."""
        index = self._index
        if not len(rows):
            return
        group = int(index.writable[rows[0]])
        free = self.slots.free[group]
        free[:] = [row for row in free if not gone.start <= row < gone.stop]
        page = memoryview(bytearray(self._form.page_bytes[group]))
        for row in rows.tolist():
            table, used = index.headers[[row]], index.used[row]
            placed = self._catalog.placed[int(index.segment[row])]
            if placed.segment.read_page(row - placed.base, page) == table["payload_hash"][0]:
                (to,) = self.slots.take(group, 1)
                target = self._catalog.placed[int(index.segment[to])]
                for _ in target.segment.write_pages(to - target.base, [page]):
                    pass
                self.slots.fill([to], table)
                index.used[to] = used
                self.counters.moved += 1

    def _delete(self, number: int) -> None:
        name = self._catalog.placed[number].segment.name
        with self._ledger.locked():
            self._ledger.delete(name)
        self.slots.forget(number)

    def _rows_of(self, number: int) -> slice:
        placed = self._catalog.placed[number]
        return slice(placed.base, placed.base + placed.slots)

    def _largest_slots(self, group: int) -> int:
        placed = self._catalog.placed.values()
        return max(p.slots for p in placed if p.segment.geometry.group == group)

    def _held_bytes(self) -> int:
        placed = self._catalog.placed.values()
        return sum(p.segment.geometry.physical_bytes for p in placed if p.segment.owned)

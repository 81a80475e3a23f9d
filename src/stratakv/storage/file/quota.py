"""Segment files within the quota: made while there is room for them, deleted when they are empty.

Owns the size of a new segment, what is known of a quota that is full, and the rest after the disk
took no file. Must not choose which pages leave.
"""

import logging
from collections.abc import Iterator
from typing import Final

from stratakv.core.clock import Clock
from stratakv.storage.backend import StoreFormat
from stratakv.storage.breaker import Breaker
from stratakv.storage.file.catalog import Catalog
from stratakv.storage.file.ledger import Ledger
from stratakv.storage.file.limits import LOOK_S, StoreLimits
from stratakv.storage.file.recognise import is_unmade
from stratakv.storage.file.segment import Geometry, Segment
from stratakv.storage.file.slots import Slots

_logger = logging.getLogger(__name__)

SEGMENTS_PER_QUOTA: Final = 64
LARGEST_SEGMENT_BYTES: Final = 1 << 30
MOST_SEGMENTS: Final = 1024
"""Of a very large quota: each one is an open file."""


class Quota:
    """``growth`` is off for a while after the disk took no new file."""

    def __init__(
        self,
        ledger: Ledger,
        catalog: Catalog,
        slots: Slots,
        form: StoreFormat,
        limits: StoreLimits,
        clock: Clock,
    ) -> None:
        self.growth = Breaker(clock)
        self._ledger, self._catalog, self._slots = ledger, catalog, slots
        self._form, self._limits, self._clock = form, limits, clock
        # By group: generation at which a segment did not fit, and when.
        self._full_at: dict[int, tuple[int, float]] = {}

    def may_fit(self, group: int) -> bool:
        """Whether a segment of ``group`` fits an empty directory."""
        return self._geometry(group).physical_bytes <= self._limits.quota_bytes

    def seems_full(self, group: int) -> bool:
        """Whether trying ``create`` now is known to be of no use. What another format had may have
        lost its writer since, which no generation shows."""
        generation, at_s = self._full_at.get(group, (None, 0.0))
        lately = 0 <= self._clock.now_s() - at_s < LOOK_S
        known_full = lately and generation == self._ledger.generation()
        return known_full or not self.growth.closed or not self.may_fit(group)

    def create(self, group: int) -> bool:
        """Make a segment of ``group`` that this process writes; False where it has no room."""
        geometry = self._geometry(group)
        with self._ledger.locked():
            if not self._ledger.fits(geometry.physical_bytes):
                self.delete_unmade()
            foreign = self._foreign()
            while not self._ledger.fits(geometry.physical_bytes):
                if not self._delete_idle(foreign):
                    self._full_at[group] = self._ledger.generation(), self._clock.now_s()
                    return False
            try:
                segment = Segment.create(self._ledger.new_path(), geometry)
            except OSError as error:
                _logger.warning("no new segment: %s", error)
                self.growth.failed()
                return False
            self._ledger.changed()
        self.growth.worked()
        number = self._catalog.add(segment)
        if self._limits.power_safe:
            try:
                segment.sync()
                self._ledger.sync()
            except OSError:  # nothing that is stored in it would survive
                self.delete(number)
                raise
        return self._slots.adopt(number)

    def _geometry(self, group: int) -> Geometry:
        """Of a new segment."""
        page_bytes, quota = self._form.page_bytes[group], self._limits.quota_bytes
        size = max(min(quota // SEGMENTS_PER_QUOTA, LARGEST_SEGMENT_BYTES), quota // MOST_SEGMENTS)
        return Geometry(
            spec_digest=self._form.spec_digest,
            group=group,
            slots=self._limits.slots or Geometry.slots_in(size, page_bytes),
            page_bytes=page_bytes,
        )

    def _foreign(self) -> Iterator[str]:
        """Segments of another format, the one that was used longest ago first. Who is not running
        gives way to who is, however young its pages."""
        yield from self._ledger.oldest_first(self._catalog.foreign_segments)

    def _delete_idle(self, names: Iterator[str]) -> bool:
        """Delete the next one of ``names`` that no process writes; lock held."""
        for name in names:
            if self._ledger.delete_idle(name):
                self._catalog.foreign_segments.discard(name)
                return True
        return False

    def delete_unmade(self) -> None:
        """Delete what a writer that was killed has half made; with the lock held nobody is making
        one now."""
        for name in self._ledger.names():
            if is_unmade(self._ledger.directory / name):
                self._ledger.delete_idle(name)

    def delete(self, number: int) -> None:
        """Give a segment that this process writes back to the disk; nothing in it is counted on."""
        name = self._catalog.placed[number].segment.name
        with self._ledger.locked():
            self._ledger.delete(name)
        self._slots.forget(number)

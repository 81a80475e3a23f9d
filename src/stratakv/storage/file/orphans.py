"""Segments that lost their writer, and who takes them over.

Owns which of the others' segments were found alive a moment ago, so that they are not asked at
every turn. Must not evict.
"""

from stratakv.core.clock import Clock
from stratakv.storage.file.catalog import Catalog
from stratakv.storage.file.eviction_order import evicts_younger
from stratakv.storage.file.limits import LOOK_S
from stratakv.storage.file.slots import Slots


class Orphans:
    def __init__(self, catalog: Catalog, slots: Slots, clock: Clock) -> None:
        self._catalog, self._index, self._slots, self._clock = catalog, catalog.index, slots, clock
        self._asked_s = clock.now_s()
        self._alive: set[int] = set()

    def adopt_with_room(self, group: int) -> bool:
        """Take over a segment of ``group`` that has free slots, if there is one."""
        for number in self._candidates():
            placed = self._catalog.placed[number]
            of_group = placed.segment.geometry.group == group
            full = bool(self._index.headers["magic"][placed.rows].all())
            if of_group and not full and self._adopt(number):
                return True
        return False

    def adopt_oldest(self, need: int, before_ns: int) -> None:
        """Take over the others, the one with the oldest page first, as long as what they hold is
        older than what this process would evict: others may need the rest."""
        index = self._index
        oldest: dict[int, int] = {}
        for number in self._candidates():
            rows = self._catalog.placed[number].rows
            used = index.used[rows][index.present[rows]]
            oldest[number] = int(used.min()) if len(used) else 0
        for number in sorted(oldest, key=oldest.__getitem__):
            if not evicts_younger(index, need, before_ns, oldest[number]):
                return
            self._adopt(number)

    def _candidates(self) -> list[int]:
        """Segments that may have lost their writer; one that was alive is asked again later."""
        now_s = self._clock.now_s()
        if not 0 <= now_s - self._asked_s < LOOK_S:
            self._asked_s = now_s
            self._alive.clear()
        return [
            number
            for number, placed in self._catalog.placed.items()
            if not (placed.segment.owned or placed.marked_deleted or number in self._alive)
        ]

    def _adopt(self, number: int) -> bool:
        adopted = self._slots.adopt(number)
        if not adopted:
            self._alive.add(number)
        return adopted

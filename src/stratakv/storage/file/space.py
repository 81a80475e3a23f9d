"""Where the next page goes: a free slot, a new segment, or the place of what was used longest ago.

Owns the order in which these are tried. Each of them is a part with a state of its own:

    slots        free slots of the segments that this process writes
    quota        segment files, made and deleted
    orphans      segments that lost their writer
    peers        who asks whom for room
    eviction     slots and segments that are made free by taking pages
    maintenance  what is done from time to time: expire, forget, mend, give

Must not read keys, nor write payloads.
"""

from typing import Final

from stratakv.core.clock import Clock
from stratakv.storage.backend import StoreFormat
from stratakv.storage.file.catalog import Catalog
from stratakv.storage.file.eviction import Eviction
from stratakv.storage.file.ledger import Ledger
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.maintenance import Maintenance
from stratakv.storage.file.orphans import Orphans
from stratakv.storage.file.peers import StoreWriters
from stratakv.storage.file.quota import Quota
from stratakv.storage.file.slots import Slots

_DRAINS: Final = 4


class SpaceManager:
    """Finds slots for one store."""

    def __init__(
        self, ledger: Ledger, catalog: Catalog, form: StoreFormat, limits: StoreLimits, clock: Clock
    ) -> None:
        self.slots = slots = Slots(catalog)
        self._quota = quota = Quota(ledger, catalog, slots, form, limits, clock)
        self._orphans = Orphans(catalog, slots, clock)
        self._peers = peers = StoreWriters(ledger, catalog, clock)
        self._eviction = eviction = Eviction(ledger, catalog, slots, quota, clock)
        self.maintenance = Maintenance(ledger, catalog, slots, quota, peers, eviction)
        self.counters = eviction.counters

    @property
    def growing(self) -> bool:
        """False while the disk takes no new segments."""
        return self._quota.growth.closed

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
        if len(rows) < count and self._quota.may_fit(group):
            self._peers.ask()
        else:
            self._peers.withdraw()
        return rows

    def _make(self, group: int, need: int, before_ns: int) -> bool:
        """Cause at least one free slot of ``group``; False where there is no way."""
        if self._orphans.adopt_with_room(group) or self._create(group):
            return True
        self._orphans.adopt_oldest(need, before_ns)
        # Segments differ in size: one may not make room enough for another.
        for _ in range(_DRAINS):
            if not self._quota.may_fit(group) or self._peers.owes():
                break
            other = self._eviction.older_group(group, before_ns)
            if other is None or not self._eviction.drains.closed:
                break
            if self._eviction.drain_for(other, group):
                return True
        return self._eviction.evict(group, need, before_ns) > 0

    def _create(self, group: int) -> bool:
        may = not self._quota.seems_full(group) and not self._peers.owes()
        return may and self._quota.create(group)

    def close(self) -> None:
        """Want nothing any more."""
        self._peers.close()

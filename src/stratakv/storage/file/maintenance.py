"""What a store does from time to time, and when others ask for it: expire, forget, mend, give.

Owns what is done with pages and segments for which nobody needs the room. Must not place pages, nor
choose between those that are in use.
"""

import numpy as np

from stratakv.storage.file.catalog import Catalog
from stratakv.storage.file.eviction import Eviction
from stratakv.storage.file.eviction_order import unused_since
from stratakv.storage.file.index import FOREIGN
from stratakv.storage.file.ledger import Ledger
from stratakv.storage.file.peers import StoreWriters
from stratakv.storage.file.quota import Quota
from stratakv.storage.file.slots import Slots
from stratakv.storage.header import HEADER


class Maintenance:
    def __init__(
        self,
        ledger: Ledger,
        catalog: Catalog,
        slots: Slots,
        quota: Quota,
        peers: StoreWriters,
        eviction: Eviction,
    ) -> None:
        self._ledger, self._catalog, self._index = ledger, catalog, catalog.index
        self._slots, self._quota, self._peers = slots, quota, peers
        self._eviction, self._counters = eviction, eviction.counters

    def expire(self, limit_ns: int) -> None:
        """Free what nobody used at ``limit_ns`` or later, in segments without a writer too, and
        give empty segments back to the disk."""
        old = unused_since(self._index, limit_ns)
        with self._slots.borrowed(set(self._index.segment[old].tolist())):
            self._expire_ours(limit_ns)

    def _expire_ours(self, limit_ns: int) -> None:
        index = self._index
        for group in np.unique(index.writable[unused_since(index, limit_ns)]).tolist():
            if group != FOREIGN:
                self._catalog.merge_uses(group)
        rows = np.flatnonzero(unused_since(index, limit_ns) & (index.writable != FOREIGN))
        self._counters.add(expired=len(rows))
        self._slots.clear(rows)
        for number in np.unique(index.segment[rows]).tolist():
            if not index.headers["magic"][self._catalog.placed[number].rows].any():
                self._quota.delete(number)

    def mark_all_deleted(self) -> int:
        """Forget every page of this format; how many there were. What a live process writes is
        hidden at once from all, and deleted by that process as soon as it is called again."""
        count = len(self._index)
        for placed in self._catalog.placed.values():
            placed.segment.notes.mark_deleted()
            self._catalog.hide(placed)  # where another user's may not be written, it is all we can
        with self._ledger.locked():
            self._quota.delete_unmade()
            self._ledger.changed()
        self._catalog.refresh()
        self.reap()
        return count

    def reap(self) -> None:
        """Delete segments marked deleted that this process writes, or nobody."""
        marked = [number for number, p in self._catalog.placed.items() if p.marked_deleted]
        for number in marked:
            placed = self._catalog.placed[number]
            if placed.segment.own():
                # Who has the file open still reads it: what is there must say that it is gone.
                placed.segment.put_headers(0, np.zeros(placed.slots, HEADER))
                self._quota.delete(number)

    def apply_damage_reports(self) -> None:
        """Look where others found damage in what this process writes: a page that is no good is
        absent, so that it is stored again."""
        for number in list(self._catalog.marked):
            self._counters.add(quarantined=self._slots.apply_damage_reports(number))

    def yield_to_others(self) -> None:
        """Give a segment to a writer that wants room and has clearly less than this one."""
        if self._peers.take_debt():
            groups = [placed.segment.geometry.group for placed in self._catalog.owned()]
            self._eviction.drain(max(set(groups), key=groups.count))

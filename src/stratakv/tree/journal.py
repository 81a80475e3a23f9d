"""Says to an observer, in keys, what happens to the rows of a tree.

Owns the key of every row: rows are used again, so observers are notified at once. A tree that
nobody follows has none, and does nothing for it. Must not know tokens, tenants or wires.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from stratakv.core.ids import GroupId, NodeIds, PageKey
from stratakv.tree.observer import CacheObserver, Medium
from stratakv.tree.residency import ResidencyEvent

STORED: Final[dict[ResidencyEvent, Medium]] = {
    ResidencyEvent.INSERTED: Medium.DEVICE,
    ResidencyEvent.LOAD_DONE: Medium.DEVICE,
    ResidencyEvent.FETCHED: Medium.HOST,
    ResidencyEvent.SAVED: Medium.HOST,
    ResidencyEvent.BACKUP_DONE: Medium.HOST,
}
REMOVED: Final[dict[ResidencyEvent, Medium]] = {
    ResidencyEvent.DEVICE_EVICTED: Medium.DEVICE,
    ResidencyEvent.HOST_EVICTED: Medium.HOST,
}
"""The events that neither names begin a copy, or end one that never was readable."""


class Journal:
    """Of one tree, from its beginning; ``rows``: how many it can have."""

    def __init__(self, rows: int, observer: CacheObserver) -> None:
        self._observer = observer
        self._key = np.empty(rows, object)

    def of_group(self, group: GroupId) -> Callable[[NodeIds, ResidencyEvent], None]:
        """Observes every move in a group's residency."""
        return partial(self._moved, group)

    def grown(self, rows: NodeIds, keys: Sequence[PageKey]) -> None:
        """New rows, before any of their pages has a place."""
        self._key[rows] = np.array(keys, object)

    def gone(self, keys: Sequence[PageKey]) -> None:
        self._observer.gone(keys)

    def _moved(self, group: GroupId, rows: NodeIds, event: ResidencyEvent) -> None:
        to, off = STORED.get(event), REMOVED.get(event)
        if not len(rows) or (to is None and off is None):
            return
        keys: list[PageKey] = self._key[rows].tolist()
        if to is not None:
            self._observer.stored(to, group, keys)
        if off is not None:
            self._observer.removed(off, group, keys)

"""What has come to a tier of a tree and what has left it, in order, for whoever follows the cache.

Owns the notes between two ``take``s. A tree without a journal does nothing for it. Keys are noted
at once, because rows are used again; a page counts as being on a tier from the moment it can be
read there until it leaves. Must not know tokens, tenants or wires.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final

import numpy as np

from stratakv.core.ids import GroupId, NodeIds, PageKey
from stratakv.spec.groups import ANCHOR
from stratakv.tree.nodes import NodeTable
from stratakv.tree.residency import Event


class Change(Enum):
    DEVICE_STORED = auto()
    DEVICE_REMOVED = auto()
    HOST_STORED = auto()
    HOST_REMOVED = auto()


CHANGES: Final[dict[Event, Change]] = {
    Event.INSERTED: Change.DEVICE_STORED,
    Event.LOAD_DONE: Change.DEVICE_STORED,
    Event.DEVICE_EVICTED: Change.DEVICE_REMOVED,
    Event.FETCHED: Change.HOST_STORED,
    Event.BACKUP_DONE: Change.HOST_STORED,
    Event.HOST_EVICTED: Change.HOST_REMOVED,
}
"""The events not named here begin a copy, or end one that never was readable."""
_REMOVED: Final = frozenset({Change.DEVICE_REMOVED, Change.HOST_REMOVED})


@dataclass(frozen=True, slots=True, eq=False)
class Note:
    """Pages of one group, in the order in which they changed."""

    change: Change
    group: GroupId
    keys: list[PageKey]


class Journal:
    """Belongs to one tree, from its beginning."""

    def __init__(self) -> None:
        self._notes: list[Note] = []
        self._left: list[PageKey] = []  # keys of which an anchor page has left a tier
        self._key = np.empty(0, object)  # of every row
        self._index: dict[PageKey, int] = {}

    def bind(self, nodes: NodeTable) -> None:
        assert not len(nodes), "a journal begins with its tree"
        self._key = np.empty(len(nodes.parent), object)
        self._index = nodes.index
        nodes.grown = self._grown
        for group, column in enumerate(nodes.residency):
            column.moved = partial(self._moved, GroupId(group))

    def _grown(self, rows: NodeIds, keys: Sequence[PageKey]) -> None:
        self._key[rows] = np.array(keys, object)

    def _moved(self, group: GroupId, rows: NodeIds, event: Event) -> None:
        change = CHANGES.get(event)
        if change is None or not len(rows):
            return
        keys: list[PageKey] = self._key[rows].tolist()
        self._notes.append(Note(change, group, keys))
        if group == ANCHOR and change in _REMOVED:
            self._left += keys

    def take(self) -> list[Note]:
        """What has happened since the last ``take``, oldest first."""
        notes, self._notes = self._notes, []
        return notes

    def gone(self) -> Iterable[PageKey]:
        """Pages that have left the tree altogether since this was last asked."""
        left, self._left = self._left, []
        return set(left).difference(self._index) if left else ()

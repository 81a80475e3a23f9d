"""What the tree remembers of pages that have left every tier: that they were there, and when they
left.

Owns their keys, the newest ones, as many as the tree can have nodes. It answers why a prompt found
no page; nothing may be decided by it. Must not touch the tree.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.clock import NowS, never
from stratakv.core.ids import PageKey

_Half: TypeAlias = dict[PageKey, int]
"""What is remembered of a page is one number, so that no lookup of a path is a loop: microseconds,
doubled, and one where the host had the last copy."""

_MICROSECONDS: Final = 1_000_000
_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class Departures:
    """Of pages in a row, how each of them left. ``from_host``: the last copy was there; ``at_s``:
    NaN where that is not remembered."""

    from_host: npt.NDArray[np.bool_]
    at_s: npt.NDArray[np.float64]


NO_DEPARTURES: Final = Departures(np.zeros(0, np.bool_), np.zeros(0))


class Gone:
    """Keys in two halves: a full newer half becomes the older one, which is dropped. Children leave
    before their parents, so what is remembered of a path behind its last page ends where the first
    unknown page is, but for what a dropped half has held."""

    def __init__(self, capacity: int, now_s: NowS = never) -> None:
        self._half = max(1, capacity)
        self._now_s = now_s
        self._new: _Half = {}
        self._old: _Half = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def add(self, keys: Iterable[PageKey], *, from_host: bool) -> None:
        """``from_host``: the last copy was there."""
        self._new.update(dict.fromkeys(keys, self._entry(from_host=from_host)))
        self._turn()

    def add_one(self, key: PageKey, *, from_host: bool) -> None:
        self._new[key] = self._entry(from_host=from_host)
        self._turn()

    def _entry(self, *, from_host: bool) -> int:
        return round(self._now_s() * _MICROSECONDS) << 1 | from_host

    def _turn(self) -> None:
        if len(self._new) >= self._half:
            self._old, self._new = self._new, {}

    def of(self, keys: Sequence[PageKey], start: int, end: int) -> npt.NDArray[np.bool_]:
        """Of pages [start, ...), as far as they are remembered and at most to ``end``, whether the
        host had the last copy."""
        return _from_host(self._entries(keys, start, end))

    def departures(self, keys: Sequence[PageKey], start: int, end: int) -> Departures:
        """Of the same pages, how each of them left."""
        entries = self._entries(keys, start, end)
        at_s = (entries >> 1) / _MICROSECONDS
        at_s[entries == _UNKNOWN] = np.nan
        return Departures(_from_host(entries), at_s)

    def _entries(self, keys: Sequence[PageKey], start: int, end: int) -> npt.NDArray[np.int64]:
        new, old = self._new, self._old
        low, high = start, min(end, len(keys))
        while low < high:  # the first page that is not remembered
            middle = (low + high) >> 1
            if keys[middle] in new or keys[middle] in old:
                low = middle + 1
            else:
                high = middle
        path = keys[start:low]
        before = map(old.get, path, repeat(_UNKNOWN)) if old else repeat(_UNKNOWN)
        return np.fromiter(map(new.get, path, before), np.int64, len(path))

    def clear(self) -> None:
        self._new, self._old = {}, {}


def _from_host(entries: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    return (entries != _UNKNOWN) & (entries & 1 == 1)

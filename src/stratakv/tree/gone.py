"""What the tree remembers of pages that have left every tier: that they were there, and when they
left.

Owns their keys, the newest ones, as many as the tree can have nodes. It answers why a prompt found
no page; nothing may be decided by it. Must not touch the tree.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.clock import NowS, never
from stratakv.core.ids import PageKey


class Departure(NamedTuple):
    """``from_host``: the last copy was there."""

    from_host: bool
    at_s: float


_Half: TypeAlias = dict[PageKey, Departure]


class Gone:
    """Keys in two halves: a full newer half becomes the older one, which is dropped. Children leave
    before their parents, so what is remembered of a path behind its last page has no holes."""

    def __init__(self, capacity: int, now_s: NowS = never) -> None:
        self._half = max(1, capacity)
        self._now_s = now_s
        self._new: _Half = {}
        self._old: _Half = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def add(self, keys: Iterable[PageKey], *, from_host: bool) -> None:
        """``from_host``: the last copy was there."""
        self._new.update(dict.fromkeys(keys, Departure(from_host, self._now_s())))
        self._turn()

    def add_one(self, key: PageKey, *, from_host: bool) -> None:
        self._new[key] = Departure(from_host, self._now_s())
        self._turn()

    def _turn(self) -> None:
        if len(self._new) >= self._half:
            self._old, self._new = self._new, {}

    def of(self, keys: Sequence[PageKey], start: int, end: int) -> npt.NDArray[np.bool_]:
        """Of pages [start, ...), as far as they are remembered and at most to ``end``, whether the
        host had the last copy."""
        found = [self._of(key) for key in self._path(keys, start, end)]
        hosts = (one is not None and one.from_host for one in found)
        return np.fromiter(hosts, np.bool_, len(found))

    def departures(self, keys: Sequence[PageKey], start: int, end: int) -> list[Departure]:
        """Of the same pages, how each of them left, but for those that were dropped meanwhile."""
        found = (self._of(key) for key in self._path(keys, start, end))
        return [one for one in found if one is not None]

    def _of(self, key: PageKey) -> Departure | None:
        return self._new.get(key) or self._old.get(key)

    def _path(self, keys: Sequence[PageKey], start: int, end: int) -> Iterable[PageKey]:
        new, old = self._new, self._old
        low, high = start, min(end, len(keys))
        while low < high:  # the first page that is not remembered
            middle = (low + high) >> 1
            if keys[middle] in new or keys[middle] in old:
                low = middle + 1
            else:
                high = middle
        return islice(keys, start, low)

    def clear(self) -> None:
        self._new, self._old = {}, {}

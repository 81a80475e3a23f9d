"""The least that a page index could do: what ``bench tree`` measures the tree beside.

One group, one tier, no residency, no leases, no runs; nodes are rows of arrays found through a
dict. Owns the sketch; must not know the tree.
"""

import hashlib
import heapq
from collections.abc import Sequence

import numpy as np

from stratakv.core.ids import NONE, PageIds, PageKey, RowIds, TokenIds


def sketch_keys(tokens: TokenIds, page_tokens: int) -> list[PageKey]:
    """A bare SHA-256 chain over the full pages of ``tokens``."""
    data, size, sha = tokens.tobytes(), 4 * page_tokens, hashlib.sha256
    previous, out = bytes(32), list[PageKey]()
    append = out.append
    for at in range(0, len(data) - size + 1, size):
        previous = sha(previous + data[at : at + size]).digest()
        append(PageKey(previous))
    return out


class SketchIndex:
    def __init__(self, capacity: int) -> None:
        self._rows: dict[PageKey, int] = {}
        self._keys: list[PageKey | None] = [None] * capacity
        self._parent = np.full(capacity + 1, NONE, np.int32)
        self._kids = np.zeros(capacity + 1, np.int32)
        self._used = np.zeros(capacity + 1, np.int64)
        self._pins = np.zeros(capacity + 1, np.int32)
        self._page = np.full(capacity + 1, NONE, np.int32)
        self._free = list(range(capacity - 1, -1, -1))
        self._heap: list[tuple[int, int]] = []
        self._clock = 0

    def match(self, keys: Sequence[PageKey]) -> tuple[RowIds, PageIds]:
        """Rows and pages of the longest known prefix."""
        rows = self._rows
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) >> 1
            if keys[middle - 1] in rows:
                low = middle
            else:
                high = middle - 1
        found = np.fromiter(map(rows.__getitem__, keys[:low]), np.int32, low)
        if low:
            self._clock += 1
            self._used[found[-1]] = self._clock
        return found, self._page[found]

    def pin(self, rows: RowIds, by: int) -> None:
        self._pins[rows] += by

    def insert(self, keys: Sequence[PageKey], have: int, tip: int, pages: PageIds) -> None:
        count = len(keys) - have
        fresh = self._free[-count:]
        del self._free[-count:]
        fresh.reverse()
        rows = np.array(fresh, np.int32)
        self._rows.update(zip(keys[have:], fresh, strict=True))
        self._parent[rows[0]] = tip
        self._parent[rows[1:]] = rows[:-1]
        self._kids[rows[:-1]] = 1
        self._kids[rows[-1]] = 0
        self._kids[tip] += 1
        self._clock += 1
        self._used[rows] = self._clock
        self._page[rows] = pages
        for row, key in zip(fresh, keys[have:], strict=True):
            self._keys[row] = key
        heapq.heappush(self._heap, (self._clock, fresh[-1]))

    def evict(self, count: int) -> list[int]:
        """Pages of the coldest leaves, leaf first."""
        out: list[int] = []
        while len(out) < count and self._heap:
            stamp, row = heapq.heappop(self._heap)
            if self._keys[row] is None or self._kids[row]:
                continue
            used = self._used.item(row)
            if used != stamp:
                heapq.heappush(self._heap, (used, row))
                continue
            self._climb(row, stamp, count, out)
        return out

    def _climb(self, row: int, stamp: int, count: int, out: list[int]) -> None:
        while True:
            out.append(self._page.item(row))
            key = self._keys[row]
            assert key is not None
            del self._rows[key]
            self._keys[row] = None
            self._free.append(row)
            parent = self._parent.item(row)
            if parent < 0:
                return
            self._kids[parent] -= 1
            if self._kids.item(parent):
                return
            if len(out) >= count or self._used.item(parent) > stamp:
                heapq.heappush(self._heap, (self._used.item(parent), parent))
                return
            row = parent

"""Page ids of one group on one tier. Owns which are free; must not hold bytes or know what a page
is worth (``tree``).
"""

import numpy as np

from stratakv.core.ids import PageIds


class PageAllocator:
    """Hands out ids ``0 .. capacity - 1`` in batches, most recently freed first.

    Both verbs are a few vectorised operations over the ids they name, whatever the capacity.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 0, f"capacity {capacity}"
        self.capacity = capacity
        # _stack[:_depth] are the free ids, top last; what lies above _depth is stale.
        self._stack = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._depth = capacity
        self._used = np.zeros(capacity, np.bool_)
        # Scratch; zeros, so that of two allocators that have done the same all is the same.
        self._position = np.zeros(capacity, np.intp)

    def available(self) -> int:
        return self._depth

    def next(self, n: int) -> PageIds:
        """The ``n`` free ids that are given out next, or as many as there are, the very next one
        last; int32, a view that the next verb changes."""
        return self._stack[max(0, self._depth - n) : self._depth]

    @property
    def stack(self) -> PageIds:
        """Every place of the stack of free ids, int32 [capacity], what is stale included; for those
        who compare two allocators."""
        return self._stack

    def alloc(self, n: int) -> PageIds | None:
        """``n`` distinct ids as an int32 [n] array that the caller owns, or None if fewer are free.

        All or nothing: None leaves the allocator as it was.
        """
        assert n >= 0, f"alloc({n})"
        if n > self._depth:
            return None
        self._depth -= n
        pages = self._stack[self._depth : self._depth + n][::-1].copy()
        self._used[pages.astype(np.intp)] = True
        return pages

    def free(self, pages: PageIds) -> None:
        """Take ids back; int32 [n] in any order.

        Raises AssertionError, before anything changes, for an id out of range, one that is free
        already, or one named twice.
        """
        n = len(pages)
        at = pages.astype(np.intp)  # NumPy indexes by its own integer 3 to 5 times faster
        # Unsigned, an id below zero is a huge one.
        inside = at.view(np.uintp) < self.capacity
        assert np.count_nonzero(inside) == n, f"{pages[~inside][:8]} outside [0, {self.capacity})"
        used = self._used[at]
        assert np.count_nonzero(used) == n, f"double free of pages {pages[~used][:8]}"
        # A page named twice keeps only the last position written: O(n), where a sort is not.
        order = np.arange(n)
        self._position[at] = order
        twice = self._position[at] != order
        assert not np.count_nonzero(twice), f"pages {pages[twice][:8]} named twice in one free"
        self._used[at] = False
        self._stack[self._depth : self._depth + n] = pages
        self._depth += n

"""Which pages leave first: those used longest ago, over all groups, so that the deepest page of a
chain goes before its parent.

Owns nothing: functions of an index. ``before_ns``: nothing used then or later may leave. Must not
do I/O.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.storage.file.index import FOREIGN, Index, RowIds

EVICT_SHARE: Final = 256
"""At least one page in so many is evicted at a time: finding the oldest looks at all of them."""


def oldest_of(index: Index, group: int, need: int, before_ns: int) -> RowIds:
    """The pages of ``group`` to evict for ``need`` free slots, in segments this process writes."""
    rows = np.flatnonzero(_writable(index, before_ns) & (index.writable == group))
    count = min(len(rows), max(need, len(rows) // EVICT_SHARE))
    return rows[np.argpartition(index.used[rows], count - 1)[:count]] if count else rows


def coldest_first(index: Index, group: int, count: int) -> RowIds:
    """``count`` pages of ``group``, in segments that this process writes."""
    rows = np.flatnonzero(index.present & (index.writable == group))
    return rows[np.argsort(index.used[rows])[:count]]


def evicts_younger(index: Index, need: int, before_ns: int, than_ns: int) -> bool:
    """Whether this process would have to evict what was used at ``than_ns`` or later, to have
    ``need`` free slots of any group."""
    used = index.used[_writable(index, before_ns)]
    return len(used) < need or bool(np.partition(used, need - 1)[need - 1] >= than_ns)


def older_group(index: Index, group: int, before_ns: int, worth: dict[int, int]) -> int | None:
    """Another group whose oldest segment's worth of pages is older than all of ``group``, the one
    with the oldest; ``worth``: slots of the largest segment, by group."""
    candidates = _writable(index, before_ns)
    own = index.used[candidates & (index.writable == group)]
    oldest = int(own.min()) if len(own) else before_ns
    found = None
    for other in np.unique(index.writable[candidates]).tolist():
        if other == group:
            continue
        used = index.used[candidates & (index.writable == other)]
        last = min(len(used), worth[other]) - 1
        newest = int(np.partition(used, last)[last])
        if newest < oldest:
            found, oldest = other, newest
    return found


def unused_since(index: Index, limit_ns: int) -> npt.NDArray[np.bool_]:
    """Pages of any writer that nobody has used at ``limit_ns`` or later, bool by row."""
    return index.present & (index.used < limit_ns)


def _writable(index: Index, before_ns: int) -> npt.NDArray[np.bool_]:
    return index.present & (index.writable != FOREIGN) & (index.used < before_ns)

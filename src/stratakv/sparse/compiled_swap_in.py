"""The planner in C. Owns the way into ``_swap_in``; must not decide anything itself. Importing this
module fails with ImportError where the package was installed without a compiler; ``swap_in`` then
does the same work, ten times more slowly.
"""

import numpy as np

from stratakv.core.ids import RowIds
from stratakv.sparse import _swap_in
from stratakv.sparse.swap_in import Marks, Order, SwapIn, Table


def compiled_swap_in(
    rows: RowIds, selection: Table, resident: Table, lru: Order, marks: Marks
) -> SwapIn:
    """As ``plan_swap_in``; ValueError for what lies outside the tables."""
    selection = np.ascontiguousarray(selection, np.int32)
    positions = np.empty_like(selection)
    missed = np.empty(selection.shape, np.bool_)
    after = np.empty((len(rows), lru.shape[1]), np.int16)
    _swap_in.plan_into(rows, selection, resident, lru, marks[0], positions, missed, after)
    return SwapIn(selection, positions, missed, after)

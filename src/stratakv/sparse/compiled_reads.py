"""Reads in C. Owns the way into ``_reads``; must not decide anything itself. Importing this module
fails with ImportError where the package was installed without a compiler; ``reads`` then does the
same work, some times more slowly.
"""

import numpy as np

from stratakv.core.ids import RowIds
from stratakv.sparse import _reads
from stratakv.sparse.reads import EntryIds, EntryPlaces, Hidden, RowCopies
from stratakv.sparse.swap_in import Order, SwapIn, Table


class CompiledReads:
    """As ``NumpyReads``."""

    def away(
        self, places: EntryPlaces, rows: RowIds, entries: EntryIds, hidden: Hidden | None
    ) -> Table:
        selection = np.empty(entries.shape, np.int32)
        if hidden is not None:
            hidden = np.ascontiguousarray(hidden)
        entries = np.ascontiguousarray(entries)
        _reads.away_into(places.host, rows, entries, hidden, selection, places.page_rows)
        return selection

    def place(self, places: EntryPlaces, rows: RowIds, swap: SwapIn, found: EntryIds) -> RowCopies:
        copies = np.empty((4, swap.selection.size), np.int32)
        count = _reads.place_into(
            *(places.host, places.buffer, rows),
            *(swap.selection, swap.positions, swap.missed, found, copies, places.page_rows),
        )
        return RowCopies(*copies[:, :count])

    def keep(self, rows: RowIds, swap: SwapIn, resident: Table, lru: Order) -> None:
        _reads.keep_into(rows, swap.selection, swap.positions, swap.missed, swap.lru, resident, lru)

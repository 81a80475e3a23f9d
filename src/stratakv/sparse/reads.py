"""Where the entries that a step selects are read: which of them lie on the host, and, once a buffer
has a plan for those (``swap_in``), the device row behind each, what to copy there first, and what
its tables say then.

Owns this arithmetic, which is pure but for the arrays that it is given to fill. Must not hold a
table between steps (``hot_buffer``) nor move bytes.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, RowIds
from stratakv.sparse.swap_in import Order, SwapIn, Table

EntryIds: TypeAlias = npt.NDArray[np.int64]
"""int64 [requests, K]"""
Hidden: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class EntryPlaces:
    """Of every request that may run: ``host`` [requests, pages] are the host pages of its entries,
    NONE where they are on the device, and ``buffer`` [requests, n] device pages of its own."""

    host: Table
    buffer: Table
    page_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class RowCopies:
    """int32 [n]: row ``host_offsets[i]`` of host page ``host_pages[i]`` goes to a row of a device
    page; in the order of the selection."""

    device_pages: Table
    device_offsets: Table
    host_pages: Table
    host_offsets: Table


class Reads(Protocol):
    """``NumpyReads``, or what does the same."""

    def away(
        self, places: EntryPlaces, rows: RowIds, entries: EntryIds, hidden: Hidden | None
    ) -> Table:
        """Of the ``entries`` of requests ``rows`` those that lie on the host, int32 [R, K]; NONE in
        the place of the others, and of those that are nobody's (``hidden``)."""
        ...

    def place(self, places: EntryPlaces, rows: RowIds, swap: SwapIn, found: EntryIds) -> RowCopies:
        """Write into ``found`` [R, K] the device rows of what ``swap`` has planned, and leave the
        rest. What has to be copied before they are read."""
        ...

    def keep(self, rows: RowIds, swap: SwapIn, resident: Table, lru: Order) -> None:
        """Write into the tables what is true once the misses of ``swap`` are copied."""
        ...


class NumpyReads:
    """In plain NumPy; IndexError for entries beyond the tables. None may be below 0."""

    def away(
        self, places: EntryPlaces, rows: RowIds, entries: EntryIds, hidden: Hidden | None
    ) -> Table:
        there = places.host[rows[:, None], entries // places.page_rows] != NONE
        if hidden is not None:
            there &= ~hidden
        return np.where(there, entries, NONE).astype(np.int32)

    def place(self, places: EntryPlaces, rows: RowIds, swap: SwapIn, found: EntryIds) -> RowCopies:
        buffer, size, misses = places.buffer[rows], np.int32(places.page_rows), swap.misses
        found[:] = np.where(swap.positions < 0, found, device_rows(swap.positions, buffer, size))
        page, offset = np.divmod(misses.entries, size)
        at, inside = np.divmod(misses.positions, size)
        host = places.host[rows[misses.batch], page]
        return RowCopies(buffer[misses.batch, at], inside, host, offset)

    def keep(self, rows: RowIds, swap: SwapIn, resident: Table, lru: Order) -> None:
        misses = swap.misses
        lru[rows] = swap.lru
        resident[rows[misses.batch], misses.positions] = misses.entries


def device_rows(positions: Table, pages: Table, page_rows: int | np.int32) -> Table:
    """The row of the device pool behind each position [R, K] of requests whose buffers are
    ``pages`` [R, n]; -1 stays -1."""
    page, offset = np.divmod(positions, np.int32(page_rows))
    at = np.arange(len(positions))[:, None]
    rows = pages[at, page] * np.int32(page_rows) + offset
    return np.where(positions >= 0, rows, np.int32(NONE))

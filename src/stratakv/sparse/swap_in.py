"""What a step's selection costs: which selected entries are on the device, which have to be copied,
and in whose place. Owns the decision; must not hold a table between steps (``hot_buffer``) nor move
bytes.

An entry is resident if and only if the table names it; no entry is a case of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import RowIds

Table: TypeAlias = npt.NDArray[np.int32]
"""int32 [requests, ...]"""
Order: TypeAlias = npt.NDArray[np.int16]
"""int16 [requests, entries]: positions under replacement, the least recently used first."""
Marks: TypeAlias = npt.NDArray[np.int16]
"""int16 [requests, longest request + 1]: scratch, all -1 between two calls."""
MissMask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Misses:
    """Rows to copy from the host, one entry each: entry ``entries[i]`` of the batch's request
    ``batch[i]`` goes to its ``positions[i]``, where what was there before is lost. int32 [n]."""

    batch: Table
    entries: Table
    positions: Table

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True, slots=True, eq=False)
class SwapIn:
    """The plan of one selection of a batch, the same for all layers that share the selection.

    ``positions`` [R, K] is where each selected entry can be read once the misses are copied, -1
    where nothing is selected; ``missed`` [R, K] says which of them have to be copied first, each
    once; ``lru`` is the order after it. Shapes depend on the batch alone, as a kernel wants it.
    """

    selection: Table
    positions: Table
    missed: MissMask
    lru: Order

    @property
    def misses(self) -> Misses:
        """The same as a list, by request and in the order of the selection."""
        places = np.flatnonzero(self.missed)
        batch = (places // self.missed.shape[1]).astype(np.int32)
        return Misses(batch, self.selection.take(places), self.positions.take(places))


Planner: TypeAlias = Callable[[RowIds, Table, Table, Order, Marks], SwapIn]
"""``plan_swap_in``, or what does the same."""


def empty_marks(requests: int, entries: int) -> Marks:
    return np.full((requests, entries + 1), -1, np.int16)


def plan_swap_in(
    rows: RowIds, selection: Table, resident: Table, lru: Order, marks: Marks
) -> SwapIn:
    """Plan what ``selection`` [R, K] of requests ``rows``, each once, needs: entries of each, in
    any order, -1 for none.

    ``resident`` [requests, B] is the entry at each position, -1 for none, no entry twice, and
    ``lru`` [requests, B] the positions in the order of their last use. K <= B, so that there is
    always a place. None of these is changed; ``marks`` is scratch for at least R requests of any
    entry that is named.

    Misses take the least recently used positions that this selection does not need. Afterwards the
    order is: what was neither needed nor taken, what was loaded, what was there; each in the order
    it had. An entry that is selected twice counts as selected once, where it stands last.
    """
    count, top_k = selection.shape
    resident, lru = resident[rows], lru[rows]
    assert top_k <= lru.shape[1], f"{top_k} selected entries, {lru.shape[1]} positions"
    # Flat indices: NumPy follows them twice as fast as pairs.
    flat = marks.reshape(-1)
    base = (np.arange(count) * marks.shape[1])[:, None]
    at = selection + base
    # A mark is the column of the selection that names the entry, of twins the last. -1, no entry,
    # falls on the last mark of the request before, which stays -1.
    columns = np.arange(top_k, dtype=np.int16)
    flat[at] = columns
    marks[:, -1] = -1
    column = flat.take(resident + base)
    own = flat.take(at)
    flat[at] = -1

    hit = column >= 0
    positions = np.full((count, top_k), -1, np.int32)
    hits = np.flatnonzero(hit)
    request, position = np.divmod(hits, lru.shape[1])
    positions.reshape(-1)[request * top_k + column.reshape(-1)[hits]] = position
    last = own == columns
    missed = last & (positions < 0)

    # In the order of use: who is needed, and of the others as many as there are misses.
    needed = np.take_along_axis(hit, lru.astype(np.intp), 1)
    rank = np.cumsum(~needed, axis=1, dtype=np.int16)
    taken = ~needed & (rank <= np.count_nonzero(missed, axis=1)[:, None])
    positions[missed] = lru[taken]
    # 0 stays as cold as it was, 1 is loaded, 2 was there.
    warmth = needed.view(np.uint8) * np.uint8(2) + taken
    after = np.take_along_axis(lru, np.argsort(warmth, axis=1, kind="stable"), 1)
    twin = (selection >= 0) & ~last
    if twin.any():
        request, place = np.nonzero(twin)
        positions[request, place] = positions[request, own[request, place]]
    return SwapIn(selection, positions, missed, after)

"""Row -> page map of the running requests, one table per group, and row -> live page for groups
whose requests carry a state.

Owns which page a request reads and writes at each page index, and where its state is read and
written: a forward reads ``source`` and writes ``own``, so that starting from a snapshot costs no
copy and never writes to it. Must not decide what a page is worth (``tree``) or whether one is free
(``allocator``).
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, GroupId, PageIds, RowIds

NO_BUFFERS: Final[Mapping[GroupId, int]] = MappingProxyType({})


class LiveSlots:
    """Two columns per group, int32 [rows]; those of groups without a live page stay NONE."""

    def __init__(self, groups: int, rows: int) -> None:
        self._source = [np.full(rows, NONE, np.int32) for _ in range(groups)]
        self._own = [np.full(rows, NONE, np.int32) for _ in range(groups)]

    def source(self, group: GroupId) -> PageIds:
        """The page with the state before a row's next token: its own, or a snapshot of the tree.
        NONE where the state is zero, as before the first token."""
        return self._source[group]

    def own(self, group: GroupId) -> PageIds:
        """The page that takes the state after a row's next tokens; NONE between a snapshot, which
        took the page along, and the next step."""
        return self._own[group]

    def close_row(self, row: int) -> None:
        for column in (*self._source, *self._own):
            column[row] = NONE


class SpilledPages:
    """Of one group, the rows whose full pages are read on the host.

    ``host[row, i]``: the host page of page index i, NONE where the row's table has a device page.
    ``buffer[row]``: device pages of its own that rows of host pages are copied to, NONE where the
    row is not spilled. ``times[row]``: how often the row has been spilled, whoever sat there: what
    was copied before counts no more.
    """

    def __init__(self, rows: int, max_pages: int, buffer_pages: int) -> None:
        self.host = np.full((rows, max_pages), NONE, np.int32)
        self.buffer = np.full((rows, buffer_pages), NONE, np.int32)
        self.times = np.zeros(rows, np.int32)

    def __contains__(self, row: int) -> bool:
        return self.buffer.item(row, 0) != NONE

    @property
    def rows(self) -> npt.NDArray[np.bool_]:
        """Which rows are spilled."""
        return self.buffer[:, 0] != NONE

    def open(self, row: int, buffer: PageIds) -> None:
        """The row is spilled from now on."""
        self.buffer[row] = buffer
        self.times[row] += 1

    def close_row(self, row: int) -> None:
        self.host[row] = NONE
        self.buffer[row] = NONE


class BlockTable:
    """``pages(g)[row, i]`` is the page of group g that holds page index i of the row's request;
    ``slots`` are the live pages of the groups that keep a state instead. ``spilled``: of groups
    whose home is the host, each with so many ``buffer_pages`` for a row."""

    def __init__(
        self,
        groups: int,
        rows: int,
        max_pages: int,
        buffer_pages: Mapping[GroupId, int] = NO_BUFFERS,
    ) -> None:
        self.rows = rows
        self.max_pages = max_pages
        self.slots = LiveSlots(groups, rows)
        self.spilled = {
            group: SpilledPages(rows, max_pages, pages) for group, pages in buffer_pages.items()
        }
        self._pages = [np.full((rows, max_pages), NONE, np.int32) for _ in range(groups)]
        self._free = list(range(rows - 1, -1, -1))

    def empty_copy(self) -> "BlockTable":
        """Another one of the same ``columns``, with no row open."""
        buffers = {group: spilled.buffer.shape[1] for group, spilled in self.spilled.items()}
        return BlockTable(len(self._pages), self.rows, self.max_pages, buffers)

    def pages(self, group: GroupId) -> npt.NDArray[np.int32]:
        """int32 [rows, max_pages]; NONE where the request holds no page."""
        return self._pages[group]

    def holds(
        self, group: GroupId, rows: RowIds, indices: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.bool_]:
        """Whether each of ``rows`` has the page at its index: on the device, or, where it is read
        there, on the host."""
        there = self._pages[group][rows, indices] != NONE
        if (spilled := self.spilled.get(group)) is not None:
            there |= spilled.host[rows, indices] != NONE
        return there

    def columns(self) -> Iterator[tuple[str, npt.NDArray[np.int32]]]:
        """Every array by name, for those who compare two tables."""
        for group, spilled in self.spilled.items():
            yield f"host pages of group {group}", spilled.host
            yield f"buffers of group {group}", spilled.buffer
            yield f"times that rows of group {group} were spilled", spilled.times
        for group, table in enumerate(self._pages):
            yield f"table of group {group}", table
            yield f"live page of group {group}", self.slots.own(GroupId(group))
            yield f"live page before, of group {group}", self.slots.source(GroupId(group))

    @property
    def taken(self) -> int:
        """Rows that are open."""
        return self.rows - len(self._free)

    def open_row(self) -> int | None:
        """A row with no pages, or None when every row is taken."""
        return self._free.pop() if self._free else None

    def close_row(self, row: int) -> None:
        assert row not in self._free, f"row {row} closed twice"
        for table in self._pages:
            table[row] = NONE
        self.slots.close_row(row)
        for spilled in self.spilled.values():
            spilled.close_row(row)
        self._free.append(row)

    def remap(self, row: int, group: GroupId, first: int, pages: PageIds) -> None:
        """Point page indices [first, first + len(pages)) of a row at other pages."""
        self._pages[group][row, first : first + len(pages)] = pages

"""Swap-in on a GPU, as Triton kernels: the plan of a selection, and the copy of its rows.

A program plans one request by ``swap_in``'s rules, to the last position, and finds where its
entries lie as ``reads`` does; a second kernel reads missing rows from mapped host memory. Shapes
follow from the batch alone, nothing goes back to the host, and a request that is not spilled, or
not there, costs a program that ends: so both may be captured in a graph. Owns the kernels and
their launches; must not import torch.
"""

# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false
from dataclasses import dataclass
from typing import Any, Final

import triton
import triton.language as tl

NUMBERS = tl.constexpr(tl.pointer_type(tl.int64))
BYTES = tl.constexpr(tl.pointer_type(tl.uint8))
WORD = tl.constexpr(16)
BLOCK: Final = 1024
"""Columns of a selection, or positions of a buffer, that a program works on at once."""
COPYING: Final = 32
"""Programs that copy a request's rows, if it has so many: enough under way for a bus."""
ROWS: Final = 4
"""Rows that a program copies at once: a warp each."""
WORD_BYTES: Final = 16
NUMBER_BYTES: Final = 8
"""Two are read at once, where all is aligned to that."""


@triton.jit
def _select(
    entries, hidden, host, mark, selection, positions, width, page_rows,
    HIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which entries lie on the host; of twins the last has the mark."""
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at < width
        entry = tl.load(entries + at, there, 0)
        if HIDES:
            there = there & (tl.load(hidden + at, there, 1) == 0)
        away = there & (tl.load(host + entry // page_rows, there, -1) != -1)
        tl.store(selection + at, tl.where(away, entry, -1).to(tl.int32), at < width)
        tl.store(positions + at, tl.zeros([BLOCK], tl.int32) - 1, at < width)
        tl.atomic_max(mark + entry, at, away)


@triton.jit
def _hold(resident, mark, positions, needed, size, BLOCK: tl.constexpr):
    """Which positions hold one of them, and where those are; how many."""
    held = 0
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        entry = tl.load(resident + at, at < size, -1)
        column = tl.load(mark + entry, entry >= 0, -1)
        tl.store(needed + at, (column >= 0).to(tl.uint8), at < size)
        tl.store(positions + column, at, column >= 0)
        held += tl.sum((column >= 0).to(tl.int32), 0)
    return held


@triton.jit
def _miss(selection, mark, positions, missed, order, width, BLOCK: tl.constexpr):
    """Which columns are to be copied, and into ``order`` those in their order; how many."""
    count = 0
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        entry = tl.load(selection + at, at < width, -1)
        own = tl.load(mark + entry, entry >= 0, -1) == at
        miss = own & (tl.load(positions + at, at < width, 0) < 0)
        one = miss.to(tl.int32)
        tl.store(missed + at, miss.to(tl.uint8), at < width)
        tl.store(order + count + tl.cumsum(one, 0) - 1, at, miss)
        count += tl.sum(one, 0)
    return count


@triton.jit
def _give(
    lru, needed, order, selection, positions, resident, after, targets, sources, buffer, host,
    count, held, size, page_rows, BLOCK: tl.constexpr,
):  # fmt: skip
    """Positions to the misses, the least recently used that nobody needs. Then the order is what
    stays as cold as it was, what is loaded, what was there."""
    cold, warm = 0, 0
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        position = tl.load(lru + at, at < size, 0).to(tl.int32)
        hit = (at < size) & (tl.load(needed + position, at < size, 0) != 0)
        free = (at < size) & (hit == 0)
        rank = cold + tl.cumsum(free.to(tl.int32), 0) - 1
        taken = free & (rank < count)
        place = tl.where(taken, size - held - count + rank, rank - count)
        warmth = warm + tl.cumsum(hit.to(tl.int32), 0) - 1
        place = tl.where(hit, size - held + warmth, place)
        tl.store(after + place, position.to(tl.int16), at < size)
        column = tl.load(order + rank, taken, 0)
        entry = tl.load(selection + column, taken, 0)
        tl.store(positions + column, position, taken)
        tl.store(resident + position, entry, taken)
        page = tl.load(buffer + position // page_rows, taken, 0).to(tl.int64)
        tl.store(targets + rank, page * page_rows + position % page_rows, taken)
        page = tl.load(host + entry // page_rows, taken, 0).to(tl.int64)
        tl.store(sources + rank, page * page_rows + entry % page_rows, taken)
        cold += tl.sum(free.to(tl.int32), 0)
        warm += tl.sum(hit.to(tl.int32), 0)


@triton.jit
def _place(
    selection, mark, positions, found, buffer, lru, after, width, size, page_rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Where each column is read, a twin where the last one is; and the order as it is now."""
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        entry = tl.load(selection + at, at < width, -1)
        own = tl.load(mark + entry, entry >= 0, 0)
        position = tl.load(positions + own, entry >= 0, -1)
        tl.store(positions + at, position, entry >= 0)
        page = tl.load(buffer + position // page_rows, entry >= 0, 0).to(tl.int64)
        tl.store(found + at, page * page_rows + position % page_rows, entry >= 0)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(lru + at, tl.load(after + at, at < size, 0), at < size)


@triton.jit
def _nothing(selection, positions, missed, width, BLOCK: tl.constexpr):
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        none = tl.zeros([BLOCK], tl.int32) - 1
        tl.store(selection + at, none, at < width)
        tl.store(positions + at, none, at < width)
        tl.store(missed + at, tl.zeros([BLOCK], tl.uint8), at < width)


@triton.jit
def _unmark(selection, mark, width, BLOCK: tl.constexpr):
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        entry = tl.load(selection + at, at < width, -1)
        tl.store(mark + entry, tl.zeros([BLOCK], tl.int32) - 1, entry >= 0)


@triton.jit
def plan(
    rows, entries, hidden, host, buffer, resident, lru, marks,
    selection, positions, missed, found, needed, after, order, targets, sources, misses,
    entries_row, host_row, buffer_row, marks_row, width, size, page_rows,
    HIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Request ``program_id(0)`` of the batch, that of row ``rows[r]`` of all tables; below 0: none
    is there, or all its entries are on the device.

    entries: int64 [R, width], and with HIDES hidden uint8 [R, width], those that are nobody's.
    host, buffer: int32 [rows, any], pages of page_rows rows, as in ``EntryPlaces``. resident int32
    and lru int16 [rows, size] are the tables, which say afterwards what is true once the misses are
    copied; marks int32 [rows, entries], all -1 before and after.

    Fills selection and positions int32, missed uint8 and, where an entry is on the host, ``found``
    int64, all [R, width]; targets and sources int64 [R, width], rows of device pages and of host
    pages, of which misses int32 [R] count, in the order of the selection. Scratch: needed uint8 and
    after int16 [R, size], order int32 [R, width].

    Threads read what others have written: a barrier stands between.
    """
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    mine, its = request * width, request * size
    selection, positions, missed = selection + mine, positions + mine, missed + mine
    if row < 0:
        tl.store(misses + request, 0)
        _nothing(selection, positions, missed, width, BLOCK)
    else:
        mark, host = marks + row * marks_row, host + row * host_row
        buffer = buffer + row * buffer_row
        resident, lru = resident + row * size, lru + row * size
        _select(
            entries + request * entries_row, hidden + mine, host, mark, selection, positions,
            width, page_rows, HIDES, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        held = _hold(resident, mark, positions, needed + its, size, BLOCK)
        tl.debug_barrier()
        count = _miss(selection, mark, positions, missed, order + mine, width, BLOCK)
        tl.store(misses + request, count)
        tl.debug_barrier()
        _give(
            lru, needed + its, order + mine, selection, positions, resident, after + its,
            targets + mine, sources + mine, buffer, host, count, held, size, page_rows, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        _place(
            selection, mark, positions, found + mine, buffer, lru, after + its, width, size,
            page_rows, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        _unmark(selection, mark, width, BLOCK)


@triton.jit
def copy_rows(
    target, source, targets, sources, misses, width, page_rows, target_page, source_page,
    UNITS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of request ``program_id(0)`` that it has missed, ROWS at a time. target, source: int64,
    addresses of what a layer has on page 0 of the device and of the host. Pages begin every
    target_page and source_page units, of 8 bytes or with WIDE not set of one; a row has UNITS."""
    request = tl.program_id(0).to(tl.int64)
    count = tl.load(misses + request)
    unit = tl.arange(0, LANES)
    if WIDE:
        there = tl.multiple_of(target.to(NUMBERS, bitcast=True), WORD)
        here = tl.multiple_of(source.to(NUMBERS, bitcast=True), WORD)
    else:
        there = target.to(BYTES, bitcast=True)
        here = source.to(BYTES, bitcast=True)
    for start in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        at = start + tl.arange(0, ROWS)
        to = tl.load(targets + request * width + at, at < count, 0)
        of = tl.load(sources + request * width + at, at < count, 0)
        to = to // page_rows * target_page + to % page_rows * UNITS
        of = of // page_rows * source_page + of % page_rows * UNITS
        moved = (at < count)[:, None] & (unit < UNITS)[None, :]
        row = tl.load(here + (of[:, None] + unit[None, :]), moved, 0)
        tl.store(there + (to[:, None] + unit[None, :]), row, moved)


@dataclass(frozen=True, slots=True)
class RowRoute:
    """What one layer has of each page at either end: address on page 0, bytes from page to page,
    and bytes of each row."""

    target: int
    source: int
    target_page_bytes: int
    source_page_bytes: int
    row_bytes: int

    @property
    def wide(self) -> bool:
        """Whether all of it goes in words of ``WORD_BYTES``."""
        every = self.target | self.source | self.target_page_bytes | self.source_page_bytes
        return not (every | self.row_bytes) % WORD_BYTES


@dataclass(frozen=True, slots=True)
class CopyLaunch:
    """How rows are copied. units: of a row; lanes: the same rounded up; unit_bytes: of one;
    programs: of a request."""

    units: int
    lanes: int
    unit_bytes: int
    programs: int

    @classmethod
    def of(cls, route: RowRoute, width: int) -> "CopyLaunch":
        """Of requests that miss ``width`` rows at most."""
        unit_bytes = NUMBER_BYTES if route.wide else 1
        units = route.row_bytes // unit_bytes
        lanes = 1 << (units - 1).bit_length()
        return cls(units, lanes, unit_bytes, max(1, min(COPYING, -(-width // ROWS))))


def plan_warps(width: int, size: int) -> int:
    """Of a program that plans: no more than have work."""
    return 8 if max(width, size) > BLOCK // 4 else 4


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """Tensors of a selection: rows int32 [R], entries int64 [R, width], whose columns lie one after
    the other, and hidden uint8 [R, width], or None."""

    rows: Any
    entries: Any
    hidden: Any


@dataclass(frozen=True, slots=True, eq=False)
class BufferTables:
    """Tensors of all requests, contiguous: host, buffer, resident, marks int32, lru int16."""

    host: Any
    buffer: Any
    resident: Any
    lru: Any
    marks: Any


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """Tensors that a plan fills, contiguous: reads, targets, sources int64, selection, positions
    int32, missed uint8, all [R, width], and misses int32 [R]. Scratch: order int32 [R, width],
    needed uint8 and after int16 [R, size]."""

    reads: Any
    targets: Any
    sources: Any
    misses: Any
    selection: Any
    positions: Any
    missed: Any
    order: Any
    needed: Any
    after: Any


def launch_plan(asked: Selected, tables: BufferTables, planned: Planned, page_rows: int) -> None:
    """Plan, and keep the outcome in the tables; on the device's current stream."""
    width, size = planned.reads.shape[1], tables.resident.shape[1]
    if not len(asked.rows) or not width:
        return
    launched: Any = plan
    launched[len(asked.rows),](
        asked.rows, asked.entries, asked.rows if asked.hidden is None else asked.hidden,
        tables.host, tables.buffer, tables.resident, tables.lru, tables.marks, planned.selection,
        planned.positions, planned.missed, planned.reads, planned.needed, planned.after,
        planned.order, planned.targets, planned.sources, planned.misses, asked.entries.stride(0),
        tables.host.shape[1], tables.buffer.shape[1], tables.marks.shape[1], width, size,
        page_rows, HIDES=asked.hidden is not None, BLOCK=BLOCK, num_warps=plan_warps(width, size),
    )  # fmt: skip


def launch_rows(route: RowRoute, planned: Planned, page_rows: int) -> None:
    """Copy what a plan has found missing, in one layer; on the device's current stream."""
    targets, sources, misses = planned.targets, planned.sources, planned.misses
    width = targets.shape[1]
    if not len(misses) or not width:
        return
    copy = CopyLaunch.of(route, width)
    launched: Any = copy_rows
    launched[len(misses), copy.programs](
        route.target, route.source, targets, sources, misses, width, page_rows,
        route.target_page_bytes // copy.unit_bytes, route.source_page_bytes // copy.unit_bytes,
        UNITS=copy.units, LANES=copy.lanes, ROWS=ROWS, WIDE=route.wide, num_warps=ROWS,
    )  # fmt: skip

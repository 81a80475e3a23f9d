"""The swap-in of a GPU, in Triton's interpreter: the plan is the CPU's to the last position, and
rows come whole."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from stratakv.core.ids import NONE
from stratakv.engine.attention.triton_swap_ins import room_of
from stratakv.sparse.hot_buffer import HotBuffers, HotBufferShape
from stratakv.sparse.reads import EntryPlaces, NumpyReads
from stratakv.sparse.swap_in import empty_marks, plan_swap_in
from stratakv.sparse.triton_swap_in import (
    BLOCK,
    COPYING,
    ROWS,
    CopyLaunch,
    RowRoute,
    launch_rows,
    plan_warps,
)
from tests.hot_buffer_machine import walk
from tests.triton_buffers import UNREAD, PlanTensors, triton_planner

TABLE_ROWS = 5


def ints(*values):
    return np.array(values, np.int32)


def places_of(rng, pages, buffer_pages, page_rows):
    """Some pages of each request are on the device."""
    host = rng.permutation(TABLE_ROWS * pages).reshape(TABLE_ROWS, pages).astype(np.int32)
    host[rng.random(host.shape) < 0.2] = NONE
    buffer = rng.permutation(TABLE_ROWS * buffer_pages).reshape(TABLE_ROWS, buffer_pages)
    return EntryPlaces(host, buffer.astype(np.int32), page_rows)


class Both:
    """The tables of a CPU and those of a GPU, of one selection of a step."""

    def __init__(self, rng, page_rows, buffer_pages, pages, top_k):
        self.rng, self.top_k = rng, top_k
        self.places = places_of(rng, pages, buffer_pages, page_rows)
        self.entries = pages * page_rows
        size = page_rows * buffer_pages
        shape = HotBufferShape(entries=size, page_rows=page_rows, top_k=top_k)
        planner = plan_swap_in
        self.buffers = HotBuffers(shape, 1, TABLE_ROWS, self.entries, planner, NumpyReads())
        self.resident, self.lru = self.buffers.resident[0].copy(), self.buffers.lru[0].copy()

    def step(self, requests, *, hides, unique):
        """Both plan the same; the ends of every copy are the same, in the same order."""
        rows = self.rng.permutation(TABLE_ROWS)[:requests].astype(np.int32)
        shape = (requests, self.top_k)
        entries = np.stack([self.drawn(unique) for _ in range(requests)])
        hidden = self.rng.random(shape) < 0.2 if hides else None
        reads = self.buffers.reads
        selection = reads.away(self.places, rows, entries, hidden)
        found = np.full(shape, UNREAD, np.int64)
        swap = self.buffers.swap_in(0, rows, selection)
        copies = reads.place(self.places, rows, swap, found)

        mine = PlanTensors.of(rows, entries, hidden, self.places, self.resident, self.lru)
        planned = mine.launch()
        self.resident, self.lru = mine.tables.resident.numpy(), mine.tables.lru.numpy()
        assert planned.selection.tolist() == selection.tolist()
        assert planned.positions.tolist() == swap.positions.tolist()
        assert planned.missed.tolist() == swap.missed.tolist()
        assert planned.reads.tolist() == found.tolist()
        assert self.resident.tolist() == self.buffers.resident[0].tolist()
        assert self.lru.tolist() == self.buffers.lru[0].tolist()
        size = self.places.page_rows
        ends = zip(
            swap.misses.batch.tolist(),
            (copies.device_pages.astype(np.int64) * size + copies.device_offsets).tolist(),
            (copies.host_pages.astype(np.int64) * size + copies.host_offsets).tolist(),
            strict=True,
        )
        assert mine.copies() == list(ends)
        return len(swap.misses)

    def drawn(self, unique):
        if unique:
            return np.sort(self.rng.permutation(self.entries)[: self.top_k]).astype(np.int64)
        return self.rng.integers(0, self.entries, self.top_k)


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_plan_is_the_cpus_over_many_steps(seed, unique, hides):
    rng = np.random.default_rng(seed)
    page_rows, buffer_pages = int(rng.choice([1, 3, 4])), int(rng.integers(1, 6))
    size = page_rows * buffer_pages
    both = Both(rng, page_rows, buffer_pages, buffer_pages * 3, int(rng.integers(1, size + 1)))
    misses = [
        both.step(int(rng.integers(1, TABLE_ROWS + 1)), hides=hides, unique=unique)
        for _ in range(6)
    ]
    assert sum(misses) > 0


@pytest.mark.parametrize(
    ("buffer_pages", "top_k"), [(36, BLOCK + 77), (33, BLOCK), (32, 2 * BLOCK), (20, 900)]
)
def test_a_plan_of_more_than_a_block_is_the_cpus(buffer_pages, top_k):
    both = Both(np.random.default_rng(3), 64, buffer_pages, 80, top_k)
    for unique in (True, False, True):
        both.step(2, hides=True, unique=unique)


def test_requests_come_and_go_as_on_a_cpu():
    seen = walk(random.Random(5), 40, triton_planner, NumpyReads())
    assert min(seen[name] for name in ("come", "go", "step", "misses", "hits")) > 0


def one(selection, resident, lru):
    swap = triton_planner(
        ints(0), np.array([selection], np.int32), np.array([resident], np.int32),
        np.array([lru], np.int16), None,
    )  # fmt: skip
    right = plan_swap_in(
        ints(0), np.array([selection], np.int32), np.array([resident], np.int32),
        np.array([lru], np.int16), empty_marks(1, 64),
    )  # fmt: skip
    assert swap.positions.tolist() == right.positions.tolist()
    assert swap.missed.tolist() == right.missed.tolist()
    assert swap.lru.tolist() == right.lru.tolist()
    return swap


def test_misses_take_the_least_recently_used_that_is_not_selected():
    assert one([9, 5, 3], [5, 6, 7, 8], [0, 2, 3, 1]).positions.tolist() == [[2, 0, 3]]
    assert one([9, 9, 6, 6], [5, 6, 7, 8], [0, 1, 2, 3]).positions.tolist() == [[0, 0, 1, 1]]
    assert one([1, 2, 3, 4], [5, 6, 7, 8], [3, 2, 1, 0]).positions.tolist() == [[3, 2, 1, 0]]
    assert one([NONE] * 3, [5, 6, NONE], [2, 0, 1]).lru.tolist() == [[2, 0, 1]]


def tensors(rows):
    """A sound launch: requests of two rows of the tables."""
    places = EntryPlaces(ints([0, 1, 2, 3], [4, 5, 6, 7]), ints([3, 1], [0, 2]), 2)
    resident = np.full((2, 4), NONE, np.int32)
    lru = np.tile(np.arange(4, dtype=np.int16), (2, 1))
    entries = np.array([[7, 0, 3], [1, 2, 5], [0, 6, 4]], np.int64)[: len(rows)]
    return PlanTensors.of(ints(*rows), entries, None, places, resident, lru)


def test_who_is_not_spilled_has_no_plan_and_keeps_what_was_found():
    """Nor has padding of a batch, as graphs have it."""
    made = tensors([NONE, 1, NONE])
    planned = made.launch()
    assert planned.misses.tolist() == [0, 3, 0]
    assert (planned.reads[[0, 2]] == UNREAD).all()
    assert (planned.reads[1] != UNREAD).all()
    assert planned.positions[[0, 2]].tolist() == [[NONE] * 3] * 2
    assert not planned.missed[[0, 2]].any()
    assert (made.tables.resident[0] == NONE).all()
    assert made.tables.lru[0].tolist() == [0, 1, 2, 3]


def test_nobody_is_there():
    launch_rows(RowRoute(0, 0, 16, 16, 16), tensors([]).launch(), 1)


def test_all_requests_may_share_their_entries():
    """As where all entries are read: a row of columns for everybody."""
    made = tensors([0, 1])
    made.asked = replace(made.asked, entries=torch.arange(3).expand(2, -1))
    planned = made.launch()
    assert planned.selection.tolist() == [[0, 1, 2]] * 2
    assert planned.sources.tolist() == [[0, 1, 2], [8, 9, 10]]


# --- the copy ------------------------------------------------------------------------------------


def copied(route, targets, sources, counts, page_rows):
    planned = room_of(targets, 1)
    misses = torch.tensor(counts, dtype=torch.int32)
    ends = replace(planned, targets=targets, sources=sources, misses=misses)
    launch_rows(route, ends, page_rows)


class Ends:
    """Pages at either end, that hold ``page_rows`` rows of ``row_bytes`` after ``offset`` bytes."""

    def __init__(self, row_bytes, page_rows, pages=7, offset=16, beside=32):
        rng = np.random.default_rng(row_bytes)
        self.row_bytes, self.page_rows = row_bytes, page_rows
        stride = offset + row_bytes * page_rows + beside
        self.host = torch.from_numpy(rng.integers(0, 256, (pages, stride), np.uint8))
        self.device = torch.from_numpy(
            rng.integers(0, 256, (pages, row_bytes * page_rows), np.uint8)
        )
        self.offset = offset
        self.route = RowRoute(
            self.device.data_ptr(), self.host.data_ptr() + offset, row_bytes * page_rows, stride,
            row_bytes,
        )  # fmt: skip

    def row(self, of, row):
        page, inside = divmod(row, self.page_rows)
        begin = (self.offset if of is self.host else 0) + inside * self.row_bytes
        return of[page, begin : begin + self.row_bytes]


@pytest.mark.parametrize("page_rows", [1, 4])
@pytest.mark.parametrize("row_bytes", [1152, 656, 576, 16, 48, 7, 1150])
def test_rows_go_where_they_belong_and_nothing_else_changes(row_bytes, page_rows):
    ends, rng = Ends(row_bytes, page_rows), np.random.default_rng(1)
    assert ends.route.wide is (row_bytes % 16 == 0)
    rows = 7 * page_rows
    counts = [0, min(3, rows // 2), rows // 3, 0]
    targets = torch.full((4, 9), 2**40)  # an address that would end the process
    sources, free, right = targets.clone(), rng.permutation(rows).tolist(), ends.device.clone()
    for request, count in enumerate(counts):
        for at in range(count):
            to, of = free.pop(), int(rng.integers(rows))
            targets[request, at], sources[request, at] = to, of
            page, inside = divmod(to, page_rows)
            row = slice(inside * row_bytes, (inside + 1) * row_bytes)
            right[page, row] = ends.row(ends.host, of)
    before = ends.host.clone()
    copied(ends.route, targets, sources, counts, page_rows)
    assert ends.device.equal(right)
    assert ends.host.equal(before)


def test_more_rows_are_missed_than_go_at_once():
    ends, count = Ends(32, 4, pages=80), 3 * ROWS * COPYING // 2 + 1
    targets = torch.randperm(320, generator=torch.Generator().manual_seed(1))[None, :count]
    sources = torch.arange(count)[None].flip(1).contiguous()
    copied(ends.route, targets.contiguous(), sources, [count], 4)
    for to, of in zip(targets[0].tolist(), sources[0].tolist(), strict=True):
        assert ends.row(ends.device, to).equal(ends.row(ends.host, of))


@pytest.mark.parametrize("row_bytes", [4096, 4095])
def test_rows_may_lie_further_than_32_bits_reach(row_bytes):
    """Of arrays that nobody touches but at their ends."""
    pages = 2**31 // row_bytes + 9
    host = torch.empty(pages, row_bytes, dtype=torch.uint8)
    device = torch.zeros(1, row_bytes, dtype=torch.uint8)
    host[-1], host[-2] = 5, 6
    route = RowRoute(device.data_ptr(), host.data_ptr(), row_bytes, row_bytes, row_bytes)
    copied(route, torch.tensor([[0]]), torch.tensor([[pages - 1]]), [1], 1)
    assert (device == 5).all()


def test_a_launch_has_as_many_programs_as_have_rows():
    latent = CopyLaunch.of(RowRoute(0, 0, 64 * 1152, 64 * 1152, 1152), 2048)
    assert latent == CopyLaunch(144, 256, 8, COPYING)
    assert CopyLaunch.of(RowRoute(0, 0, 30, 32, 15), 1) == CopyLaunch(15, 16, 1, 1)
    assert CopyLaunch.of(RowRoute(8, 0, 32, 32, 16), 0).unit_bytes == 1
    assert [plan_warps(*of) for of in ((8, 8), (300, 8), (8, 5000))] == [4, 8, 8]

"""Requests come, select from what lies on the host, and go, beside books of our own: what lies in
every device row, which rows are whose. Rows that nobody owns are poisoned, and so are those of a
request that has just come; an entry that a table names and nobody has copied is read as poison.
"""

from collections import Counter

import numpy as np

from stratakv.core.ids import NONE
from stratakv.memory.allocator import PageAllocator
from stratakv.sparse.hot_buffer import (
    DEFAULT_PLANNER,
    DEFAULT_READS,
    HotBuffers,
    HotBufferShape,
)
from stratakv.sparse.reads import EntryPlaces
from tests.hot_buffer_model import HotBufferModel

POISON = -7
UNREAD = -5
PLANS = 2
MOST_ENTRIES = 40
ROWS = 4


def ints(values):
    return np.array(list(values), np.int32)


class HotBufferMachine:
    """``entries[row]`` are those that the request of a row has; 0 where there is none."""

    def __init__(self, rng, planner=DEFAULT_PLANNER, reads=DEFAULT_READS):
        page_rows, pages = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
        self.shape = HotBufferShape(
            entries=page_rows * pages, page_rows=page_rows, top_k=rng.randint(1, page_rows * pages)
        )
        self.buffers = HotBuffers(self.shape, PLANS, ROWS, MOST_ENTRIES, planner, reads)
        self.pages = PageAllocator(rng.randint(pages, 3 * pages))
        self.owned = np.zeros((ROWS, pages), np.int32)
        self.bytes = np.full((PLANS, self.pages.capacity, page_rows), POISON, np.int64)
        self.entries = [0] * ROWS
        self.serial = 0
        self.names = [0] * ROWS  # of requests, so that no two have the same bytes
        self.models = [
            [HotBufferModel(self.shape.entries) for _ in range(PLANS)] for _ in range(ROWS)
        ]
        self.seen = Counter()

    def value(self, plan, row, entries):
        """What the host has: no other request, plan or entry has the same."""
        return (self.names[row] * 1000 + np.asarray(entries)) * PLANS + plan

    def come(self, rng):
        free = [row for row in range(ROWS) if not self.entries[row]]
        pages = self.pages.alloc(self.shape.pages) if free else None
        if pages is None:
            self.seen["no room"] += 1
            return
        row = rng.choice(free)
        self.serial += 1
        self.names[row], self.entries[row] = self.serial, rng.randint(1, MOST_ENTRIES - 5)
        self.owned[row] = pages
        self.buffers.clear(row)
        self.models[row] = [HotBufferModel(self.shape.entries) for _ in range(PLANS)]
        self.seen["come"] += 1

    def go(self, rng):
        there = [row for row in range(ROWS) if self.entries[row]]
        if there:
            row = rng.choice(there)
            self.pages.free(self.owned[row].copy())
            self.bytes[:, self.owned[row]] = POISON
            self.entries[row] = 0
            self.seen["go"] += 1

    def step(self, rng):
        """Some requests, in any order, select in every plan; the misses are copied, then read."""
        there = [row for row in range(ROWS) if self.entries[row]]
        rows = ints(rng.sample(there, rng.randint(0, len(there))))
        for row in rows.tolist():
            self.entries[row] = min(MOST_ENTRIES, self.entries[row] + rng.choice([0, 1]))
        for plan in range(PLANS):
            chosen = [self.choose(rng, int(row)) for row in rows]
            selection = np.array(chosen, np.int32).reshape(len(rows), self.shape.top_k)
            self.read(plan, rows, selection)
        self.seen["step"] += len(rows) > 1

    def choose(self, rng, row):
        """Near the end as a rule, so that some is there; none now and then, or one twice."""
        end = self.entries[row]
        first = max(0, end - rng.choice([self.shape.entries + 2, MOST_ENTRIES]))
        chosen = [rng.randint(first, end - 1) for _ in range(self.shape.top_k)]
        return [NONE if rng.random() < 0.1 else entry for entry in chosen]

    def read(self, plan, rows, selection):
        swap = self.buffers.swap_in(plan, rows, selection)
        misses, size = swap.misses, self.shape.page_rows
        pages = np.arange(-(-MOST_ENTRIES // size), dtype=np.int32)
        places = EntryPlaces(np.tile(pages, (ROWS, 1)), self.owned, size)
        at = np.full(selection.shape, UNREAD, np.int64)
        copies = self.buffers.reads.place(places, rows, swap, at)
        self.bytes[plan, copies.device_pages, copies.device_offsets] = [
            self.value(plan, row, page * size + offset)
            for row, page, offset in zip(
                rows[misses.batch], copies.host_pages, copies.host_offsets, strict=True
            )
        ]
        flat = self.bytes[plan].reshape(-1)
        listed = list(zip(misses.batch, misses.entries, misses.positions, strict=True))
        for index, row in enumerate(rows.tolist()):
            there = selection[index] != NONE
            assert ((at[index] != UNREAD) == there).all()
            assert (flat[at[index][there]] == self.value(plan, row, selection[index][there])).all()
            positions, expected = self.models[row][plan].select(selection[index].tolist())
            assert swap.positions[index].tolist() == positions
            mine, listed = listed[: len(expected)], listed[len(expected) :]
            assert mine == [(index, *miss) for miss in expected]
            self.seen["misses"] += len(mine)
            self.seen["hits"] += len(set(selection[index][there].tolist())) - len(mine)
        assert not listed

    def check(self):
        for row in range(ROWS):
            for plan in range(PLANS):
                table, order = self.buffers.resident[plan, row], self.buffers.lru[plan, row]
                assert sorted(order.tolist()) == list(range(self.shape.entries))
                named = np.flatnonzero(table != NONE)
                assert len(set(table[named].tolist())) == len(named)
                if self.entries[row]:
                    page, offset = np.divmod(named, self.shape.page_rows)
                    held = self.bytes[plan, self.owned[row, page], offset]
                    assert (held == self.value(plan, row, table[named])).all()
                    assert order.tolist() == self.models[row][plan].order


WEIGHTS = {"come": 3, "go": 1, "step": 9}


def walk(rng, steps, planner=DEFAULT_PLANNER, reads=DEFAULT_READS):
    """One random walk; what it has seen."""
    machine = HotBufferMachine(rng, planner, reads)
    for verb in rng.choices(list(WEIGHTS), WEIGHTS.values(), k=steps):
        getattr(machine, verb)(rng)
        machine.check()
    return machine.seen

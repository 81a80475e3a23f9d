"""Seeded bugs of bounded buffers: each is put into the code, one at a time, and random walks beside
books of our own must fail. A bug is a few characters of one function's source."""

import random

import pytest

from stratakv.sparse import reads, swap_in
from stratakv.sparse.hot_buffer import HotBuffers
from stratakv.sparse.reads import NumpyReads
from tests.hot_buffer_machine import walk
from tests.seeded_bugs import seed_bug

WALKS = 40
STEPS = 60
CAUGHT = (AssertionError, IndexError, KeyError, ValueError)
BUGS = {
    "a wrong victim": (swap_in, "plan_swap_in", "lru[taken]", "lru[taken][::-1]"),
    "what was needed is taken": (
        swap_in, "plan_swap_in", "taken = ~needed &", "taken = (needed | ~needed) &",
    ),
    "hits stay as cold as they were": (
        swap_in, "plan_swap_in", "needed.view(np.uint8) * np.uint8(2) + taken", "taken * 1",
    ),
    "what was loaded is as warm as a hit": (
        swap_in, "plan_swap_in", "* np.uint8(2) + taken", "+ taken",
    ),
    "a twin is copied twice": (
        swap_in, "plan_swap_in", "last & (positions < 0)", "(selection >= 0) & (positions < 0)",
    ),
    "a twin is nowhere": (swap_in, "plan_swap_in", "if twin.any()", "if False"),
    "nobody's entry is one": (swap_in, "plan_swap_in", "marks[:, -1] = -1", "pass"),
    "marks stay": (swap_in, "plan_swap_in", "flat[at] = -1", "pass"),
    "one request's marks are another's": (
        swap_in, "plan_swap_in", "np.arange(count) * marks.shape[1]", "np.arange(count) * 1",
    ),
    "the tables of others": (swap_in, "plan_swap_in", "resident[rows]", "resident[: len(rows)]"),
    "a stale table": (NumpyReads, "keep", "= misses.entries", "= misses.entries * 0 - 1"),
    "a table of another request": (
        NumpyReads, "keep", "rows[misses.batch]", "misses.batch",
    ),
    "the order is not kept": (NumpyReads, "keep", "lru[rows] = swap.lru", "pass"),
    "one order for all plans": (
        HotBuffers, "swap_in", "self._lru[plan]", "self._lru[0]",
    ),
    "a table outlives its request": (HotBuffers, "clear", "= NONE", "= self._resident[:, row]"),
    "one plan's table outlives it": (
        HotBuffers, "clear", "self._resident[:, row]", "self._resident[:1, row]",
    ),
    "an order outlives its request": (
        HotBuffers, "clear", "self._lru[:, row]", "self._lru[:0, row]",
    ),
    "rows of another page": (
        reads, "device_rows", "pages[at, page]", "pages[at, 0 * page]",
    ),
    "nobody's entry has a row": (
        NumpyReads, "place", "swap.positions < 0", "swap.positions < -1",
    ),
    "copied to another page": (NumpyReads, "place", "buffer[misses.batch, at]", "buffer[:, at][0]"),
    "copied to another row": (NumpyReads, "place", "inside, host", "inside * 0, host"),
    "another row is copied": (NumpyReads, "place", "host, offset", "host, offset * 0"),
}  # fmt: skip


def walk_on():
    for seed in range(WALKS):
        walk(random.Random(seed), STEPS, swap_in.plan_swap_in, NumpyReads())


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_caught(monkeypatch, bug):
    seed_bug(monkeypatch, *BUGS[bug])
    with pytest.raises(CAUGHT):
        walk_on()


def test_without_a_bug_the_same_walks_pass():
    walk_on()

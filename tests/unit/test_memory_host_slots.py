"""What a request's pages promise, on the allocator and the block table that hold them: whole pages
or none, taken only where a page begins, given back with their unused end, and no holes."""

import ast
import inspect

import numpy as np
import pytest

from stratakv.core.ids import NONE, GroupId
from stratakv.memory import allocator, block_table
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.block_table import BlockTable
from stratakv.testing.specs import small_spec
from tests.small_cache import SmallCache

PAGE = 4
A = list(range(1, 14))


def cache_of(device=12, host=12, pages=16):
    return SmallCache(small_spec([], page_tokens=PAGE), device, host, pages=pages)


def step(cache, row, start, end):
    cache.extend(np.array([row]), np.array([start], np.int64), np.array([end], np.int64))


def table_of(cache, row):
    return cache.rows.pages(GroupId(0))[row]


def test_all_pages_or_none():
    pages = PageAllocator(5)
    taken = pages.alloc(3)
    before = pages.stack.copy()
    assert pages.alloc(3) is None
    assert pages.available() == 2
    assert (pages.stack == before).all()
    assert sorted({*taken.tolist(), *pages.alloc(2).tolist()}) == list(range(5))


def test_no_pages_are_an_empty_array_and_fewer_than_none_are_a_fault():
    pages = PageAllocator(5)
    assert pages.alloc(0).tolist() == []
    with pytest.raises(AssertionError, match="alloc"):
        pages.alloc(-1)
    assert pages.available() == 5


def test_a_page_is_taken_only_where_one_begins():
    cache = cache_of()
    row = cache.enter(A[:6], 10).row
    free = []
    for end in range(6, 13):
        step(cache, row, 0 if end == 6 else end - 1, end)
        free.append(cache.free_pages()[0])
    assert free == [10, 10, 10, 9, 9, 9, 9]
    table = table_of(cache, row)
    assert (table[:3] != NONE).all()
    assert (table[3:] == NONE).all()


def test_tokens_that_have_their_page_take_none_when_they_are_asked_for_again():
    cache = cache_of()
    row = cache.enter(A[:6], 10).row
    step(cache, row, 0, 6)
    before = table_of(cache, row).copy()
    step(cache, row, 6, 8)
    step(cache, row, 5, 6)
    assert (table_of(cache, row) == before).all()


def test_a_request_that_ends_gives_back_whole_pages_with_their_unused_end():
    cache = cache_of()
    row = cache.enter(A, 3).row
    step(cache, row, 0, 13)
    assert cache.free_pages()[0] == 12 - 4
    cache.drop(row)
    assert cache.free_pages() == [12]
    assert (table_of(cache, row) == NONE).all()


def test_a_request_has_no_more_pages_than_the_table_is_wide():
    cache = cache_of(pages=2)
    row = cache.enter(A[:6], 2).row
    step(cache, row, 0, 8)
    with pytest.raises(IndexError):
        step(cache, row, 8, 9)


@pytest.mark.parametrize("start", [9, 12, 13])
def test_a_start_beyond_what_a_request_has_is_refused_and_takes_nothing(start):
    cache = cache_of()
    row = cache.enter(A[:6], 10).row
    step(cache, row, 0, 6)
    before = cache.free_pages()
    with pytest.raises(AssertionError, match="beyond the pages of its request"):
        step(cache, row, start, start + 1)
    assert cache.free_pages() == before
    step(cache, row, 8, 9)
    assert cache.free_pages() == [before[0] - 1]


def test_a_start_beyond_what_lies_on_the_host_is_refused_too():
    table = BlockTable(2, 2, 4, {GroupId(1): 2})
    row = np.array([table.open_row()])
    table.remap(row.item(), GroupId(1), 2, np.array([5], np.int32))
    table.spilled[GroupId(1)].host[row, :2] = 3, 9
    there = [table.holds(GroupId(1), row, np.array([at])).item() for at in range(4)]
    assert there == [True, True, True, False]
    assert not table.holds(GroupId(0), row, np.array([0])).item()


@pytest.mark.parametrize("end", [0, 3, 6])
def test_no_tokens_or_fewer_take_no_page(end):
    cache = cache_of()
    row = cache.enter(A[:6], 10).row
    step(cache, row, 0, 6)
    before, pages = cache.free_pages(), table_of(cache, row).copy()
    step(cache, row, 6, end)
    assert cache.free_pages() == before
    assert (table_of(cache, row) == pages).all()


def test_what_is_taken_and_what_is_used_are_kept_apart():
    """The page that is filling is the request's; the tree, and so the host, has what is full."""
    cache = cache_of()
    row = cache.enter(A[:6], 4).row
    cache.compute(row, A[:6], 0)
    assert np.count_nonzero(table_of(cache, row) != NONE) == 2
    cache.progress.settle()
    assert cache.tiers.pools.stats()[1].total - cache.tiers.pools.stats()[1].free == 1
    cache.check()


@pytest.mark.parametrize("module", [allocator, block_table])
def test_no_page_is_taken_by_looking_at_a_device(module):
    """Pages are plain integers of the host: nothing there could wait for a device."""
    imported = {
        name.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    ours = {name for name in imported if name.startswith("stratakv")}
    assert imported - ours <= {"numpy", "numpy.typing", "collections.abc", "types", "typing"}
    assert ours <= {"stratakv.core.ids"}


def test_a_spilled_page_is_named_whole_and_its_rows_follow():
    table = BlockTable(1, 2, 4, {GroupId(0): 2})
    spilled, row = table.spilled[GroupId(0)], table.open_row()
    assert row not in spilled
    spilled.open(row, np.array([5, 6], np.int32))
    spilled.host[row, :2] = 3, 9
    assert row in spilled
    assert spilled.rows.tolist() == [at == row for at in range(2)]
    again = spilled.times[row]
    table.close_row(row)
    assert row not in spilled
    assert (spilled.host == NONE).all()
    spilled.open(row, np.array([5, 6], np.int32))
    assert spilled.times[row] == again + 1

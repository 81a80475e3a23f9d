"""Where selected entries are read: the same by NumPy and by the helper in C."""

import numpy as np
import pytest

from stratakv.core.ids import NONE
from stratakv.sparse import hot_buffer
from stratakv.sparse.hot_buffer import HotBuffers, HotBufferShape
from stratakv.sparse.reads import EntryPlaces, NumpyReads
from stratakv.sparse.swap_in import SwapIn

HELPER = "stratakv.sparse.compiled_reads"
ROWS, PAGES, SIZE, TOP_K = 5, 6, 3, 7


def compiled():
    """Not built without a compiler."""
    return pytest.importorskip(HELPER, exc_type=ImportError).CompiledReads()


MAKERS = {"numpy": NumpyReads, "c": compiled}
each_way = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def ints(*values):
    return np.array(values, np.int32)


def two_requests():
    """Of pages of two rows: request 1 has its second page on the host, request 0 nothing."""
    host = ints([NONE, NONE, NONE], [NONE, 8, NONE])
    return EntryPlaces(host, ints([NONE, NONE], [4, 6]), 2)


@each_way
def test_what_lies_on_the_host_is_selected_there(make):
    entries = np.array([[0, 2, 3, 5], [3, 2, 1, 0]])
    found = make().away(two_requests(), ints(0, 1), entries, None)
    assert found.tolist() == [[NONE] * 4, [3, 2, NONE, NONE]]
    assert found.dtype == np.int32


@each_way
def test_what_is_nobodys_is_not_selected(make):
    hidden = np.array([[False, True, False]])
    found = make().away(two_requests(), ints(1), np.array([[2, 3, 0]]), hidden)
    assert found.tolist() == [[2, NONE, NONE]]


@each_way
def test_misses_are_copied_into_the_requests_own_pages(make):
    swap = SwapIn(
        ints([3, NONE, 2, 3]),
        ints([1, NONE, 2, 1]),
        np.array([[True, False, True, False]]),
        np.zeros((1, 4), np.int16),
    )
    found = np.array([[90, 91, 92, 93]])
    copies = make().place(two_requests(), ints(1), swap, found)
    assert found.tolist() == [[4 * 2 + 1, 91, 6 * 2, 4 * 2 + 1]]
    assert [copies.device_pages.tolist(), copies.device_offsets.tolist()] == [[4, 6], [1, 0]]
    assert [copies.host_pages.tolist(), copies.host_offsets.tolist()] == [[8, 8], [1, 0]]


@each_way
def test_tables_name_what_was_copied(make):
    resident, lru = ints([7, 8], [4, 5]), np.array([[0, 1], [0, 1]], np.int16)
    after = np.array([[1, 0]], np.int16)
    swap = SwapIn(ints([9, 4]), ints([1, 0]), np.array([[True, False]]), after)
    make().keep(ints(1), swap, resident, lru)
    assert resident.tolist() == [[7, 8], [4, 9]]
    assert lru.tolist() == [[0, 1], [1, 0]]


def drawn(random):
    """Places of many requests, of which some are asked for some of their entries."""
    host = np.where(random.random((ROWS, PAGES)) < 0.7, random.integers(0, 50, (ROWS, PAGES)), NONE)
    buffer = random.permutation(40)[: ROWS * 4].reshape(ROWS, 4)
    places = EntryPlaces(host.astype(np.int32), buffer.astype(np.int32), SIZE)
    rows = random.permutation(ROWS)[: random.integers(1, ROWS + 1)].astype(np.int32)
    shape = (len(rows), TOP_K)
    hidden = random.random(shape) < 0.2 if random.random() < 0.5 else None
    return places, rows, random.integers(0, PAGES * SIZE, shape), hidden


@pytest.mark.parametrize("seed", range(20))
def test_both_ways_read_alike(seed):
    random, helper = np.random.default_rng(seed), compiled()
    shape = HotBufferShape(entries=4 * SIZE, page_rows=SIZE, top_k=TOP_K)
    both = [
        HotBuffers(shape, 1, ROWS, PAGES * SIZE, reads=reads) for reads in (NumpyReads(), helper)
    ]
    for _ in range(8):
        places, rows, entries, hidden = drawn(random)
        results = []
        for buffers in both:
            selection = buffers.reads.away(places, rows, entries, hidden)
            swap = buffers.swap_in(0, rows, selection)
            found = entries + 1000
            copies = buffers.reads.place(places, rows, swap, found)
            parts = (copies.device_pages, copies.device_offsets)
            results.append(
                [selection, found, *parts, copies.host_pages, copies.host_offsets,
                 buffers.resident.copy(), buffers.lru.copy()]
            )  # fmt: skip
        for one, other in zip(*results, strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("rows", "entries", "message"),
    [
        (ints(2), [[0]], "row"),
        (ints(-1), [[0]], "row"),
        (ints(0), [[6]], "entry"),
        (ints(0), [[-1]], "entry"),
        (ints(0, 1), [[0]], "shapes"),
        (np.array([0]), [[0]], "8 bytes an item"),
    ],
)
def test_the_helper_finds_nothing_outside_its_tables(rows, entries, message):
    with pytest.raises(ValueError, match=message):
        compiled().away(two_requests(), rows, np.array(entries), None)


@pytest.mark.parametrize(
    ("row", "selection", "position", "message"),
    [(2, 0, 0, "row"), (1, 6, 0, "entry"), (1, 0, 4, "position"), (1, NONE, 0, "entry")],
)
def test_the_helper_places_nothing_outside_its_tables(row, selection, position, message):
    swap = SwapIn(ints([selection]), ints([position]), np.ones((1, 1), np.bool_), None)
    found = np.zeros((1, 1), np.int64)
    with pytest.raises(ValueError, match=message):
        compiled().place(two_requests(), ints(row), swap, found)


@pytest.mark.parametrize("page_rows", [0, -1, 1 << 31, 1 << 32, 1 << 40])
def test_the_helper_takes_no_page_of_so_many_rows(page_rows):
    """Of 2 ** 32 its own number was 0, by which it divided."""
    places = EntryPlaces(np.zeros((1, 0), np.int32), np.zeros((1, 0), np.int32), page_rows)
    nothing = np.zeros((1, 1), np.bool_)
    with pytest.raises(ValueError, match="shapes"):
        compiled().away(places, ints(0), np.zeros((1, 1), np.int64), None)
    swap = SwapIn(ints([0]), ints([0]), nothing, None)
    with pytest.raises(ValueError, match="shapes"):
        compiled().place(places, ints(0), swap, np.zeros((1, 1), np.int64))


@pytest.mark.parametrize(
    ("row", "position", "message"), [(2, 0, "row"), (-1, 0, "row"), (0, 2, "position")]
)
def test_the_helper_keeps_nothing_outside_its_tables(row, position, message):
    resident, lru = ints([7, 8], [4, 5]), np.zeros((2, 2), np.int16)
    swap = SwapIn(ints([3]), ints([position]), np.ones((1, 1), np.bool_), lru[:1].copy())
    with pytest.raises(ValueError, match=message):
        compiled().keep(ints(row), swap, resident, lru)
    assert resident.tolist() == [[7, 8], [4, 5]]


def test_with_the_helper_reads_are_its():
    assert isinstance(hot_buffer.DEFAULT_READS, type(compiled()))

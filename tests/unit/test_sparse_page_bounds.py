import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratakv.core.ids import NONE
from stratakv.sparse.hot_buffer import HotBuffers, HotBufferShape
from stratakv.sparse.page_bounds import page_bounds, page_scores, recall, select_pages, widen

PAGES, ROWS, KV_HEADS, DIM = 5, 4, 2, 3


def ints(*values):
    return np.array(values, np.int32)


def keys_of(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(PAGES, ROWS, KV_HEADS, DIM)).astype(np.float32)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_no_row_scores_more_than_its_page(seed, shared):
    keys = keys_of(seed)
    rng = np.random.default_rng(seed + 1)
    query = rng.normal(size=(KV_HEADS * shared, DIM)).astype(np.float32)
    filled = rng.integers(1, ROWS + 1, PAGES).astype(np.int32)
    keys[np.arange(ROWS) >= filled[:, None]] = np.nan
    bounds = page_scores(query, page_bounds(keys, filled))
    rows = np.einsum("prkd,khd->pr", keys, query.reshape(KV_HEADS, shared, DIM))
    assert (np.nanmax(rows, 1) <= bounds + 1e-4).all()


def test_the_bound_of_a_page_of_one_row_is_its_score():
    keys, query = keys_of(1)[:, :1], keys_of(2)[0, 0]
    scores = page_scores(query, page_bounds(keys, np.ones(PAGES, np.int32)))
    np.testing.assert_allclose(scores, np.einsum("prkd,kd->p", keys, query), rtol=1e-5)


def test_bounds_grow_row_by_row():
    keys = keys_of(3)
    bounds = page_bounds(keys, np.ones(PAGES, np.int32))
    at = np.arange(PAGES, dtype=np.int32)
    for row in range(1, ROWS):
        bounds = widen(bounds, at, keys[:, row])
    whole = page_bounds(keys, np.full(PAGES, ROWS, np.int32))
    assert (bounds.least == whole.least).all()
    assert (bounds.greatest == whole.greatest).all()


def test_heads_that_share_no_key_evenly_are_refused():
    bounds = page_bounds(keys_of(0), np.ones(PAGES, np.int32))
    with pytest.raises((AssertionError, ValueError)):
        page_scores(np.zeros((3, DIM), np.float32), bounds)


def test_the_best_pages_and_the_newest():
    scores = np.array([[5, 1, 9, 2, 7, 8], [5, 1, 9, 2, 7, 8]], np.float32)
    assert select_pages(scores, ints(6, 4), 3, 1).tolist() == [[2, 4, 5], [0, 2, 3]]
    assert select_pages(scores, ints(6, 4), 2, 2).tolist() == [[4, 5], [2, 3]]
    assert select_pages(scores, ints(2, 0), 3, 1).tolist() == [[0, 1, NONE], [NONE] * 3]
    assert select_pages(scores[:, :2], ints(2, 1), 4, 1).tolist() == [
        [0, 1, NONE, NONE],
        [0, NONE, NONE, NONE],
    ]


def test_of_equal_scores_the_lower_page():
    assert select_pages(np.zeros((1, 6), np.float32), ints(6), 3, 1).tolist() == [[0, 1, 5]]


def test_recall_is_the_weight_on_selected_pages():
    weights = np.array([1, 2, 3, 4, 10], np.float32)
    assert recall(weights, ints(1, NONE), 2) == pytest.approx(7 / 20)
    assert recall(weights, ints(0, 1, 2), 2) == 1.0


def test_selected_pages_go_the_way_of_any_selection():
    shape = HotBufferShape(entries=4, page_rows=1, top_k=3)
    buffers = HotBuffers(shape, 1, 1, 6)
    scores = np.array([[5, 1, 9, 2, 7, 8]], np.float32)
    selected = select_pages(scores, ints(6), 3, 1)
    assert buffers.swap_in(0, ints(0), selected).misses.entries.tolist() == [2, 4, 5]
    again = select_pages(scores[:, ::-1], ints(6), 3, 1)
    assert buffers.swap_in(0, ints(0), again).misses.entries.tolist() == [0, 3]

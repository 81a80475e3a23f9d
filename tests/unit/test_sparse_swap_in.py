import runpy
import sys

import numpy as np
import pytest

from stratakv.core.ids import NONE
from stratakv.sparse import hot_buffer
from stratakv.sparse.hot_buffer import HotBufferShape
from stratakv.sparse.reads import device_rows
from stratakv.sparse.swap_in import empty_marks, plan_swap_in

MOST = 64
HELPER = "stratakv.sparse.compiled_swap_in"


def compiled():
    return pytest.importorskip(HELPER, exc_type=ImportError).compiled_swap_in


PLANNERS = {"numpy": lambda: plan_swap_in, "c": compiled}


def ints(*values):
    return np.array(values, np.int32)


@pytest.fixture(params=PLANNERS)
def one(request):
    """The plan of one request."""
    planner = PLANNERS[request.param]()

    def plan(selection, resident, lru):
        marks = empty_marks(1, MOST)
        order = np.array([lru], np.int16)
        swap = planner(ints(0), ints(selection), ints(resident), order, marks)
        assert (marks == -1).all()
        return swap

    return plan


def test_what_is_there_is_no_miss_and_becomes_the_most_recently_used(one):
    plan = one([7, 5], [5, 6, 7, 8], [0, 1, 2, 3])
    assert plan.positions.tolist() == [[2, 0]]
    assert not plan.missed.any()
    assert plan.lru.tolist() == [[1, 3, 0, 2]]


def test_misses_take_the_least_recently_used_that_is_not_selected(one):
    plan = one([9, 5, 3], [5, 6, 7, 8], [0, 2, 3, 1])
    assert plan.positions.tolist() == [[2, 0, 3]]
    assert plan.missed.tolist() == [[True, False, True]]
    assert plan.misses.entries.tolist() == [9, 3]
    assert plan.misses.positions.tolist() == [2, 3]
    assert plan.lru.tolist() == [[1, 2, 3, 0]]


def test_nothing_selected_is_nowhere(one):
    plan = one([NONE, 6, NONE], [5, 6, NONE, 8], [0, 1, 2, 3])
    assert plan.positions.tolist() == [[NONE, 1, NONE]]
    assert plan.lru.tolist() == [[0, 2, 3, 1]]


def test_an_entry_that_is_selected_twice_is_copied_once(one):
    plan = one([9, 9, 6, 6], [5, 6, 7, 8], [0, 1, 2, 3])
    assert plan.positions.tolist() == [[0, 0, 1, 1]]
    assert plan.misses.entries.tolist() == [9]


def test_every_position_may_be_needed_at_once(one):
    plan = one([8, 7, 6, 5], [5, 6, 7, 8], [3, 2, 1, 0])
    assert plan.positions.tolist() == [[3, 2, 1, 0]]
    plan = one([1, 2, 3, 4], [5, 6, 7, 8], [3, 2, 1, 0])
    assert plan.positions.tolist() == [[3, 2, 1, 0]]


def test_more_than_fits_is_refused(one):
    with pytest.raises((AssertionError, ValueError)):
        one([1, 2, 3], [5, 6], [0, 1])


@pytest.mark.parametrize(
    ("entries", "page_rows", "top_k"), [(4, 2, 5), (5, 2, 3), (32768, 1, 8), (4, 2, 0)]
)
def test_a_shape_that_cannot_work_is_refused(entries, page_rows, top_k):
    with pytest.raises(ValueError, match="allowed"):
        HotBufferShape(entries=entries, page_rows=page_rows, top_k=top_k)


def test_positions_are_rows_of_device_pages():
    positions, pages = ints([0, 3, NONE], [5, 4, 1]), ints([7, 2, 9], [1, 0, 3])
    assert device_rows(positions, pages, 2).tolist() == [[14, 5, NONE], [7, 6, 3]]


def tables(**changed):
    """A sound call of the helper: one request of two, 3 selected, 5 positions."""
    sound = {
        "rows": ints(1),
        "selection": ints([7, 3, NONE]),
        "resident": ints([NONE] * 5, [2, 7, 4, 1, 6]),
        "lru": np.array([[0, 1, 2, 3, 4]] * 2, np.int16),
        "marks": np.full(9, -1, np.int16),
        "positions": ints([0] * 3),
        "missed": np.zeros((1, 3), np.bool_),
        "after": np.zeros((1, 5), np.int16),
    }
    return sound | changed


def test_the_helper_fills_what_it_is_given():
    helper = pytest.importorskip("stratakv.sparse._swap_in", exc_type=ImportError)
    call = tables()
    helper.plan_into(*call.values())
    assert call["positions"].tolist() == [[1, 0, NONE]]
    assert call["missed"].tolist() == [[False, True, False]]
    assert call["after"].tolist() == [[2, 3, 4, 0, 1]]
    assert (call["marks"] == -1).all()


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": ints(2)},
        {"rows": ints(-1)},
        {"rows": ints(0, 1)},
        {"rows": np.array([1], np.int64)},
        {"selection": ints([7, 8, 0])},
        {"selection": ints([7, -2, 0])},
        {"selection": ints([0] * 6)},
        {"selection": ints(7, 3, 1)},
        {"resident": ints([NONE] * 5, [2, 7, 8, 1, 6])},
        {"resident": ints([NONE] * 5, [2, 7, -9, 1, 6])},
        {"resident": ints([NONE] * 3, [2, 7, 4])},
        {"resident": ints([2, 7, 4, 1, 6])},
        {"lru": np.array([[0, 1, 2, 3, 5]] * 2, np.int16)},
        {"lru": np.array([[0, 1, 2, 3, -1]] * 2, np.int16)},
        {"lru": np.array([[1, 1, 1, 1, 1]] * 2, np.int16), "selection": ints([7, 3, 5])},
        {"marks": np.empty(0, np.int16)},
        {"positions": ints([0] * 4)},
        {"missed": np.zeros((2, 3), np.bool_)},
        {"after": np.zeros((1, 4), np.int16)},
    ],
)
def test_the_helper_refuses_what_would_leave_its_tables(changed):
    helper = pytest.importorskip("stratakv.sparse._swap_in", exc_type=ImportError)
    call = tables(**changed)
    with pytest.raises(ValueError, match=r"tables|entry|order|shapes|items"):
        helper.plan_into(*call.values())


def test_without_the_helper_plans_are_made_with_numpy(monkeypatch, caplog):
    compiled()
    monkeypatch.delitem(sys.modules, HELPER)
    monkeypatch.setitem(sys.modules, "stratakv.sparse._swap_in", None)
    monkeypatch.delattr("stratakv.sparse._swap_in")
    fresh = runpy.run_path(str(hot_buffer.__file__))
    assert fresh["DEFAULT_PLANNER"] is plan_swap_in
    assert not caplog.text, "it matters to nobody who has no buffer"
    shape = HotBufferShape(entries=4, page_rows=1, top_k=3)
    fresh["HotBuffers"](shape, plans=1, rows=1, most_entries=8)
    assert "not built" in caplog.text


def test_with_the_helper_it_is_used():
    assert hot_buffer.DEFAULT_PLANNER is compiled()

"""What a lease does to the rows of a path: the same in C and in NumPy, whatever they hold."""

import runpy
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.tree import path_columns
from stratakv.tree.path_columns import SOME_WARM, TIER_BITS, NumpyPathColumns
from stratakv.tree.residency import TIERS_OF, Residency

HELPER = "stratakv.tree._path_columns"
ROWS = 12
KINDS = {"pins": np.int32, "host_pins": np.int32, "rank": np.int64, "need": np.int64}


def compiled():
    """Not built without a compiler."""
    return pytest.importorskip(HELPER, exc_type=ImportError).PathColumns


MAKERS = {"numpy": lambda: NumpyPathColumns, "c": compiled}
every_one = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)


class Table:
    """Columns of ``groups``, and who does things to them."""

    def __init__(self, make, groups=2, state=Residency.DEVICE):
        self.hits = np.zeros(ROWS, np.int32)
        self.by_group = {
            name: [np.zeros(ROWS, dtype) for _ in range(groups)] for name, dtype in KINDS.items()
        }
        self.states = [np.full(ROWS, state, np.uint8) for _ in range(groups)]
        self.paths = make(self.hits, *self.by_group.values(), self.states, TIER_BITS)
        self.evictable = [0] * groups

    def lease(self, path, starts, ranks, hits=1):
        self.paths.lease(np.array(path, np.intp), starts, ranks, hits, self.evictable)

    def release(self, path, starts, ranks):
        return self.paths.release(np.array(path, np.intp), starts, ranks, self.evictable)

    def columns(self):
        found = {f"{name} {at}": c.tolist() for name, of in self.by_group.items()
                 for at, c in enumerate(of)}  # fmt: skip
        return found | {"hits": self.hits.tolist(), "evictable": self.evictable}


@every_one
def test_a_lease_ranks_pins_and_counts_each_groups_own_rows(maker):
    table = Table(maker())
    table.by_group["pins"][0][3] = 1
    table.lease([5, 3, 4], [0, 2], [7, 8])
    assert table.hits.tolist()[3:6] == [1, 1, 1]
    assert table.by_group["rank"][0].tolist()[3:6] == [7, 7, 7]
    assert table.by_group["rank"][1].tolist()[3:6] == [0, 8, 0]
    assert table.by_group["pins"][0].tolist()[3:6] == [2, 1, 1]
    assert table.by_group["pins"][1].tolist()[3:6] == [0, 1, 0]
    assert table.evictable == [-2, -1]


@every_one
def test_a_lease_that_comes_back_counts_no_hit_and_takes_a_rank_for_each_row(maker):
    table = Table(maker())
    table.lease([1, 0], [0, 1], [np.array([8, 9])[::-1], np.array([6])], hits=0)
    assert not table.hits.any()
    assert table.by_group["rank"][0].tolist()[:2] == [8, 9]
    assert table.by_group["rank"][1].tolist()[:2] == [6, 0]


@every_one
@pytest.mark.parametrize("state", Residency)
def test_what_nothing_pins_or_needs_goes_cold_on_the_tiers_that_have_it(maker, state):
    table = Table(maker(), state=state)
    table.lease([1, 2], [0, 0], [5, 5])
    assert table.release([1, 2], [0, 0], [6, 6]) == [6, sum(1 << t for t in TIERS_OF[state])]
    assert table.by_group["rank"][0].tolist()[1:3] == [6, 6]
    assert table.by_group["rank"][1].tolist()[1:3] == [0, 0]
    assert table.evictable == [0, 0]


@every_one
@pytest.mark.parametrize("held", ["pins", "host_pins", "need"])
def test_where_one_row_is_held_or_needed_none_goes_cold(maker, held):
    table = Table(maker())
    table.lease([1, 2], [0, 0], [5, 5])
    table.by_group[held][1][2] += 1
    assert table.release([1, 2], [0, 0], [6, 6]) == [6, SOME_WARM]
    assert table.by_group["rank"][1].tolist()[1:3] == [6, 6]


@every_one
def test_what_others_pin_stays_and_a_group_without_rows_becomes_nothing(maker):
    table = Table(maker())
    for _ in range(2):
        table.lease([1, 2], [0, 2], [5, 5])
    assert table.release([1, 2], [0, 2], [6, 6]) == [0, 0]
    assert table.evictable == [-2, 0]


@given(st.data())
def test_both_do_the_same_to_any_columns(data):
    numbers = st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS)
    states = st.lists(st.sampled_from(list(Residency)), min_size=ROWS, max_size=ROWS)
    groups = data.draw(st.integers(1, 3))
    tables = [Table(make(), groups) for make in MAKERS.values()]
    for group in range(groups):
        given = {name: data.draw(numbers) for name in KINDS}
        now = data.draw(states)
        for table in tables:
            table.states[group][:] = now
            for name, values in given.items():
                table.by_group[name][group][:] = values
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(0, ROWS))]
        starts = [data.draw(st.integers(0, len(path))) for _ in range(groups)]
        ranks = [
            data.draw(st.integers(1, 2**60)) if data.draw(st.booleans())
            else np.arange(start, len(path), dtype=np.int64) + 1
            for start in starts
        ]  # fmt: skip
        release = data.draw(st.booleans())
        found = [
            table.release(path, starts, ranks) if release else table.lease(path, starts, ranks)
            for table in tables
        ]
        assert found[0] == found[1]
        assert tables[0].columns() == tables[1].columns()


@pytest.mark.parametrize(
    ("path", "starts", "ranks", "refusal"),
    [
        ([0, ROWS], [0, 0], [1, 1], IndexError),
        ([0, -1], [0, 0], [1, 1], IndexError),
        ([0, 1], [0], [1, 1], TypeError),
        ([0, 1], [0, 0], [1], TypeError),
        ([0, 1], [0, 0], [1, np.ones(1, np.int64)], ValueError),
        ([0, 1], [0, 0], [1, np.ones(2, np.int32)], TypeError),
        ([0, 1], [0, 0], [1, None], TypeError),
    ],
)
def test_the_helper_refuses_what_is_no_path_of_the_table_and_changes_nothing(
    path, starts, ranks, refusal
):
    table = Table(compiled())
    before = table.columns()
    for call in (table.lease, table.release):
        with pytest.raises(refusal):
            call(path, starts, ranks)
    assert table.columns() == before


def test_the_helper_refuses_columns_that_are_not_of_one_table():
    make = compiled()
    rows = [np.zeros(ROWS, np.int32)]
    ranks, states = [np.zeros(ROWS, np.int64)], [np.zeros(ROWS, np.uint8)]
    for hits, pins, tiers_of, refusal in (
        (np.zeros(ROWS, np.int64), rows, TIER_BITS, TypeError),
        (np.zeros(ROWS + 1, np.int32), rows, TIER_BITS, ValueError),
        (rows[0], [np.zeros(ROWS - 1, np.int32)], TIER_BITS, ValueError),
        (rows[0], rows, TIER_BITS[:-1], ValueError),
    ):
        with pytest.raises(refusal):
            make(hits, pins, rows, ranks, ranks, states, tiers_of)


def test_without_the_helper_numpy_does_it(monkeypatch):
    compiled()
    monkeypatch.setitem(sys.modules, HELPER, None)
    monkeypatch.delattr(HELPER)
    fresh = runpy.run_path(str(path_columns.__file__))
    assert fresh["DEFAULT_PATH_COLUMNS"] is fresh["NumpyPathColumns"]

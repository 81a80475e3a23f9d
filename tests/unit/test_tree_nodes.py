"""The table of nodes by itself: paths through runs, children by tier, and rows that are used again.

0 - 1 - 2 - 5        keys "a", "b", "c", "f", all on the device
      \\ 3 - 4        keys "d", "e", on the host alone
"""

import numpy as np
import pytest

from stratakv.core.ids import NONE, NodeIds, PageKey
from stratakv.testing.specs import small_spec
from stratakv.tree.nodes import ANY, NodeTable, Tier


def keys(text: str) -> list[PageKey]:
    return [PageKey(name.encode()) for name in text]


def rows(*of: int) -> NodeIds:
    return np.array(of, np.intp)


@pytest.fixture
def nodes() -> NodeTable:
    made = NodeTable(small_spec([], page_tokens=1), 8)
    assert made.grow(Tier.DEVICE, NONE, keys("abc")).tolist() == [0, 1, 2]
    assert made.grow(Tier.HOST, 1, keys("de")).tolist() == [3, 4]
    assert made.grow(Tier.DEVICE, 2, keys("f")).tolist() == [5]
    return made


def test_a_node_knows_its_parent_its_depth_and_its_key(nodes: NodeTable) -> None:
    assert nodes.parent[:6].tolist() == [NONE, 0, 1, 1, 3, 2]
    assert nodes.depth[:6].tolist() == [0, 1, 2, 2, 3, 3]
    assert [nodes.key_of(row) for row in range(6)] == keys("abcdef")
    assert nodes.index == {key: row for row, key in enumerate(keys("abcdef"))}
    assert sorted(nodes.rows().tolist()) == list(range(6))
    assert [nodes.holds(row) for row in range(8)] == [True] * 6 + [False] * 2
    assert len(nodes) == 6


def test_children_are_counted_by_the_tier_that_they_came_to(nodes: NodeTable) -> None:
    """The last of each column is the root's."""
    assert nodes.kids[Tier.DEVICE].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 1]
    assert nodes.kids[Tier.HOST].tolist() == [0, 1, 0, 1, 0, 0, 0, 0, 0]
    assert nodes.kids[ANY].tolist() == [1, 2, 1, 1, 0, 0, 0, 0, 1]


def test_a_path_goes_through_runs(nodes: NodeTable) -> None:
    assert [nodes.path(tip).tolist() for tip in (0, 2, 5, 4)] == [
        [0], [0, 1, 2], [0, 1, 2, 5], [0, 1, 3, 4],
    ]  # fmt: skip
    assert [nodes.tail(4, count).tolist() for count in range(5)] == [
        [], [4], [3, 4], [1, 3, 4], [0, 1, 3, 4],
    ]  # fmt: skip
    assert nodes.tail(1, 1).tolist() == [1]
    assert nodes.keys_to(4, 3) == keys("bde")
    assert nodes.keys_to(4, 2) == keys("de")
    assert nodes.keys_to(1, 2) == keys("ab")
    assert nodes.keys_to(5, 0) == []


def test_what_leaves_after_a_child_is_its_own_run_above(nodes: NodeTable) -> None:
    assert [nodes.segment(row).tolist() for row in (0, 2, 5, 3, 4)] == [
        [0], [0, 1, 2], [0, 1, 2, 5], [3], [3, 4],
    ]  # fmt: skip


def test_rows_in_no_order_are_sorted_into_runs_top_first(nodes: NodeTable) -> None:
    assert [part.tolist() for part in nodes.by_run(rows(4, 5, 0, 3, 2))] == [[0, 2, 5], [3, 4]]
    assert [part.tolist() for part in nodes.by_run(rows(1))] == [[1]]
    assert nodes.by_run(rows()) == []


@pytest.mark.parametrize(
    ("text", "low", "high", "end"),
    [
        ("abcf", 0, 4, 4), ("abcx", 0, 4, 3), ("abxy", 0, 4, 2), ("axyz", 0, 4, 1),
        ("wxyz", 0, 4, 0), ("abcf", 0, 2, 2), ("abxy", 2, 4, 2), ("abcx", 1, 4, 3),
        ("abcf", 3, 3, 3), ("abcf", 4, 2, 4), ("", 0, 0, 0),
    ],
)  # fmt: skip
def test_how_far_a_prompt_is_in_the_tree(
    nodes: NodeTable, text: str, low: int, high: int, end: int
) -> None:
    assert nodes.reach(keys(text), low, high) == end


def test_the_newest_chain_that_is_there_has_the_newest_key(nodes: NodeTable) -> None:
    assert nodes.newest_key() == PageKey(b"e")
    nodes.remove(rows(3, 4), from_host=True)
    assert nodes.newest_key() == PageKey(b"f")
    nodes.remove(rows(0, 1, 2, 5), from_host=False)
    assert nodes.newest_key() is None


def test_a_chain_that_leaves_through_two_runs_leaves_nothing(nodes: NodeTable) -> None:
    nodes.hits[:6] = 3
    nodes.remove(rows(2, 5), from_host=False)
    assert (len(nodes), nodes.kids[ANY][1]) == (4, 1)
    assert sorted(nodes.index) == keys("abde")
    nodes.remove(rows(0, 1, 3, 4), from_host=True)
    assert (len(nodes), nodes.index) == (0, {})
    assert not nodes.hits[:8].any()
    assert nodes.kids[ANY].tolist() == [0] * 9
    assert not any(nodes.holds(row) for row in range(8))
    assert nodes.gone.of(keys("abde"), 0, 4).tolist() == [True] * 4
    assert nodes.gone.of(keys("abcf"), 0, 4).tolist() == [True, True, False, False]


def test_a_chain_that_leaves_through_three_runs_leaves_nothing(nodes: NodeTable) -> None:
    nodes.grow(Tier.HOST, 3, keys("g"))  # row 6, beside 4
    nodes.remove(rows(2, 5), from_host=False)
    nodes.remove_one(4, from_host=True)
    nodes.remove(rows(0, 1, 3, 6), from_host=True)
    assert (len(nodes), nodes.index) == (0, {})
    assert nodes.newest_key() is None


def test_a_part_of_a_run_may_leave_and_come_again(nodes: NodeTable) -> None:
    nodes.remove(rows(2, 5), from_host=False)
    fresh = nodes.grow(Tier.DEVICE, 1, keys("xyz"))
    tip = fresh.item(-1)
    assert nodes.path(tip).tolist() == [0, 1, *fresh.tolist()]
    assert nodes.keys_to(tip, 5) == keys("abxyz")
    assert [nodes.key_of(row) for row in (0, 1, 3, 4)] == keys("abde")


def test_one_leaf_leaves_as_a_chain_of_one_does(nodes: NodeTable) -> None:
    nodes.hits[:6] = 3
    for row, top in ((5, 2), (4, 3), (3, 1)):
        nodes.remove_one(row, from_host=row > 4)
        assert not nodes.holds(row)
        assert nodes.kids[ANY].item(top) == (1 if top == 1 else 0)
        assert nodes.hits.item(row) == 0
    assert nodes.index == {key: row for row, key in enumerate(keys("abc"))}
    assert len(nodes) == 3
    assert nodes.gone.of(keys("ed"), 0, 2).tolist() == [False, False]
    assert nodes.gone.of(keys("f"), 0, 1).tolist() == [True]
    assert nodes.newest_key() == PageKey(b"c")


def test_rows_are_used_again_each_by_one_node(nodes: NodeTable) -> None:
    nodes.remove(rows(3, 4), from_host=True)
    nodes.remove_one(5, from_host=False)
    fresh = nodes.grow(Tier.HOST, 0, keys("vwxyz"))
    assert sorted([0, 1, 2, *fresh.tolist()]) == list(range(8))
    assert nodes.path(fresh.item(-1)).tolist() == [0, *fresh.tolist()]
    with pytest.raises(AssertionError, match="more nodes than anchor pages"):
        nodes.grow(Tier.HOST, 0, keys("q"))


def test_long_runs_grow_without_moving_anybody() -> None:
    nodes = NodeTable(small_spec([], page_tokens=1), 200)
    text = [PageKey(bytes([at])) for at in range(200)]
    at, tip = 0, NONE
    for count in (1, 1, 2, 3, 7, 40, 1, 100, 45):
        tip = nodes.grow(Tier.DEVICE, tip, text[at : at + count]).item(-1)
        at += count
        assert nodes.path(tip).tolist() == list(range(at))
        assert nodes.keys_to(tip, at) == text[:at]

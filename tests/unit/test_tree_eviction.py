"""Who leaves, in which order, and what goes along."""

import numpy as np
import pytest

from stratakv.core.ids import GroupId
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.testing.tree_books import DEVICE, HOST, Prefix
from stratakv.tree.check import check
from stratakv.tree.effects import FreeDevice
from stratakv.tree.nodes import Tier
from stratakv.tree.order import EvictionQueue
from tests.tree_walks import left, run, save, serve, tree


@pytest.mark.parametrize("tier", Tier)
def test_an_empty_tree_has_nothing_to_give(tier: Tier) -> None:
    it = tree(KeepWindow(2))
    for group in it.model.groups:
        assert it.evict(tier, group, 5) == 0
        assert it.tree.eviction.evictable(tier, GroupId(group)) == 0


def test_a_queue_that_was_cleared_is_empty() -> None:
    queue = EvictionQueue()
    for key in (3, 1, 2):
        queue.push(key, 0, np.array([key]))
    assert queue.pop()[0] == 1
    assert (len(queue), queue.weight) == (2, 4)
    queue.clear()
    assert (len(queue), queue.weight, queue.batches()) == (0, 0, [])


def test_leaves_go_in_the_order_of_their_last_use() -> None:
    it = tree()
    serve(it, (0,), (1,), (2,))
    it.finish(it.arrive((0,), 1, load=False))  # used again
    order: list[list[Prefix]] = []
    for _ in range(3):
        it.evict(DEVICE, 0, 1)
        order.append(left(it, (0,), (1,), (2,)))
    assert order == [[(0,), (2,)], [(0,)], []]


def test_a_match_is_no_use() -> None:
    it = tree()
    serve(it, (0,), (1,))
    it.match((0,), 1)
    it.evict(DEVICE, 0, 1)
    assert left(it, (0,), (1,)) == [(1,)]


def test_a_partial_hit_does_not_warm_what_lies_below_it() -> None:
    it = tree()
    serve(it, (0, 1), (2,))
    it.finish(it.arrive((0, 5), 2, load=False))
    it.evict(DEVICE, 0, 1)
    assert left(it, (0,), (0, 1), (2,)) == [(0,), (2,)]


def test_a_leaf_that_goes_makes_its_parent_a_candidate() -> None:
    it = tree()
    serve(it, (0, 1, 2))
    assert [it.evict(DEVICE, 0, 1) for _ in range(4)] == [1, 1, 1, 0]


def test_one_eviction_takes_a_chain_and_stops_at_a_branch() -> None:
    it = tree()
    serve(it, (0, 1, 2), (0, 1, 3, 4))
    assert it.evict(DEVICE, 0, 3) == 3
    assert left(it, (0, 1), (0, 1, 2), (0, 1, 3)) == [(0, 1)]


def test_a_chain_that_was_grown_in_two_parts_leaves_as_one() -> None:
    it = tree()
    serve(it, (0, 1, 2), (0, 1, 5, 6))
    assert it.evict(DEVICE, 0, 1) == 1
    assert left(it, (0, 1, 2), (0, 1, 5, 6)) == [(0, 1, 5, 6)]
    assert it.evict(DEVICE, 0, 4) == 4
    assert not len(it.tree)
    it.verify()


def test_another_group_leaves_anywhere_and_alone() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0, 1, 2, 3))
    assert it.evict(DEVICE, 1, 4) == 4
    assert it.match((0, 1, 2, 3), 4) == (0, 0, 4)
    assert it.pools[DEVICE][0].available() == 12


def test_a_leaf_takes_every_group_along() -> None:
    it = tree(KeepWindow(2), KeepBoundary())
    serve(it, (0, 1))
    save(it, (0, 1), 1)
    it.evict(DEVICE, 0, 2)
    free = [[pool.available() for pool in tier] for tier in it.pools]
    assert free == [[16] * 3] * 2


def test_a_window_is_evicted_under_a_held_anchor_where_the_lease_does_not_need_it() -> None:
    it = tree(KeepWindow(1))
    held = run(it, (0, 1, 2))
    assert it.evict(DEVICE, 1, 9) == 2
    it.verify()
    it.finish(held)


def test_the_evictable_count_admits_what_eviction_gives() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0, 1, 2), (0, 3))
    held = it.arrive((0, 3), 2, load=False)
    for group in (1, 0):  # an anchor's leaf would take the window's pages along
        count = it.tree.eviction.evictable(DEVICE, GroupId(group))
        assert it.evict(DEVICE, group, count + 5) == count > 0
    it.finish(held)


# -- an anchor without bytes ---------------------------------------------------------------------


def test_useless_nodes_are_pruned_up_to_a_branch() -> None:
    it = tree(KeepBoundary(), anchor_bytes=False)
    serve(it, (0, 1, 2), (0, 1, 3), generous=False)
    it.evict(DEVICE, 1, 1)
    assert set(it.model.nodes) == {(0,), (0, 1), (0, 1, 3)}
    it.evict(DEVICE, 1, 1)
    assert not len(it.tree)


def test_pruning_stops_at_a_lease() -> None:
    it = tree(KeepBoundary(), anchor_bytes=False)
    serve(it, (0,), (0, 1, 2), generous=False)
    held = it.arrive((0,), 1, load=False)
    it.evict(DEVICE, 1, 9)
    assert set(it.model.nodes) == {(0,)}
    it.verify()
    it.finish(held)
    it.drain()


# -- two tiers -----------------------------------------------------------------------------------


def test_a_saved_leaf_stays_on_the_host() -> None:
    it = tree(KeepWindow(1))
    serve(it, (0, 1))
    for group in (0, 1):
        save(it, (0, 1), group)
        it.evict(DEVICE, group, 9)
    assert it.match((0, 1), 2) == (0, 2, 2)


def test_the_host_gives_its_leaves_first_and_the_nodes_with_them() -> None:
    it = tree()
    serve(it, (0, 1, 2))
    save(it, (0, 1, 2), 0)
    it.evict(DEVICE, 0, 9)
    assert it.evict(HOST, 0, 1) == 1
    assert it.match((0, 1, 2), 3) == (0, 2, 2)
    it.evict(HOST, 0, 9)
    assert not len(it.tree)


def test_a_host_copy_under_a_running_request_may_go() -> None:
    it = tree()
    serve(it, (0, 1))
    save(it, (0, 1), 0)
    held = it.arrive((0, 1), 2, load=True)
    assert it.evict(HOST, 0, 9) == 2
    it.verify()
    it.finish(held)


def test_an_idle_host_subtree_goes_before_the_device_page_above_it() -> None:
    it = tree()
    serve(it, (0,))
    assert it.fetch((0, 1, 2), generous=True)
    it.end_fetch(it.fetches[0], landed=True)
    assert it.evict(DEVICE, 0, 1) == 1
    assert not len(it.tree)
    assert it.pools[HOST][0].available() == 16


def test_a_page_whose_state_is_in_flight_stays_however_many_hang_below_it() -> None:
    it = tree(KeepBoundary())
    serve(it, (0,), generous=False)
    for tip in ((0, 1), (0, 2)):
        assert it.fetch(tip, generous=False)
        it.end_fetch(it.fetches[0], landed=True)
    assert it.backup((0,), 1, 1)
    assert it.evict(DEVICE, 0, 9) == 0
    it.verify()
    it.end_copy(it.copies[0], ok=False)
    assert it.evict(DEVICE, 0, 9) == 1
    assert not len(it.tree)


def test_of_a_batch_those_pages_are_lost_that_had_no_other_copy() -> None:
    it = tree(KeepWindow(4))
    serve(it, (0, 1, 2, 3))
    assert it.backup((0, 1, 2, 3), 1, 1)
    it.end_copy(it.copies[0], ok=True)
    it.finish(it.arrive((0, 1, 2, 3), 4, load=False))
    assert it.evict(DEVICE, 1, 4) == 4
    assert (it.tree.eviction.dropped_dirty, it.tree.eviction.dropped_cold) == (3, 0)


def test_what_is_lost_of_a_chain_goes_at_once_and_what_is_saved_at_once() -> None:
    it = tree()
    serve(it, (0, 1, 2, 3, 4))
    assert it.backup((0, 1, 2, 3, 4), 0, 2)
    it.end_copy(it.copies[0], ok=True)
    effects = it.tree.eviction.evict(DEVICE, GroupId(0), 9)
    assert [len(effect.pages) for effect in effects if isinstance(effect, FreeDevice)] == [3, 2]
    check(it.tree)


def test_a_device_page_stays_while_something_below_it_is_in_flight() -> None:
    it = tree(KeepBoundary())
    serve(it, (0,), generous=False)
    save(it, (0,), 1)
    assert it.fetch((0, 1, 2), generous=False)
    it.end_fetch(it.fetches[0], landed=True)
    request = it.arrive((0, 1), 1, load=False)
    it.extend(request, 1, generous=True)
    it.finish(request)
    assert it.evict(DEVICE, 0, 1) == 1
    assert it.backup((0, 1), 1, 1)
    assert it.evict(DEVICE, 0, 9) == 0
    it.end_copy(it.copies[0], ok=True)
    assert it.evict(DEVICE, 0, 9) == 1
    assert not len(it.tree)

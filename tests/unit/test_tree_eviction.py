"""Who leaves, in which order, and what goes along."""

import numpy as np
import pytest

from stratakv.core.ids import GroupId
from stratakv.spec.retention import KeepBoundary, KeepWindow, Retention
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import DEVICE, HOST, Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_records import Request
from stratakv.tree.check import check
from stratakv.tree.effects import FreeDevice
from stratakv.tree.nodes import Tier
from stratakv.tree.order import COLD, WARM, EvictionQueue


def tree(*rules: Retention, anchor_bytes: bool = True) -> TreeDriver:
    spec = small_spec(rules, page_tokens=1, anchor_bytes=anchor_bytes)
    return TreeDriver(spec, [16] * len(spec.groups), [16] * len(spec.groups))


def run(it: TreeDriver, prompt: Prefix, *, generous: bool = True) -> Request:
    request = it.arrive(prompt, len(prompt) - 1, load=False)
    it.extend(request, len(prompt), generous=generous)
    it.verify()
    return request


def serve(it: TreeDriver, *prompts: Prefix, generous: bool = True) -> None:
    for prompt in prompts:
        request = run(it, prompt, generous=generous)
        it.keep(request, len(prompt), request.continued)
        it.finish(request)
        it.verify()


def save(it: TreeDriver, tip: Prefix, group: int) -> None:
    assert it.backup(tip, group, 99)
    it.end_copy(it.copies[-1], ok=True)
    it.verify()


def left(it: TreeDriver, *prompts: Prefix) -> list[Prefix]:
    return [prompt for prompt in prompts if it.match(prompt, len(prompt))[1] == len(prompt)]


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


# -- checkpoints ---------------------------------------------------------------------------------


def test_pages_without_a_checkpoint_go_before_older_ones_with_one() -> None:
    it = tree(KeepWindow(1))
    serve(it, (0,))
    it.finish(run(it, (1,)))
    it.evict(DEVICE, 1, 1)
    assert left(it, (0,), (1,)) == [(0,)]


def test_a_continued_checkpoint_goes_cold() -> None:
    it = tree(KeepBoundary())
    serve(it, (9,), (0,), (0, 1), generous=False)
    it.evict(DEVICE, 1, 1)
    assert left(it, (9,), (0,), (0, 1)) == [(9,), (0, 1)]


def test_a_continued_checkpoint_where_the_tree_branches_stays() -> None:
    it = tree(KeepBoundary())
    serve(it, (9,), (0,), generous=False)
    both = [it.arrive((0, symbol), 1, load=False) for symbol in (1, 2)]
    for request in both:
        it.extend(request, 1, generous=False)
    for request in both:
        it.keep(request, 2, request.continued)
        it.finish(request)
    it.evict(DEVICE, 1, 1)
    assert left(it, (9,), (0,)) == [(0,)]


def test_a_checkpoint_is_not_kept_where_something_it_needs_has_gone() -> None:
    it = tree(KeepWindow(2))
    request = run(it, (0, 1, 2, 3))
    it.evict(DEVICE, 1, 9)
    it.keep(request, 2, 0)  # the driver expects no effect
    assert not [end for end in range(5) if it.tree.checkpoints.at(request.lease, end)]
    it.verify()
    it.finish(request)
    it.verify()


# -- milestones ----------------------------------------------------------------------------------


def with_milestone(it: TreeDriver, prompt: Prefix, end: int) -> None:
    """Serve a prompt with a checkpoint at its end and a milestone at ``end``."""
    request = run(it, prompt)
    it.pave(request, end)
    it.keep(request, len(prompt), request.continued)
    it.finish(request)
    it.verify()


def test_milestones_go_after_what_is_cold_and_before_older_checkpoints() -> None:
    it = tree(KeepBoundary())
    serve(it, (9,), generous=False)
    with_milestone(it, (0, 1, 2), 1)
    with_milestone(it, (5, 6, 7), 1)
    ends: list[Prefix] = [(9,), (0,), (0, 1), (0, 1, 2), (5,), (5, 6), (5, 6, 7)]
    order: list[list[Prefix]] = []
    for _ in range(4):
        it.evict(DEVICE, 1, 1)
        order.append(left(it, *ends))
        ends = order[-1]
    marked = [(9,), (0,), (0, 1, 2), (5,), (5, 6, 7)]
    assert order[1] == marked
    assert order[2:] == [
        [end for end in marked if end not in gone] for gone in ([(0,)], [(0,), (5,)])
    ]


def test_room_for_milestones_is_made_of_nothing_better() -> None:
    it = tree(KeepBoundary())
    serve(it, (9,), generous=False)
    with_milestone(it, (0, 1, 2), 1)
    assert it.evict_spare(DEVICE, 1, 99) == 2
    assert left(it, (9,), (0,), (0, 1, 2)) == [(9,), (0, 1, 2)]
    it.verify()


def test_a_checkpoint_that_is_continued_becomes_a_milestone() -> None:
    it = tree(KeepBoundary())
    serve(it, (0,), (0, 1), generous=False)
    assert (it.model.checkpoints, it.model.milestones) == ({(0, 1)}, {(0,)})
    it.verify()


def test_a_milestone_from_which_somebody_parts_becomes_a_checkpoint() -> None:
    it = tree(KeepBoundary())
    with_milestone(it, (0, 1, 2), 1)
    serve(it, (0, 5), generous=False)
    assert (it.model.checkpoints, it.model.milestones) == ({(0,), (0, 1, 2), (0, 5)}, set())
    it.verify()


def test_a_milestone_that_has_lost_a_page_when_somebody_parts_stays_one() -> None:
    it = tree(KeepBoundary())
    with_milestone(it, (0, 1, 2), 1)
    request = it.arrive((0, 5), 1, load=False)
    it.extend(request, 1, generous=False)  # it reads the milestone's state no more
    it.evict_spare(DEVICE, 1, 99)
    it.keep(request, 2, request.continued)
    assert (it.model.checkpoints, it.model.milestones) == ({(0, 1, 2), (0, 5)}, {(0,)})
    it.verify()


def test_a_chain_that_goes_counts_what_its_checkpoint_needed_as_worth_it() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0, 1, 2))
    assert it.evict(DEVICE, 0, 3) == 3
    assert (it.tree.eviction.dropped_dirty, it.tree.eviction.dropped_cold) == (5, 1), (
        "of the window the first page"
    )


def test_a_mark_that_goes_lets_the_page_above_its_chain_go_cold() -> None:
    it = tree(KeepWindow(2))
    serve(it, (9,), (0, 1))
    request = it.arrive((0, 1, 2), 2, load=False)
    it.extend(request, 1, generous=True)
    it.keep(request, 3, request.continued)
    it.finish(request)
    assert it.evict(DEVICE, 0, 2) == 2  # (9,) and the end of the longer one
    rank = it.tree.internals.nodes.rank[1][it.tree.internals.nodes.path(it.row((0, 1)))]
    assert (rank < WARM).all()
    it.verify()


def test_a_milestone_that_is_cleared_goes_cold() -> None:
    it = tree(KeepBoundary())
    with_milestone(it, (0, 1, 2), 1)
    with_milestone(it, (5, 6, 7), 1)
    it.evict_spare(DEVICE, 1, 2)
    request = it.arrive((5, 6, 7, 8), 3, load=False)
    it.pave(request, 0, every=1)
    it.finish(request)
    it.evict(DEVICE, 1, 1)
    assert left(it, (0,), (5,)) == [(0,)]


def test_a_page_that_comes_back_to_a_checkpoint_is_as_warm_as_it_was() -> None:
    it = tree(KeepWindow(2))
    request = run(it, (0, 1, 2, 3))
    it.pave(request, 2)
    it.keep(request, 4, request.continued)
    it.finish(request)
    assert it.evict(DEVICE, 1, 9) == 4
    assert it.fetch((0, 1, 2, 3), generous=True)
    it.end_fetch(it.fetches[0], landed=True)
    ranks = it.tree.internals.nodes.rank[1][it.tree.internals.nodes.path(it.row((0, 1, 2, 3)))]
    assert (ranks[2:] >= WARM).all()
    assert ((ranks[:2] > COLD) & (ranks[:2] < WARM)).all()
    it.verify()


def test_a_queue_is_not_rebuilt_before_it_has_four_rows_for_each_page() -> None:
    it = TreeDriver(small_spec([], page_tokens=1), [1000], [1000])
    serve(it, (0,))
    pins, rows = it.tree.internals.pins, it.tree.internals.nodes.path(it.row((0,)))
    queue = pins.queues[DEVICE][0]
    while queue.weight < 4 * 2000 + 4096:
        before = queue.weight
        pins.queue(DEVICE, 0, rows)
        assert queue.weight == before + 2
    for _ in range(2):
        pins.queue(DEVICE, 0, rows)
    assert queue.weight < 6
    it.verify()


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

"""What goes together in one step of an eviction, what holds it back, and what is offered again."""

import numpy as np

from stratakv.core.ids import NONE, GroupId
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepWindow, Retention
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import DEVICE, HOST, Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.tree.check import check
from stratakv.tree.effects import Backup, Effect
from stratakv.tree.order import COLD, WARM

ANCHOR, OTHER = GroupId(0), GroupId(1)


def tree(*rules: Retention, anchor_bytes: bool = True) -> TreeDriver:
    spec = small_spec(rules, page_tokens=1, anchor_bytes=anchor_bytes)
    return TreeDriver(spec, [16] * len(spec.groups), [16] * len(spec.groups))


def serve(it: TreeDriver, *prompts: Prefix, generous: bool = False, keep: bool = True) -> None:
    for prompt in prompts:
        request = it.arrive(prompt, len(prompt) - 1, load=False)
        assert it.extend(request, len(prompt), generous=generous)
        if keep:
            it.keep(request, len(prompt), request.continued)
        it.finish(request)
        it.verify()


def save(it: TreeDriver, tip: Prefix, group: int) -> None:
    assert it.backup(tip, group, 99)
    it.end_copy(it.copies[-1], ok=True)


def fetch(it: TreeDriver, tip: Prefix) -> None:
    assert it.fetch(tip, generous=False)
    it.end_fetch(it.fetches[0], landed=True)


def evicted(it: TreeDriver, tier: int, group: GroupId, count: int) -> int:
    """Without the model, which knows nothing of what a test has done behind its back."""
    found = it.tree.eviction.evict((DEVICE, HOST)[tier], group, count)
    return sum(len(effect.pages) for effect in found if not isinstance(effect, Backup))


# -- what is in flight ---------------------------------------------------------------------------


def test_a_lone_page_whose_state_is_in_flight_stays() -> None:
    it = tree(KeepBoundary())
    serve(it, (0,))
    assert it.backup((0,), 1, 1)
    assert it.evict(DEVICE, 0, 9) == 0
    it.verify()
    it.end_copy(it.copies[0], ok=False)
    assert it.evict(DEVICE, 0, 9) == 1


def test_a_page_that_waited_for_the_load_of_its_state_can_leave_when_it_has_ended() -> None:
    it = tree(KeepBoundary())
    serve(it, (0, 1))
    save(it, (0, 1), 1)
    it.evict(DEVICE, 1, 1)
    it.finish(it.arrive((0, 1), 2, load=True))  # aborted: the load goes on
    assert it.evict(DEVICE, 0, 9) == 0
    it.verify()
    it.end_copy(it.copies[0], ok=True)
    it.verify()
    assert it.evict(DEVICE, 0, 9) == 2


def test_of_a_chain_that_is_held_in_the_middle_what_lies_below_goes() -> None:
    it = tree(KeepBoundary())
    serve(it, (0,), (0, 1))
    assert it.backup((0,), 1, 1)
    assert it.evict(DEVICE, 0, 2) == 1
    assert set(it.model.nodes) == {(0,)}
    assert it.tree.internals.nodes.milestone.item(it.row((0,)))
    it.verify()
    it.end_copy(it.copies[0], ok=True)
    it.verify()


def test_a_page_in_flight_stays_above_one_that_took_a_host_subtree_along() -> None:
    it = tree(KeepBoundary())
    serve(it, (0,), (0, 1))
    fetch(it, (0, 1, 2))
    assert it.backup((0,), 1, 1)
    assert it.evict(DEVICE, 0, 2) == 1
    assert set(it.model.nodes) == {(0,)}
    it.verify()


def test_a_chain_takes_the_host_subtree_that_hangs_beside_it_along() -> None:
    it = tree(KeepBoundary())
    serve(it, (0,), (0, 1))
    fetch(it, (0, 5))
    assert it.evict(DEVICE, 0, 2) == 2
    assert not len(it.tree)
    it.verify()


def test_a_host_page_that_a_state_in_flight_held_can_leave_once_the_device_has_it_too() -> None:
    it = tree(KeepBoundary())
    serve(it, (0,))
    save(it, (0,), 0)
    assert it.evict(DEVICE, 0, 1) == 1
    assert it.backup((0,), 1, 1)
    assert it.evict(HOST, 0, 9) == 0
    request = it.arrive((0,), 0, load=False)
    assert it.extend(request, 1, generous=True)
    it.verify()
    assert it.evict(HOST, 0, 9) == 1
    it.finish(request)


# -- chains --------------------------------------------------------------------------------------


def test_a_beginning_that_was_used_since_stays_when_its_chain_goes() -> None:
    it = tree()
    serve(it, (0, 1, 2), (5,))
    it.finish(it.arrive((0,), 1, load=False))
    assert it.evict(DEVICE, 0, 3) == 3
    assert set(it.model.nodes) == {(0,)}


def test_a_held_beginning_stays_on_the_host_when_its_chain_goes() -> None:
    it = tree()
    serve(it, (0, 1, 2))
    save(it, (0, 1, 2), 0)
    it.evict(DEVICE, 0, 9)
    hold = it.tree.leases.hold(it.keys((0,)), 1, [0])
    assert evicted(it, HOST, ANCHOR, 9) == 2
    check(it.tree)
    it.tree.leases.release(hold)
    assert evicted(it, HOST, ANCHOR, 9) == 1


def test_host_pages_above_a_hole_leave_after_those_below_it() -> None:
    it = tree()
    prompt = (0, 1, 2, 3, 4)
    serve(it, prompt)
    ids = it.pools[HOST][0].alloc(3)
    assert ids is not None
    it.begin_backup({0: [(prompt[:end], 0) for end in (1, 3, 5)]}, {0: ids})
    it.end_copy(it.copies[0], ok=True)
    it.verify()
    assert [it.evict(HOST, 0, count) for count in (1, 9)] == [1, 2]
    it.verify()


def test_rows_that_others_use_by_now_are_pruned_each_for_itself() -> None:
    """A batch may be older than the nodes on its rows, which need not be of one path any more."""
    it = tree(KeepBoundary(), anchor_bytes=False)
    serve(it, (0,), (1,), (2,), keep=False)
    effects: list[Effect] = []
    rows = np.array([it.row(prompt) for prompt in ((0,), (1,), (2,))], np.intp)
    assert it.tree.eviction.take(DEVICE, OTHER, COLD, rows, 3, effects) == 3
    assert not len(it.tree)


def test_what_was_dropped_adds_up() -> None:
    it = tree(KeepBoundary())
    serve(it, (0,), (1,), keep=False)
    eviction = it.tree.eviction
    for done in (1, 2):
        it.evict(DEVICE, 0, 1)
        assert (eviction.dropped_dirty, eviction.dropped_cold) == (done, done)
    serve(it, (0, 1, 2), (5, 6, 7), generous=True)
    for done in (1, 2):  # the states before the last one are worth nothing
        it.evict(DEVICE, 0, 3)
        assert (eviction.dropped_dirty, eviction.dropped_cold) == (2 + 4 * done, 2 + 2 * done)


# -- pins and queues -----------------------------------------------------------------------------


def test_a_device_page_that_waited_for_a_pin_on_the_host_below_it_is_offered_again() -> None:
    it = tree()
    serve(it, (0,))
    fetch(it, (0, 1))
    pins, below = it.tree.internals.pins, np.array([it.row((0, 1))])
    pins.pin(HOST, ANCHOR, below)
    assert evicted(it, DEVICE, ANCHOR, 9) == 0
    pins.unpin(HOST, ANCHOR, below)
    assert evicted(it, DEVICE, ANCHOR, 9) == 2
    assert not len(it.tree)


def test_a_page_that_a_request_stands_on_stays_warm_when_its_copy_has_ended() -> None:
    it = tree(KeepWindow(1))
    request = it.arrive((0,), 0, load=False)
    assert it.extend(request, 1, generous=True)
    save(it, (0,), 1)
    assert it.tree.internals.nodes.rank[1].item(it.row((0,))) >= WARM
    it.finish(request)
    it.verify()


def test_a_queue_that_is_rebuilt_has_what_may_leave_by_rank() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0, 1), (2, 3), (4, 5), (6, 7), generous=True)
    it.evict(DEVICE, 1, 2)  # (0, 1)
    held = it.arrive((2, 3), 2, load=False)
    pins, rank = it.tree.internals.pins, it.tree.internals.nodes.rank[1]
    pins.rebuild(DEVICE, OTHER)
    batches = [rows for _, rows in pins.queues[DEVICE][1].batches()]
    paths = [it.tree.internals.nodes.path(it.row(tip)) for tip in ((4, 5), (6, 7))]
    assert sorted(rows.tolist() for rows in batches) == sorted(path.tolist() for path in paths)
    assert all(len(np.unique(rank[rows])) == 1 for rows in batches)
    it.finish(held)


# -- what comes in -------------------------------------------------------------------------------


def test_an_insert_of_nothing_asks_for_nothing() -> None:
    it = tree(KeepWindow(1))
    nothing = np.empty(0, np.int32)
    assert it.tree.insert([], 0, [nothing, nothing]) == ([], [])
    assert not len(it.tree)


def test_of_a_second_group_that_keeps_all_only_what_came_is_worth_a_copy() -> None:
    it = tree(KeepAll())
    pages = [np.array([0, 1, 2], np.int32), np.array([NONE, 5, NONE], np.int32)]
    found = it.tree.insert(it.keys((0, 1, 2)), 0, pages).effects
    path = it.tree.internals.nodes.path(it.row((0, 1, 2))).tolist()
    assert [(e.group, e.nodes.tolist()) for e in found if isinstance(e, Backup)] == [
        (0, path), (1, path[1:2]),
    ]  # fmt: skip

"""What a cleaner saves first, and what an eviction that knows of it takes first."""

import numpy as np
import pytest

from stratakv.core.ids import NONE, GroupId
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import DEVICE, Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.tree.check import check
from stratakv.tree.residency import ResidencyEvent

ANCHOR, STATE = GroupId(0), GroupId(1)


def tree() -> TreeDriver:
    return TreeDriver(small_spec([KeepBoundary()], page_tokens=1), [16, 16], [16, 16])


def serve(it: TreeDriver, *prompts: Prefix) -> None:
    for prompt in prompts:
        request = it.arrive(prompt, len(prompt) - 1, load=False)
        it.extend(request, len(prompt), generous=True)
        it.keep(request, len(prompt), request.continued)
        it.finish(request)


def save(it: TreeDriver, tip: Prefix, group: int) -> None:
    assert it.backup(tip, group, 99)
    it.end_copy(it.copies[-1], ok=True)
    it.verify()


def named(it: TreeDriver, rows: list[np.ndarray]) -> list[list[Prefix]]:
    return sorted([prefix for prefix, _ in it.places_of(part, 0)] for part in rows)


def evict(it: TreeDriver, group: GroupId, count: int) -> list[Prefix]:
    """Of which prefixes the pages went."""
    nodes = it.tree.internals.nodes
    owner = {
        page: it.prefix_of[key]
        for key, row in nodes.index.items()
        if (page := nodes.page[DEVICE][group].item(row)) >= 0
    }
    effects = it.tree.write_back.evict(group, count)
    check(it.tree)
    pages = [e.pages for e in effects if type(e).__name__ == "FreeDevice" and e.group == group]
    return [owner[page] for part in pages for page in part.tolist()]


def test_the_coldest_leaves_are_saved_first() -> None:
    it = tree()
    serve(it, (0, 1), (2, 3), (4,))
    assert named(it, it.tree.write_back.coldest(ANCHOR, 1)) == [[(0, 1)]]
    assert named(it, it.tree.write_back.coldest(ANCHOR, 3)) == [[(0,), (0, 1)], [(2, 3)]]
    assert len(np.concatenate(it.tree.write_back.coldest(ANCHOR, 99))) == 5


def test_pages_in_use_or_saved_are_not_saved_again() -> None:
    it = tree()
    serve(it, (0, 1), (2,), (3,))
    save(it, (2,), 0)
    held = it.arrive((0, 1), 1, load=False)
    assert named(it, it.tree.write_back.coldest(ANCHOR, 99)) == [[(0, 1)], [(3,)]]
    it.finish(held)


def test_only_checkpoint_pages_of_other_groups_are_saved() -> None:
    it = tree()
    serve(it, (0, 1, 2), (3,))
    assert named(it, it.tree.write_back.coldest(STATE, 99)) == [[(0, 1, 2)], [(3,)]]


def test_what_is_saved_or_being_saved_counts() -> None:
    it = tree()
    serve(it, (0, 1), (2,))
    assert it.tree.write_back.saved(ANCHOR) == 0
    assert it.backup((0, 1), 0, 99)
    assert it.tree.write_back.saved(ANCHOR) == 2
    it.end_copy(it.copies[-1], ok=True)
    assert it.tree.write_back.saved(ANCHOR) == 2
    held = it.arrive((0,), 1, load=False)
    assert it.tree.write_back.saved(ANCHOR) == 1
    it.finish(held)


def test_saved_pages_leave_before_colder_dirty_ones() -> None:
    it = tree()
    serve(it, (0,), (1,), (2,))
    save(it, (2,), 0)
    assert evict(it, ANCHOR, 1) == [(2,)]
    assert evict(it, ANCHOR, 1) == [(0,)]
    assert it.tree.eviction.dropped_dirty == 2  # with its state


def test_pages_that_no_checkpoint_needs_leave_before_saved_ones() -> None:
    it = tree()
    serve(it, (0,), (1, 2))
    save(it, (0,), 1)
    assert evict(it, STATE, 1) == [(1,)]
    assert (it.tree.eviction.dropped_dirty, it.tree.eviction.dropped_cold) == (0, 1)
    assert evict(it, STATE, 1) == [(0,)]
    assert it.tree.eviction.dropped_dirty == 0
    assert evict(it, STATE, 1) == [(1, 2)]
    assert it.tree.eviction.dropped_dirty == 1


def test_a_saved_end_leaves_and_its_dirty_beginning_stays() -> None:
    it = tree()
    serve(it, (0,), (1, 2, 3))
    rows = it.tree.internals.nodes.path(it.tree.internals.nodes.index[it.keys((1, 2, 3))[-1]])[-1:]
    it.tree.copies.begin_backup(ANCHOR, rows, np.array([0], np.int32))
    it.tree.copies.end_backup(ANCHOR, rows, ok=True)
    assert evict(it, ANCHOR, 1) == [(1, 2, 3)]
    assert evict(it, ANCHOR, 9) == [(0,), (1,), (1, 2)]


def test_a_saved_end_leaves_before_its_dirty_beginning_though_they_were_used_together() -> None:
    it = tree()
    serve(it, (0,), (1, 2, 3))
    rows = it.tree.internals.nodes.path(it.row((1, 2, 3)))[-1:]
    it.tree.copies.begin_backup(ANCHOR, rows, np.array([0], np.int32))
    it.tree.copies.end_backup(ANCHOR, rows, ok=True)
    it.tree.leases.release(it.tree.leases.take(it.keys((1, 2, 3)), 3))
    assert evict(it, ANCHOR, 1) == [(1, 2, 3)]


def test_what_is_in_use_is_not_offered_again_before_it_is_let_go() -> None:
    it = tree()
    serve(it, (0,), (1,))
    save(it, (1,), 0)
    held = it.arrive((0,), 1, load=False)
    assert evict(it, ANCHOR, 1) == [(1,)]
    batches = it.tree.internals.pins.queues[DEVICE][ANCHOR].batches()
    assert not [key for key, rows in batches if it.row((0,)) in rows]
    it.finish(held)
    assert evict(it, ANCHOR, 1) == [(0,)]


def milestones(it: TreeDriver, *prompts: Prefix) -> None:
    """Prompts whose first pages have a milestone's state, and their ends a checkpoint's, saved."""
    for prompt in prompts:
        request = it.arrive(prompt, 0, load=False)
        it.extend(request, len(prompt), generous=True)
        it.pave(request, 1)
        it.keep(request, len(prompt), request.continued)
        it.finish(request)
        save(it, prompt, 0)
        save(it, prompt, 1)


def test_room_for_milestones_is_what_leaves_the_host_before_a_page_that_the_device_has() -> None:
    it = tree()
    room = it.tree.write_back.spare_room
    milestones(it, (0, 1), (2, 3), (4, 5))
    assert room(STATE) == 0
    assert it.evict_spare(DEVICE, 1, 1) == 1  # that of (0,)
    assert room(STATE) == 1
    assert it.evict_spare(DEVICE, 1, 2) == 2
    assert room(STATE) == 3
    hold = it.tree.leases.hold_present(it.keys((2, 3)), 2, [0, 0])
    assert room(STATE) == 2
    it.tree.leases.release(hold)
    keys = it.keys((0, 1))
    loading = it.arrive((0, 1), 1, load=True)
    it.end_copy(it.copies[-1], ok=True)
    it.finish(loading)  # on both again, and the youngest
    assert it.match((0, 1), 1) == (1, 1, 1)
    assert (room(STATE), len(keys)) == (2, 2)


def test_of_pages_as_old_as_one_that_the_device_has_none_makes_room() -> None:
    it = TreeDriver(small_spec([KeepWindow(2)], page_tokens=1), [16, 16], [16, 16])
    milestones(it, (0, 1, 2, 3, 4))
    request = it.arrive((0, 1, 2, 3, 4), 5, load=False)
    it.pave(request, 2)
    it.finish(request)
    assert it.evict_spare(DEVICE, 1, 3) == 3  # the window's cold page, and the milestone's
    back = it.tree.internals.nodes.path(it.row((0,)))
    assert it.tree.write_back.spare_room(STATE) == 2
    it.tree.internals.nodes.residency[STATE].move(back, ResidencyEvent.LOAD_BEGUN)
    it.tree.internals.nodes.residency[STATE].move(back, ResidencyEvent.LOAD_DONE)
    assert it.tree.write_back.spare_room(STATE) == 0


def test_room_that_costs_no_checkpoint_is_made_of_what_the_host_has_too() -> None:
    """Once what no checkpoint needs is gone; what the device alone has stays."""
    it = tree()
    for prompt in ((9,), (0, 1), (5, 6)):
        request = it.arrive(prompt, len(prompt) - 1, load=False)
        it.extend(request, len(prompt), generous=False)
        it.keep(request, len(prompt), 0)
        it.finish(request)
    save(it, (0, 1), STATE)
    assert it.evict_spare(DEVICE, STATE, 9) == 1
    pages = [it.model.nodes[prompt][1].pages[DEVICE] for prompt in ((9,), (0, 1), (5, 6))]
    assert [page == NONE for page in pages] == [False, True, False]
    it.verify()


def test_of_an_empty_group_nothing_is_saved() -> None:
    assert tree().tree.write_back.coldest(ANCHOR, 0) == []


@pytest.mark.parametrize(("at", "gone"), [(16, 16), (17, 0)])
def test_a_saved_page_is_looked_for_among_the_sixteen_coldest_beyond_those_wanted(
    at: int, gone: int
) -> None:
    it = TreeDriver(small_spec([], page_tokens=1), [32], [32])
    serve(it, *((symbol,) for symbol in range(20)))
    save(it, (at,), ANCHOR)
    it.tree.internals.pins.rebuild(DEVICE, ANCHOR)  # one batch for each page
    assert evict(it, ANCHOR, 1) == [(gone,)]

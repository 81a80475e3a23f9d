"""What storage holds in the tree: pins for as long as a write or a waiting request takes, which
must never keep on the device what admission counts on.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from stratakv.core.ids import GroupId, NodeIds, PageKey
from stratakv.spec.retention import KeepBoundary, KeepWindow, Retention
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import DEVICE, HOST, PageAt, Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_storing import StoringDriver
from stratakv.tree.check import check
from stratakv.tree.effects import Persist
from stratakv.tree.lease import HostHold
from stratakv.tree.order import COLD, WARM
from stratakv.tree.stored import TOUCH_STEPS, StorageMarks, host_prefix


def tree(*rules: Retention, pages: int = 16) -> tuple[TreeDriver, StoringDriver]:
    spec = small_spec(rules, page_tokens=1)
    it = TreeDriver(spec, [pages] * len(spec.groups), [pages] * len(spec.groups))
    store = StoringDriver(it)
    store.start()
    return it, store


def serve(it: TreeDriver, prompt: Prefix) -> None:
    request = it.arrive(prompt, len(prompt) - 1, load=False)
    assert it.extend(request, len(prompt), generous=False)
    it.keep(request, len(prompt), request.continued)
    it.finish(request)


def save(it: TreeDriver, tip: Prefix) -> None:
    for group in it.model.groups:
        if it.backup(tip, group, 99):
            it.end_copy(it.copies[-1], ok=True)


def device_page_above_a_host_page(it: TreeDriver) -> None:
    """(0,) is on the device alone, and what storage landed below it on the host alone."""
    serve(it, (0,))
    it.fetch((0, 1), generous=True)
    it.end_fetch(it.fetches[0], landed=True)
    assert it.evict(DEVICE, 1, 9)


def test_what_counts_as_evictable_can_be_had_under_a_hold() -> None:
    it, store = tree(KeepWindow(1))
    device_page_above_a_host_page(it)
    assert store.prefetch((0, 1, 1))
    store.squeeze(0)
    assert it.pools[DEVICE][0].available() == 16
    it.verify()


def test_a_hold_of_more_would_keep_a_device_page_that_counts_as_evictable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bug that ``host_prefix`` is there for, and that ``squeeze`` sees it."""
    it, store = tree(KeepWindow(1))
    device_page_above_a_host_page(it)
    rows = it.tree.internals.nodes.path(it.row((0, 1)))[1:]
    assert host_prefix(it.tree.internals.nodes, it.tree.internals.nodes.path(it.row((0, 1)))) == 0
    it.tree.internals.pins.pin(HOST, 0, rows)
    monkeypatch.setattr(it.model, "pinned", pinned_too(it, (0, 1)))
    with pytest.raises(AssertionError, match="evictable pages"):
        store.squeeze(0)


Pinned = tuple[Counter[PageAt], Counter[PageAt]]


def pinned_too(it: TreeDriver, prefix: Prefix) -> Callable[[], Pinned]:
    pinned = it.model.pinned

    def more() -> Pinned:
        device, host = pinned()
        host[prefix, 0] += 1
        return device, host

    return more


@pytest.mark.parametrize("rule", [KeepWindow(2), KeepBoundary()], ids=["window", "state"])
def test_what_counts_as_evictable_can_be_had_while_pages_are_written(rule: Retention) -> None:
    it, store = tree(rule)
    serve(it, (0, 0, 0))
    save(it, (0, 0, 0))
    serve(it, (0, 0, 0, 1))  # on the device alone, below
    assert len(store.writes) == 2
    for group in (1, 0):
        store.squeeze(group)
    assert it.pools[DEVICE][0].available() == 16
    it.verify()
    assert it.evict(HOST, 0, 9) == 0, "all of the path is being written"
    for write in list(store.writes):
        store.end_write(write, [True] * len(write.writing.rows))
    it.verify()
    assert it.evict(HOST, 0, 9) == 3


def test_a_page_below_a_hole_is_not_written_until_the_hole_is_filled() -> None:
    it, store = tree(KeepWindow(1))
    serve(it, (0, 0))
    it.backup((0, 0), 1, 9)
    it.end_copy(it.copies[0], ok=True)
    assert not store.writes
    save(it, (0, 0))
    request = it.arrive((0, 0), 2, load=False)
    store.use(request)
    assert {int(write.writing.group) for write in store.writes} == {0, 1}
    it.verify()


def test_nothing_is_wanted_nor_touched_without_a_store() -> None:
    it, store = tree()
    store.stop()
    serve(it, (0, 0))
    save(it, (0, 0))
    request = it.arrive((0, 0), 2, load=False)
    assert list(it.tree.stored.unstored(request.lease)) == []
    assert list(it.tree.stored.to_touch(request.lease, 10_000)) == []
    assert not store.writes


def touched(it: TreeDriver, prompt: Prefix, step: int) -> list[int]:
    """Depths that storage hears of when ``prompt`` is used."""
    lease = it.tree.leases.take(it.keys(prompt), len(prompt))
    parts = list(it.tree.stored.to_touch(lease, step))
    it.tree.leases.release(lease)
    return [int(depth) for _, rows in parts for depth in it.tree.internals.nodes.depth[rows]]


def test_a_chain_is_touched_once_in_a_while_and_then_all_above_what_is_new() -> None:
    it, _ = tree()
    serve(it, (0, 0))
    save(it, (0, 0))
    assert touched(it, (0, 0), 5) == [0, 1]
    assert touched(it, (0, 0), 5 + TOUCH_STEPS - 1) == []
    assert touched(it, (0,), 5 + TOUCH_STEPS) == [0]
    serve(it, (0, 0, 1))
    save(it, (0, 0, 1))
    assert touched(it, (0, 0, 1), 5 + TOUCH_STEPS + 1) == [0, 1, 2], (
        "no parent older than its child"
    )
    assert touched(it, (0, 0), 5 + TOUCH_STEPS + 1) == []


def test_pages_of_one_write_end_each_for_itself() -> None:
    it, store = tree()
    serve(it, (0, 0, 0))
    save(it, (0, 0, 0))
    store.end_write(store.writes[0], [True, False, True])
    request = it.arrive((0, 0, 0), 3, load=False)
    (effect,) = it.tree.stored.unstored(request.lease)
    assert it.tree.internals.nodes.depth[effect.nodes].tolist() == [1]


def test_what_a_use_finds_missing_in_the_store_is_written_once_more() -> None:
    it, store = tree()
    serve(it, (0, 0))
    save(it, (0, 0))
    store.end_write(store.writes[0], [False, True])
    request = it.arrive((0, 0), 2, load=False)
    store.use(request)
    assert it.did["healed"] == 1
    it.verify()


def test_check_sees_a_write_that_was_forgotten() -> None:
    it, store = tree()
    serve(it, (0,))
    save(it, (0,))
    it.tree.stored.writing.clear()
    with pytest.raises(AssertionError, match="pins leak"):
        check(it.tree)
    assert store.writes


def test_two_writes_of_one_page_hold_it_until_both_have_ended() -> None:
    """A store that was emptied gets the page again while the first write is under way."""
    it, store = tree()
    serve(it, (0,))
    save(it, (0,))
    store.forget()
    store.use(it.arrive((0,), 1, load=False))
    assert len(store.writes) == 2
    it.verify()
    store.end_write(store.writes[0], [False])
    assert it.evict(HOST, 0, 1) == 0
    it.verify()
    store.end_write(store.writes[0], [True])
    it.verify()


def test_a_hold_of_nothing_can_be_released() -> None:
    it, _ = tree(KeepWindow(1))
    hold = it.tree.leases.hold_present([], 0, [0, 0])
    assert (hold.end, hold.starts) == (0, [0, 0])
    it.tree.leases.release(hold)
    assert not it.tree.leases


def test_a_store_is_notified_of_no_page_that_it_lacks() -> None:
    it, store = tree(KeepWindow(1))
    serve(it, (0, 0))
    save(it, (0, 0))
    for write in list(store.writes):
        store.end_write(write, [write.writing.group == 1] * len(write.writing.rows))
    lease = it.tree.leases.take(it.keys((0, 0)), 2)
    stored: StorageMarks = it.tree.stored
    assert [(g, rows.tolist()) for g, rows in stored.to_touch(lease, 0)] == [
        (GroupId(1), [it.row((0, 0))])
    ]


def test_what_the_store_has_of_the_tree_is_listed_by_group_and_no_more() -> None:
    """What storage delivered it has; what was computed here, or has left the tree, it is not known
    to have."""
    it, _ = tree(KeepWindow(1))
    serve(it, (7,))
    it.fetch((0, 1), generous=False)
    it.end_fetch(it.fetches[0], landed=True)
    stored = it.tree.stored
    first, second = it.keys((0, 1))
    assert dict(stored.marked()) == {0: [first, second], 1: [second]}
    assert it.evict(HOST, 0, 1) == 1
    assert dict(stored.marked()) == {0: [first]}
    before = stored.epoch
    stored.forget()
    assert stored.epoch != before
    assert not list(stored.marked())


def test_a_second_hold_of_the_same_pages_ends_by_itself() -> None:
    it, store = tree(KeepWindow(1))
    serve(it, (0, 1))
    save(it, (0, 1))
    for write in list(store.writes):
        store.end_write(write, [True] * len(write.writing.rows))
    leases, evictable = it.tree.leases, it.tree.eviction.evictable
    assert [evictable(HOST, GroupId(group)) for group in (0, 1)] == [2, 1]
    hold = leases.hold_present(it.keys((0, 1)), 2, [0, 0])
    both = hold, leases.again(hold)
    for ended in both:
        check(it.tree)
        assert [evictable(HOST, GroupId(group)) for group in (0, 1)] == [0, 0]
        leases.release(ended)
    check(it.tree)
    assert [evictable(HOST, GroupId(group)) for group in (0, 1)] == [2, 1]


def test_a_hold_lists_its_pages_by_group() -> None:
    it, _ = tree(KeepWindow(1))
    serve(it, (0, 1, 2))
    save(it, (0, 1, 2))
    hold = it.tree.leases.hold_present(it.keys((0, 1, 2)), 3, [1, 0])
    present = it.tree.leases.present(hold, 5)
    assert [flags.tolist() for flags in present] == [
        [False, True, True, False, False], [False, False, True, False, False],
    ]  # fmt: skip
    assert {flags.dtype.name for flags in present} == {"bool"}


def test_rows_of_a_path_are_named_wherever_they_lie_on_it() -> None:
    it, _ = tree()
    serve(it, (0, 1, 2, 3))
    keys, path = it.keys((0, 1, 2, 3)), it.tree.internals.nodes.path(it.row((0, 1, 2, 3)))
    for some in ([0, 1, 2, 3], [1, 3], [2]):
        named, depth = it.tree.stored.names(path[some])
        assert (named, depth.tolist()) == ([keys[at] for at in some], some)


def fetched(it: TreeDriver, path: NodeIds) -> list[PageKey]:
    return it.tree.stored.fetched(HostHold(len(path), [0], path, []))


def test_the_first_page_that_came_from_storage_is_known_as_long_as_it_is_there() -> None:
    it, _ = tree(pages=4)
    serve(it, (0,))
    it.fetch((0, 1, 2), generous=True)
    it.end_fetch(it.fetches[0], landed=True)
    path, keys = it.tree.internals.nodes.path(it.row((0, 1, 2))), it.keys((0, 1, 2))
    found = [fetched(it, path[:end]) for end in (1, 2, 3)]
    assert found == [[], keys[1:2], keys[1:]]
    before = set(path.tolist())
    it.evict(DEVICE, 0, 9)
    it.evict(HOST, 0, 9)
    serve(it, (3, 4, 5))  # on the rows that the others have left
    again = it.tree.internals.nodes.path(it.row((3, 4, 5)))
    assert set(again.tolist()) & before
    assert fetched(it, again) == []


def test_what_a_hold_pins_can_be_marked_as_gone_from_the_store() -> None:
    it, _ = tree(KeepWindow(1))
    it.fetch((0, 1, 2), generous=False)
    it.end_fetch(it.fetches[0], landed=True)
    keys, stored = it.keys((0, 1, 2)), it.tree.stored
    assert dict(stored.marked()) == {0: keys, 1: keys[2:]}
    hold = it.tree.leases.hold_present(keys, 2, [1, 1])
    stored.unmark(hold)
    assert dict(stored.marked()) == {0: [keys[0], keys[2]], 1: keys[2:]}
    it.tree.leases.release(hold)
    stored.unmark(it.tree.leases.hold_present(keys, 3, [0, 0]))
    assert not list(stored.marked())


def test_a_store_that_is_opened_is_not_known_to_have_anything() -> None:
    it, _ = tree()
    it.fetch((0, 1), generous=False)
    it.end_fetch(it.fetches[0], landed=True)
    stored = it.tree.stored
    assert list(stored.marked())
    assert touched(it, (0,), 7) == [0]
    stored.close()
    stored.open()
    assert not list(stored.marked())
    lease = it.tree.leases.hold_present(it.keys((0, 1)), 2, [0])
    (wanted,) = stored.unstored(lease)
    assert it.tree.internals.nodes.depth[wanted.nodes].tolist() == [0, 1]


def test_a_page_whose_anchor_the_host_lacks_is_not_written() -> None:
    it, store = tree(KeepWindow(1))
    serve(it, (0,))
    assert it.backup((0,), 1, 9)
    it.end_copy(it.copies[0], ok=True)
    assert not store.writes
    it.verify()


def test_a_page_that_is_written_again_is_touched_and_those_below_are_not() -> None:
    it, _ = tree()
    serve(it, (0, 0))
    save(it, (0, 0))
    assert touched(it, (0, 0), 5) == [0, 1]
    writing = it.tree.stored.begin(GroupId(0), it.tree.internals.nodes.path(it.row((0,))))
    assert touched(it, (0, 0), 6) == [0]
    it.tree.stored.end(writing, np.ones(1, np.bool_))


def test_what_another_engine_saved_is_worth_an_object_where_it_is_usable() -> None:
    it, _ = tree(KeepWindow(2))
    keys = it.keys((0, 1, 2, 3))
    pages = np.arange(4, dtype=np.int32)
    assert it.tree.adopt_saved(keys[:2], 2, []) == []
    found = [
        [(int(e.group), it.tree.internals.nodes.depth[e.nodes].tolist()) for e in effects]
        for effects in (
            it.tree.adopt_saved(keys[:2], 0, [pages[:2]] * 2),
            it.tree.adopt_saved(keys, 2, [pages[2:]] * 2),
        )
        if all(isinstance(effect, Persist) for effect in effects)
    ]
    assert found == [[(0, [0, 1])], [(0, [2, 3])]], "no checkpoint needs a window yet"
    check(it.tree)


def test_a_page_that_waits_for_its_write_alone_is_not_cold() -> None:
    it, store = tree(KeepBoundary())
    serve(it, (0,))
    save(it, (0,))
    rows, nodes = it.tree.internals.nodes.path(it.row((0,))), it.tree.internals.nodes
    assert len(store.writes) == 2
    request = it.arrive((0, 1), 1, load=False)
    it.extend(request, 1, generous=False)
    it.keep(request, 2, request.continued)  # from now on (0,) is a milestone
    assert nodes.rank[1][rows] >= WARM
    for write in list(store.writes):
        store.end_write(write, [True])
    assert COLD < nodes.rank[1][rows] < WARM
    it.verify()


def test_what_came_from_storage_stays_known_beside_what_was_computed_there() -> None:
    it, _ = tree(KeepWindow(1))
    it.fetch((0, 1), generous=False)  # of the window the last page alone
    it.end_fetch(it.fetches[0], landed=True)
    request = it.arrive((0, 5), 0, load=False)
    assert it.extend(request, 1, generous=True)
    it.finish(request)
    path = it.tree.internals.nodes.path(it.row((0, 1)))
    assert fetched(it, path) == it.keys((0, 1))


def test_a_page_that_storage_has_delivered_anew_is_touched_again() -> None:
    it, _ = tree()
    serve(it, (0,))
    stored, lease = it.tree.stored, it.tree.leases.take(it.keys((0,)), 1)

    def touched(step: int) -> bool:
        return bool(list(stored.to_touch(lease, step)))

    assert not touched(0)
    stored.entered(GroupId(0), lease.path, fetched=True)
    assert touched(1)
    assert not touched(2)
    stored.entered(GroupId(0), lease.path, fetched=True)
    assert touched(3)
    stored.close()
    assert not touched(3 + TOUCH_STEPS)
    it.tree.leases.release(lease)


def test_a_node_on_a_row_that_was_used_before_has_nothing_in_the_store() -> None:
    it, _ = tree(KeepWindow(1))
    it.fetch((0, 1), generous=True)
    it.end_fetch(it.fetches[0], landed=True)
    rows = set(it.tree.internals.nodes.rows().tolist())
    assert it.evict(HOST, 0, 9) == 2
    serve(it, (3, 4))
    assert set(it.tree.internals.nodes.rows().tolist()) == rows
    assert not list(it.tree.stored.marked())


def test_what_the_device_alone_has_is_not_read_for_storage() -> None:
    it, _ = tree(KeepWindow(1))
    serve(it, (0, 0))
    assert it.backup((0, 0), 0, 99)
    it.end_copy(it.copies[0], ok=True)
    lease = it.tree.leases.take(it.keys((0, 0)), 2)
    assert not list(it.tree.stored.unstored(lease))
    it.tree.leases.release(lease)


def test_what_a_single_milestone_needs_is_worth_an_object() -> None:
    it, store = tree(KeepBoundary())
    request = it.arrive((0, 0, 0), 0, load=False)
    assert it.extend(request, 3, generous=True)
    it.pave(request, 2)
    it.finish(request)
    save(it, (0, 0, 0))
    assert [
        it.places_of(write.writing.rows, 1) for write in store.writes if write.writing.group == 1
    ] == [[((0, 0), 1)]]

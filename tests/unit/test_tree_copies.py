"""Backups, loads and fetches: what they hold, what they may cost, and how they end."""

import numpy as np

from stratakv.core.ids import GroupId
from stratakv.spec.retention import KeepBoundary, KeepWindow, Retention
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import DEVICE, HOST, Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.tree.lease import DeviceLease
from stratakv.tree.residency import Residency


def tree(*rules: Retention, device: int = 16, host: int = 16) -> TreeDriver:
    spec = small_spec(rules, page_tokens=1)
    return TreeDriver(spec, [device] * len(spec.groups), [host] * len(spec.groups))


def serve(it: TreeDriver, *prompts: Prefix, generous: bool = False) -> None:
    for prompt in prompts:
        request = it.arrive(prompt, len(prompt) - 1, load=False)
        assert it.extend(request, len(prompt), generous=generous)
        it.keep(request, len(prompt), request.continued)
        it.finish(request)
        it.verify()


def offload(it: TreeDriver, tip: Prefix) -> None:
    """Save everything on a path and take it off the device."""
    for group in it.model.groups:
        if it.backup(tip, group, 99):
            it.end_copy(it.copies[-1], ok=True)
    for group in it.model.groups:
        it.evict(DEVICE, group, 99)
    it.verify()


def state(it: TreeDriver, prefix: Prefix, group: int) -> Residency:
    return it.model.spot((prefix, group)).state


def test_a_page_being_saved_cannot_leave_and_can_afterwards() -> None:
    it = tree()
    serve(it, (0, 1))
    it.backup((0, 1), 0, 99)
    assert it.evict(DEVICE, 0, 9) == it.evict(HOST, 0, 9) == 0
    it.end_copy(it.copies[0], ok=True)
    assert it.evict(DEVICE, 0, 9) == 2
    assert it.match((0, 1), 2) == (0, 2, 2)


def test_a_failed_backup_returns_its_host_pages_and_loses_nothing() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0, 1))
    for group in (0, 1):
        it.backup((0, 1), group, 99)
        it.end_copy(it.copies[0], ok=False)
        it.verify()
    assert [pool.available() for pool in it.pools[HOST]] == [16, 16]
    assert it.match((0, 1), 2) == (2, 2, 2)


def test_a_page_that_is_saved_already_is_not_saved_again() -> None:
    it = tree()
    serve(it, (0, 1))
    it.backup((0, 1), 0, 1)
    it.end_copy(it.copies[0], ok=True)
    assert it.backup((0, 1), 0, 99)
    assert it.copies[0].places[0] == [((0, 1), 0)]
    it.verify()
    it.end_copy(it.copies[0], ok=True)
    assert not it.backup((0, 1), 0, 99)


def test_a_backup_is_dropped_when_the_host_is_full_of_what_is_in_flight() -> None:
    it = tree(host=1)
    serve(it, (0,), (1,))
    assert it.backup((0,), 0, 1)
    assert not it.backup((1,), 0, 1)
    it.end_copy(it.copies[0], ok=True)
    assert it.backup((1,), 0, 1)  # the first one's copy makes room
    it.verify()


def test_making_room_for_a_backup_may_cost_nodes_of_its_own_path() -> None:
    it = tree(host=1)
    serve(it, (0,))
    assert it.fetch((0, 1), generous=True)
    it.end_fetch(it.fetches[0], landed=True)
    assert it.backup((0, 1), 0, 9)
    it.end_copy(it.copies[0], ok=True)
    assert set(it.model.nodes) == {(0,)}
    it.verify()


def test_a_load_brings_back_what_the_end_needs_and_no_more() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0, 1, 2, 3), generous=True)
    offload(it, (0, 1, 2, 3))
    request = it.arrive((0, 1, 2, 3), 4, load=True)
    assert request.lease.end == 4
    assert [len(places) for places in it.copies[0].places.values()] == [4, 2]
    it.verify()
    it.end_copy(it.copies[0], ok=True)
    it.verify()
    it.finish(request)
    assert it.match((0, 1, 2, 3), 4) == (4, 4, 4)


def test_only_the_other_group_is_loaded_where_the_anchor_never_left() -> None:
    it = tree(KeepBoundary())
    serve(it, (0, 1))
    it.backup((0, 1), 1, 9)
    it.end_copy(it.copies[0], ok=True)
    it.evict(DEVICE, 1, 1)
    request = it.arrive((0, 1), 2, load=True)
    assert [len(places) for places in it.copies[0].places.values()] == [0, 1]
    it.finish(request)
    it.drain()


def test_a_declined_load_leaves_the_device_prefix() -> None:
    it = tree(KeepBoundary())
    serve(it, (0,))
    serve(it, (0, 1, 2))
    for group in (0, 1):
        it.backup((0, 1, 2), group, 9)
        it.end_copy(it.copies[0], ok=True)
    it.evict(DEVICE, 0, 2)
    request = it.arrive((0, 1, 2), 3, load=True, decline=True)
    assert request.lease.end == 1
    assert it.did["load declined"] == 1
    it.verify()
    it.finish(request)
    it.drain()


def test_a_load_is_declined_when_running_requests_hold_the_device() -> None:
    it = tree(device=3)
    serve(it, (0, 1))
    offload(it, (0, 1))
    running = it.arrive((2, 3), 0, load=False)
    assert it.extend(running, 2, generous=False)
    request = it.arrive((0, 1), 2, load=True)
    assert request.lease.end == 0
    assert it.match((0, 1), 2) == (0, 2, 2)
    it.verify()
    it.finish(running)
    it.finish(request)


def test_a_second_request_waits_for_the_first_ones_load() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0, 1))
    offload(it, (0, 1))
    first = it.arrive((0, 1), 2, load=True)
    second = it.arrive((0, 1, 5), 3, load=True)
    assert len(it.copies) == 1
    assert second.lease.loading == first.lease.loading == (it.copies[0].ticket,)
    it.finish(first)  # aborted: the copy goes on for the other
    it.verify()
    it.end_copy(it.copies[0], ok=True)
    it.verify()
    it.finish(second)
    it.drain()


def test_while_one_of_two_loads_goes_on_others_wait_for_it() -> None:
    it = tree()
    for tip in ((0, 1), (2,)):
        serve(it, tip)
        offload(it, tip)
    copies = it.tree.copies

    def landing(tip: Prefix) -> bool:
        path = it.tree.internals.nodes.path(it.row(tip))
        indices = np.arange(len(tip))
        return copies.landing(DeviceLease(len(tip), [0, 0], path), GroupId(0), indices)

    assert not landing((2,))
    for tip in ((0, 1), (2,)):
        it.arrive(tip, len(tip), load=True)
    first, second = it.copies
    it.end_copy(first, ok=True)
    assert landing((2,))
    assert not landing((0, 1))
    assert it.arrive((2, 5), 2, load=False).lease.loading == (second.ticket,)
    it.end_copy(second, ok=True)
    assert not landing((2,))
    assert it.arrive((2, 6), 2, load=False).lease.loading == ()
    assert copies.loads == 0
    it.drain()


def test_what_a_checkpoint_needs_is_kept_apart_from_what_milestones_alone_need() -> None:
    it = tree(KeepWindow(2))
    request = it.arrive((0, 1, 2, 3, 4), 0, load=False)
    assert it.extend(request, 5, generous=True)
    it.pave(request, 2)
    it.pave(request, 4)
    it.keep(request, 5, 0)
    path = it.tree.internals.nodes.path(it.row((0, 1, 2, 3, 4)))
    assert it.tree.backups.needed(GroupId(1), path).tolist() == [False, False, False, True, True]
    assert it.tree.backups.needed(GroupId(0), path).all(), "what is kept whole is needed for good"


def test_a_page_that_is_landing_stays_beside_the_one_just_computed() -> None:
    it = tree()
    serve(it, (0, 1))
    offload(it, (0, 1))
    early = it.arrive((0, 1), 0, load=False)
    loading = it.arrive((0, 1), 2, load=True)
    assert it.extend(early, 2, generous=False)
    assert len(early.own) == 2
    it.verify()
    it.end_copy(it.copies[0], ok=True)
    it.verify()
    it.finish(early)
    it.finish(loading)
    it.drain()


def test_a_landing_page_cannot_leave() -> None:
    it = tree()
    serve(it, (0,))
    offload(it, (0,))
    it.finish(it.arrive((0,), 1, load=True))
    assert it.evict(DEVICE, 0, 9) == it.evict(HOST, 0, 9) == 0
    it.end_copy(it.copies[0], ok=True)
    assert it.evict(DEVICE, 0, 9) == 1


def test_what_storage_delivers_twice_is_given_back() -> None:
    it = tree(KeepBoundary())
    for _ in range(2):
        assert it.fetch((0, 1), generous=True)
    for _ in range(2):
        it.end_fetch(it.fetches[0], landed=True)
        it.verify()
    assert [pool.available() for pool in it.pools[HOST]] == [14, 14]
    assert it.match((0, 1), 2) == (0, 2, 2)


def test_a_fetch_gives_a_computed_page_its_host_copy() -> None:
    it = tree()
    assert it.fetch((0, 1), generous=True)
    serve(it, (0, 1))
    it.end_fetch(it.fetches[0], landed=True)
    assert state(it, (0, 1), 0) == Residency.BOTH
    it.drain()


def test_an_abandoned_fetch_leaves_no_trace() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0,))
    assert it.fetch((0, 1, 2), generous=True)
    it.end_fetch(it.fetches[0], landed=False)
    it.verify()
    assert [pool.available() for pool in it.pools[HOST]] == [16, 16]
    assert it.match((0, 1, 2), 3) == (1, 1, 1)

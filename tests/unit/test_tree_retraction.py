"""What a retracted request holds, and what of a state a lease holds. The driver compares every
answer with the model."""

import pytest

from stratakv.core.ids import GroupId
from stratakv.spec.retention import KeepBoundary, KeepWindow, Retention
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import DEVICE, HOST, Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_records import WalkRequest
from stratakv.testing.tree_retraction import RetractionDriver

ANCHOR, OTHER = 0, 1


def tree(rule: Retention, page_tokens: int = 1) -> tuple[TreeDriver, RetractionDriver]:
    it = TreeDriver(small_spec([rule], page_tokens=page_tokens), [8, 8], [8, 8])
    return it, RetractionDriver(it)


def running(it: TreeDriver, prompt: Prefix, *, state: bool = True) -> WalkRequest:
    request = it.arrive(prompt, 0, load=False)
    assert it.extend(request, len(prompt), generous=False, state=state)
    it.verify()
    return request


def end_copies(it: TreeDriver, *, ok: bool = True) -> None:
    for copy in list(it.copies):
        it.end_copy(copy, ok=ok)
    it.verify()


def host_pages(it: TreeDriver) -> list[int]:
    return [pool.capacity - pool.available() for pool in it.pools[HOST]]


def test_a_retracted_request_leaves_the_device_to_others_and_comes_back_with_a_load() -> None:
    it, lot = tree(KeepWindow(1))
    lot.retract(running(it, (0, 1, 2)), 0)
    assert it.tree.eviction.evictable(DEVICE, GroupId(ANCHOR)) == 0  # being saved
    end_copies(it)
    assert it.evict(DEVICE, ANCHOR, 3) == 3
    assert it.evict(DEVICE, OTHER, 1) == 1
    it.verify()
    again = lot.resume(lot.retracted[0], decline=False)
    assert again is not None
    assert again.lease.end == 3
    it.verify()
    assert not lot.retracted


def test_nothing_that_is_held_leaves_the_host() -> None:
    it, lot = tree(KeepWindow(1))
    lot.retract(running(it, (0, 1, 2)), 0)
    end_copies(it)
    assert it.evict(HOST, ANCHOR, 3) == 0
    lot.forget(lot.retracted[0])
    it.verify()
    assert it.evict(HOST, ANCHOR, 3) == 3


def test_a_state_of_its_own_stands_for_the_snapshot_it_began_with() -> None:
    it, lot = tree(KeepBoundary())
    lot.retract(running(it, (0, 1), state=False), 0)
    end_copies(it)
    assert host_pages(it) == [2, 0]


def test_a_snapshot_that_stands_for_the_state_is_held() -> None:
    it, lot = tree(KeepBoundary())
    lot.retract(running(it, (0, 1)), 0)
    end_copies(it)
    assert host_pages(it) == [2, 1]


def test_behind_a_window_fewer_pages_are_held_than_the_page_boundary_needs() -> None:
    it, lot = tree(KeepWindow(2), page_tokens=2)
    lot.retract(running(it, (0, 1)), 1)
    end_copies(it)
    assert host_pages(it) == [2, 1]
    it, lot = tree(KeepWindow(1), page_tokens=2)
    lot.retract(running(it, (0, 1)), 1)
    end_copies(it)
    assert host_pages(it) == [2, 0]
    again = lot.resume(lot.retracted[0], decline=False)
    assert again is not None
    assert again.lease.starts == [0, 2]


def test_who_stands_on_a_lost_page_is_given_up_and_nobody_else() -> None:
    it, lot = tree(KeepWindow(1))
    lot.retract(running(it, (0, 1)), 0)
    lot.retract(running(it, (2, 3)), 0)
    it.end_copy(it.copies[0], ok=False)
    it.verify()
    assert [retracted.request.prompt for retracted in lot.retracted] == [(2, 3)]


def test_a_request_within_its_first_page_stands_on_nothing_that_could_be_lost() -> None:
    it, lot = tree(KeepWindow(2), page_tokens=2)
    lot.retract(it.arrive((0,), 0, load=False), 1)
    lot.retract(running(it, (2, 3)), 0)
    it.end_copy(it.copies[0], ok=False)
    it.verify()
    assert [retracted.request.prompt for retracted in lot.retracted] == [(0,)]
    assert lot.resume(lot.retracted[0], decline=False) is not None


def test_a_page_without_a_host_copy_cannot_be_held() -> None:
    it, _ = tree(KeepWindow(1))
    request = running(it, (0, 1))
    with pytest.raises(AssertionError, match="not on the host"):
        it.tree.leases.hold(it.keys((0, 1)), 2, request.lease.starts)


def test_a_resume_that_is_declined_stays_retracted() -> None:
    it, lot = tree(KeepWindow(1))
    lot.retract(running(it, (0, 1)), 0)
    end_copies(it)
    it.evict(DEVICE, ANCHOR, 2)
    assert lot.resume(lot.retracted[0], decline=True) is None
    it.verify()
    assert len(lot.retracted) == 1


def test_a_lease_that_moves_on_without_a_state_lets_the_last_one_go() -> None:
    it, _ = tree(KeepBoundary())
    request = it.arrive((0, 1), 0, load=False)
    it.extend(request, 1, generous=False)
    assert it.tree.leases.sole(request.lease, GroupId(OTHER)) == 1
    it.extend(request, 1, generous=False, state=False)
    it.verify()
    assert request.lease.starts == [0, 2]
    assert it.tree.eviction.evictable(DEVICE, GroupId(OTHER)) == 1


def test_a_state_given_late_ends_a_prefix() -> None:
    it, _ = tree(KeepBoundary())
    request = running(it, (0, 1), state=False)
    assert it.match((0, 1), 2)[0] == 0
    assert it.snapshot(request)
    it.keep(request, 2, 0)
    it.finish(request)
    it.verify()
    assert it.match((0, 1), 2)[0] == 2


def test_a_rolling_checkpoint_takes_the_place_of_the_one_before() -> None:
    it, _ = tree(KeepBoundary())
    request = it.arrive((0, 1, 2), 0, load=False)
    for _ in range(3):
        it.extend(request, 1, generous=False)
        it.roll(request)
        it.verify()
    marked = [it.tree.checkpoints.at(request.lease, end) for end in range(4)]
    assert marked == [False, False, False, True]

"""What the cache's own look at itself finds, and what it says of how it stands."""

import numpy as np
import pytest

from stratakv.cache.records import CacheUse, Refusal
from stratakv.core.ids import GroupId
from stratakv.policy.losses import LossCause
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.testing.specs import small_spec
from stratakv.tree.nodes import Tier
from tests.cache_machine import Asked, CacheMachine, wide_spec
from tests.small_cache import SmallCache

SPEC = small_spec([KeepWindow(3), KeepBoundary()], page_tokens=2)
A = [1] * 7


def cache_of(device=12, host=0, **settings):
    return SmallCache(SPEC, device, host, **settings)


def test_a_lease_without_its_request_is_found():
    cache = cache_of()
    cache.serve(A)
    lease = cache.tiers.lease(cache.ask(A).prefix.keys, 3)
    with pytest.raises(AssertionError, match="a lease leaks"):
        cache.check()
    cache.tiers.release(lease)
    cache.check()
    hold = cache.tiers.hold(cache.ask(A).prefix.keys, 0)
    cache.check()
    cache.tiers.release(hold)


def test_a_row_without_its_request_is_found():
    cache = cache_of()
    row = cache.rows.open_row()
    with pytest.raises(AssertionError, match="a row is nobody's"):
        cache.check()
    assert row is not None
    cache.rows.close_row(row)
    cache.check()


def test_a_known_token_that_is_neither_hit_nor_lost_is_found():
    cache = cache_of()
    cache.admission.losses.lost[LossCause.DEVICE_RETRACTED] += 1
    with pytest.raises(AssertionError, match="a known token has no reason"):
        cache.check()


@pytest.mark.parametrize("tier", Tier, ids=lambda tier: tier.name)
def test_a_page_that_nobody_has_is_found_in_every_pool(tier):
    for group in range(3):
        cache = cache_of(host=4)
        running = cache.enter(A)
        cache.compute(running.row, A, 0)
        cache.check()
        cache.tiers.pools.tiers[tier][group].alloc(1)
        with pytest.raises(AssertionError, match=f"{tier.name} pages of group g{group}"):
            cache.check()


def test_retracted_requests_count_until_their_last_copy_has_ended():
    cache = cache_of(host=12)
    running = cache.enter(A)
    cache.compute(running.row, A, 0)
    assert len(cache.retraction) == 0
    retracted = cache.retract(running.row, np.array(A, np.int32))
    assert retracted in cache.retraction
    assert len(cache.retraction) == 2, "one is held, and its pages are on their way"
    cache.check()
    assert not cache.retraction.saved(retracted)
    cache.progress.settle()
    cache.progress.tick()
    assert cache.retraction.saved(retracted)
    assert len(cache.retraction) == 1
    cache.check()
    found = cache.admission.resume(retracted, cache.ask(A, again=True))
    assert not isinstance(found, Refusal)
    assert found.computed == len(A)
    assert len(cache.retraction) == 1, "its pages are on their way back"
    cache.check()
    cache.release(found.row, np.array(A, np.int32))
    cache.progress.settle()
    assert len(cache.retraction) == 0
    cache.check()
    counters = cache.tiers.pools.counters
    assert (counters.retracted, counters.retracted_unsaved) == (1, 0)
    assert counters.retracted_pages > 0


@pytest.mark.parametrize("ended", [False, True])
def test_one_that_is_forgotten_gives_its_host_pages_back(*, ended: bool):
    cache = cache_of(host=12)
    running = cache.enter(A)
    cache.compute(running.row, A, 0)
    retracted = cache.retract(running.row, np.array(A, np.int32))
    if ended:
        cache.progress.settle()
        cache.progress.tick()
    cache.retraction.forget(retracted)
    assert retracted not in cache.retraction
    cache.check()
    assert (len(cache.retraction) == 0) == ended, "what no copy writes is free at once"
    cache.progress.settle()
    cache.progress.tick()
    assert len(cache.retraction) == 0
    cache.check()
    assert cache.progress.flush()
    host = cache.tiers.pools.tiers[Tier.HOST]
    assert [space.available() for space in host] == [12] * 3


def test_one_that_the_host_cannot_hold_is_counted_and_computed_again():
    cache = cache_of(host=0)
    running = cache.enter(A)
    cache.compute(running.row, A, 0)
    retracted = cache.retract(running.row, np.array(A, np.int32))
    assert retracted not in cache.retraction
    counters = cache.tiers.pools.counters
    assert (counters.retracted, counters.retracted_unsaved) == (1, 1)
    found = cache.admission.resume(retracted, cache.ask(A, again=True))
    assert not isinstance(found, Refusal)
    lost = cache.admission.losses.lost[LossCause.DEVICE_RETRACTED]
    assert lost == len(A) - found.computed
    cache.check()


def test_what_fits_is_what_is_free_or_can_be_made_so():
    for tokens in range(1, 20):
        cache = cache_of(device=12)
        running = cache.enter([3] * tokens)
        rows = np.array([running.row])
        pages = -(-tokens // 2)
        cache.tiers.pools.tiers[Tier.DEVICE][0].alloc(12 - pages)
        starts = np.zeros(1, np.int64)
        assert cache.fits(starts, np.array([tokens], np.int64))
        assert not cache.fits(starts, np.array([2 * pages + 1], np.int64))
        cache.extend(rows, starts, np.array([tokens], np.int64))
        assert cache.fits(np.array([tokens], np.int64), np.array([2 * pages], np.int64))
        assert cache.free_pages()[0] == 0


def test_pages_for_several_rows_go_each_where_it_belongs():
    cache = cache_of(device=20)
    rows = np.array([cache.enter([n] * 8).row for n in (1, 2, 3)])
    starts = np.array([0, 0, 0], np.int64)
    ends = np.array([3, 2, 8], np.int64)
    cache.extend(rows, starts, ends)
    for group in (0, 1):
        mapped = [(cache.rows.pages(GroupId(group))[row] >= 0).tolist() for row in rows]
        assert [sum(row) for row in mapped] == [2, 1, 4]
        assert all(row == sorted(row, reverse=True) for row in mapped)
    before = cache.free_pages()
    cache.extend(rows, ends, np.array([4, 3, 8], np.int64))
    assert [had - has for had, has in zip(before, cache.free_pages(), strict=True)] == [1, 1, 0]
    assert (cache.rows.pages(GroupId(0))[rows[1]] >= 0).tolist()[:3] == [True, True, False]


@pytest.mark.parametrize("leave", ["release", "drop", "retract"])
def test_who_leaves_before_its_pages_are_back_waits_for_them(leave):
    """They are its own: freed, they would be another's when the copy writes them."""
    machine = CacheMachine(wide_spec(3, KeepBoundary()), 0, [40, 40], 60)
    one = Asked("0", [1] * 7, 20, CacheUse.ALL, prompt=7)
    machine.waiting.append(one)
    machine.admit()
    for _ in range(3):
        machine.step()
    machine.retract()
    machine.cache.progress.settle()
    machine.admit()
    assert one.tickets
    flights = machine.cache.tiers.copies.flights
    assert flights.under_way(one.tickets)
    tokens = np.array(one.known[: one.computed], np.int32)
    if leave == "drop":
        machine.cache.drop(one.row)
    else:
        getattr(machine.cache, leave)(one.row, tokens)
    assert not flights.under_way(one.tickets[-1:])
    machine.cache.check()

"""What waits to be saved when pages are taken, and what a retraction has lost when a copy fails."""

import numpy as np
import pytest

from stratakv.cache.records import Admission, CacheUse, Refusal
from stratakv.spec.retention import KeepBoundary
from stratakv.testing.specs import small_spec
from stratakv.transfer.copy_plan import Direction
from stratakv.tree.nodes import Tier
from tests.cache_machine import Asked, CacheMachine, wide_spec
from tests.small_cache import SmallCache

A, B = [1] * 9, [2] * 9


def test_to_admit_drops_nothing_that_waits_to_be_saved():
    """A request that has just ended has left it, and no tick has come since."""
    cache = SmallCache(small_spec([], page_tokens=2), 6, 12)
    found = cache.enter(A)
    cache.compute(found.row, A, 0)
    cache.release(found.row, np.array(A, np.int32))
    assert cache.admission.admit(cache.ask(B)) is Refusal.NO_PAGES, "all that is there is copied"
    cache.progress.settle()
    assert isinstance(cache.admission.admit(cache.ask(B)), Admission)
    assert cache.tiers.pools.counters.dropped_dirty_pages == 0
    assert cache.admission.match(cache.ask(A).prefix, len(A)).end == 4
    cache.check()


def test_to_come_back_drops_nothing_that_waits_to_be_saved():
    cache = SmallCache(small_spec([], page_tokens=2), 6, 20)
    found = cache.enter(A)
    cache.compute(found.row, A, 0)
    retracted = cache.retract(found.row, np.array(A, np.int32))
    cache.progress.settle()
    cache.progress.tick()
    found = cache.enter(B)
    cache.compute(found.row, B, 0)
    cache.release(found.row, np.array(B, np.int32))
    assert cache.admission.resume(retracted, cache.ask(A, again=True)) is Refusal.NO_PAGES
    cache.progress.settle()
    assert isinstance(cache.admission.resume(retracted, cache.ask(A, again=True)), Admission)
    assert cache.tiers.pools.counters.dropped_dirty_pages == 0
    cache.check()


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_one_whose_copy_fails_is_counted_as_not_saved_and_holds_nothing(failing):
    """The pages of the tree leave with the first plan, its own with the second."""
    machine = CacheMachine(wide_spec(3, KeepBoundary()), 0, [40, 40], 60)
    one = Asked("0", [1] * 7, 20, CacheUse.ALL, prompt=7)
    machine.waiting.append(one)
    machine.admit()
    for _ in range(3):
        machine.step()
    machine.cache.progress.settle()
    for _ in range(3):
        machine.step()
    machine.retract()
    plans = len(machine.transfer.queued[Direction.BACKUP])
    assert plans == 2
    for at in range(plans):
        machine.transfer.end(Direction.BACKUP, ok=at != failing)
    machine.cache.progress.tick()
    machine.cache.check()
    saved = failing is None
    assert (one.retracted in machine.cache.retraction) == saved
    counters = machine.cache.tiers.pools.counters
    assert (counters.retracted, counters.retracted_unsaved) == (1, not saved)
    assert len(machine.cache.retraction) == saved
    machine.admit()
    assert one.row >= 0
    machine.run(0, [])


@pytest.mark.parametrize("tokens", range(1, 8))
@pytest.mark.parametrize("rules", [[], [KeepBoundary()]])
def test_however_short_it_is_it_comes_back_from_the_host(rules, tokens):
    cache = SmallCache(small_spec(rules, page_tokens=2), 12, 12)
    known = [1] * tokens
    found = cache.enter(known, more=2)
    cache.compute(found.row, known, 0)
    retracted = cache.retract(found.row, np.array(known, np.int32))
    cache.progress.push_out(Tier.DEVICE)
    cache.progress.tick()
    back = cache.admission.resume(retracted, cache.ask(known, 2, again=True))
    assert isinstance(back, Admission)
    assert (back.computed, bool(back.tickets)) == (tokens, True)
    assert back.cached.host == tokens // 2 * 2
    cache.check()
    cache.progress.settle()
    cache.compute(back.row, [*known, 5], tokens)
    cache.check()


def test_it_is_saved_where_copies_of_others_leave_the_host_for_it():
    """The host has just the pages that it needs, and they are another prompt's."""
    cache = SmallCache(small_spec([], page_tokens=2), 12, 5)
    cache.serve([*B, 5])
    running = cache.enter(A)
    cache.compute(running.row, A, 0)
    cache.progress.settle()
    retracted = cache.retract(running.row, np.array(A, np.int32))
    assert retracted in cache.retraction
    cache.progress.settle()
    cache.check()


def test_a_page_for_what_was_never_computed_is_not_saved():
    """The next step had been given it when the request was retracted."""
    cache = SmallCache(small_spec([], page_tokens=2), 12, 12)
    row, tokens = cache.enter([1] * 4, more=4).row, np.array([1] * 4, np.int32)
    cache.compute(row, [1] * 4, 0)
    cache.extend(np.array([row]), np.array([4], np.int64), np.array([5], np.int64))
    retracted = cache.retract(row, tokens)
    assert cache.tiers.pools.counters.retracted_pages == 0, "those of the tree are being saved"
    cache.progress.settle()
    cache.check()
    back = cache.admission.resume(retracted, cache.ask([1] * 4, 4, again=True))
    assert isinstance(back, Admission)
    assert (back.computed, len(back.tickets)) == (4, 0)
    cache.check()

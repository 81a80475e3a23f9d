"""What waits to be saved when pages are taken, and what a retraction has lost when a copy fails."""

import numpy as np
import pytest

from stratakv.cache.records import Admission, CacheUse, Refusal
from stratakv.spec.retention import KeepBoundary
from stratakv.testing.specs import small_spec
from stratakv.transfer.copy_plan import Direction
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

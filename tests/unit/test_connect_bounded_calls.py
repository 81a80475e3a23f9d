"""How long callers of a store wait, and what nobody waits for."""

from threading import Event

import pytest

from stratakv.connect.bounded_calls import MOST_POSTED, BoundedCalls, NoAnswer
from stratakv.core.clock import MonotonicClock
from stratakv.storage.backend import StoreFormat
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.patience import PATIENCE_S


@pytest.fixture
def calling():
    """Makes calls of a backend that wait so long, and ends them."""
    made = []

    def make(patience_s):
        backend = MemoryBackend(StoreFormat(spec_digest=bytes(16), page_bytes=(8,)))
        made.append(BoundedCalls(backend, MonotonicClock(), patience_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_call_is_late_once_it_stands_still(calling):
    calls, go_on = calling(0.01), Event()
    seen = iter([0, 1, 2, 2])
    answer = calls.call(lambda _: go_on.wait(PATIENCE_S), lambda: next(seen))
    assert answer is NoAnswer.LATE
    assert list(seen) == [], "it was waited for as long as it went on"
    assert calls.off
    go_on.set()


def test_a_store_that_works_is_not_off(calling):
    calls = calling(PATIENCE_S)
    assert calls.call(lambda _: calls.off) is False


def test_what_is_posted_is_done_in_its_turn_and_its_error_costs_nothing(calling):
    calls, done = calling(PATIENCE_S), []
    calls.post(lambda _: 1 // 0)
    calls.post(lambda _: done.append(1))
    assert calls.call(lambda _: list(done)) == [1]
    assert not calls.off


def test_a_store_that_hangs_keeps_few_that_nobody_waits_for(calling):
    calls, go_on, done = calling(PATIENCE_S), Event(), []
    begun = Event()
    calls.post(lambda _: (begun.set(), go_on.wait(PATIENCE_S)))
    assert begun.wait(PATIENCE_S)
    for _ in range(2 * MOST_POSTED):
        calls.post(lambda _: done.append(1))
    go_on.set()
    assert calls.call(lambda _: len(done)) == MOST_POSTED

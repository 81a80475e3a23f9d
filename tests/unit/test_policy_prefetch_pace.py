"""When a prefetch begins, begins again, and is waited for; and what many of them add up to."""

import numpy as np
import pytest

from stratakv.core.ids import RequestId
from stratakv.policy.prefetch import HostSpace, PrefetchRules, Probing
from stratakv.policy.prefetch_book import PrefetchBook
from stratakv.policy.prefetch_ends import CachedPrefix
from stratakv.policy.prefetch_pace import (
    BestEffort,
    FetchStart,
    PrefetchPolicy,
    Retry,
    Timeout,
    WaitComplete,
    allowance_s,
    prefetch_policy,
    stops,
)
from stratakv.policy.prefetch_reasons import FetchOutcome, Reason
from stratakv.testing.specs import small_spec

PAGE = 4


def policy(**changes):
    return PrefetchPolicy(**{"threshold_tokens": 8, "budget_tokens": 64, **changes})


# -- whether to ask ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "in_flight", "start"),
    [
        (7, 0, FetchStart.TOO_SHORT),
        (8, 0, FetchStart.PROBE),
        (8, 63, FetchStart.PROBE),
        (8, 64, FetchStart.RATE_LIMITED),
        (7, 64, FetchStart.TOO_SHORT),
        (500, 0, FetchStart.PROBE),
    ],
)
def test_storage_is_asked_where_it_may_be_worth_it_and_the_budget_is_not_used_up(
    ahead, in_flight, start
):
    assert policy().weigh(ahead, in_flight) is start


def test_the_usual_threshold_is_256_tokens_or_a_page():
    assert prefetch_policy(64, 100, Timeout()).threshold_tokens == 256
    assert prefetch_policy(1024, 100, Timeout()).threshold_tokens == 1024
    assert prefetch_policy(64, 100, Timeout()).budget_tokens == 3200
    assert prefetch_policy(64, 100, Timeout(), share=1).budget_tokens == 6400


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: policy(threshold_tokens=0), "threshold_tokens 0"),
        (lambda: policy(budget_tokens=0), "budget_tokens 0"),
        (lambda: prefetch_policy(64, 100, Timeout(), share=0), "share 0"),
        (lambda: prefetch_policy(64, 100, Timeout(), share=1.5), "share 1.5"),
        (lambda: Timeout(base_s=-1), "base_s=-1"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_least_settings_are_allowed():
    assert allowance_s(Timeout(base_s=0, per_1k_tokens_s=0, most_s=0), 4096) == 0
    least = PrefetchPolicy(threshold_tokens=1, budget_tokens=1)
    assert least.weigh(1, 0) is FetchStart.PROBE
    assert prefetch_policy(1, 1, BestEffort()).budget_tokens == 1
    assert prefetch_policy(1, 1, BestEffort()).stop == BestEffort()


def test_a_retry_comes_every_eight_steps_and_eight_times():
    steps, before = [], None
    while (before := policy().retry(before, steps[-1] if steps else 3)) is not None:
        steps.append(before.at_step)
    assert steps == [11, 19, 27, 35, 43, 51, 59, 67]


def test_a_retry_is_never_for_the_head_of_the_queue():
    retry = Retry(8, 1)
    assert not retry.due(7, head=False)
    assert retry.due(8, head=False)
    assert not retry.due(8, head=True)


# -- how long to wait ----------------------------------------------------------------------------


def test_what_each_stop_policy_does_when_its_request_could_go():
    assert [stops(BestEffort(), deadline_passed=late) for late in (False, True)] == [True, True]
    assert [stops(WaitComplete(), deadline_passed=late) for late in (False, True)] == [False] * 2
    assert [stops(Timeout(), deadline_passed=late) for late in (False, True)] == [False, True]


def test_a_timeout_grows_with_what_is_fetched_up_to_a_bound():
    assert allowance_s(Timeout(), 0) == 1.0
    assert allowance_s(Timeout(), 4096) == 2.0
    assert allowance_s(Timeout(most_s=5), 1 << 20) == 5.0
    assert allowance_s(Timeout(), 1 << 30) == 30.0
    assert allowance_s(BestEffort(), 4096) == 0.0
    assert allowance_s(WaitComplete(), 4096) is None


# -- the book ------------------------------------------------------------------------------------


@pytest.fixture
def rules():
    return PrefetchRules(small_spec((), page_tokens=PAGE), policy())


@pytest.fixture
def book(rules):
    return PrefetchBook(rules, PAGE)


def request(number):
    return RequestId(f"r{number}")


def probing(book, of, limit=8):
    return Probing(CachedPrefix(0, (np.zeros(limit, np.bool_),)), book.before(of))


def answered(rules, book, probe, pages, free=99):
    there = (np.arange(probe.held.limit) < pages,)
    room = HostSpace((free,), (0,))
    return rules.answered(probe, there, rules.usable(probe, there), room, book.in_flight_tokens)


def begin(rules, book, of, pages, step=0, free=99):
    probe = probing(book, of)
    book.move(of, probe, step)
    state = answered(rules, book, probe, pages, free)
    book.move(of, state, step)
    return state


def land(rules, book, of, state, arrived):
    count = len(state.plan.objects.pages)
    arrivals = np.full(count, FetchOutcome.MISSED, np.uint8)
    arrivals[:arrived] = FetchOutcome.ARRIVED
    ends = rules.landable(state, arrivals)
    after = rules.arrived(state, arrivals, ends, Reason.DEADLINE)
    book.move(of, after, 0)
    return after


def test_tokens_in_flight_are_those_of_the_shrunk_length_and_come_back_on_every_exit(rules, book):
    probe = probing(book, request(0))
    book.move(request(0), probe, 0)
    assert book.in_flight_tokens == 0
    states = [begin(rules, book, request(i), pages=6, free=3 + i) for i in range(3)]
    assert book.in_flight_tokens == (3 + 4 + 5) * PAGE
    land(rules, book, request(0), states[0], arrived=3)
    assert book.in_flight_tokens == (4 + 5) * PAGE
    land(rules, book, request(1), states[1], arrived=0)
    assert book.in_flight_tokens == 5 * PAGE
    book.move(request(2), rules.abandon(states[2], Reason.ABORTED), 0)
    assert book.in_flight_tokens == 0


def test_the_budget_holds_back_the_next_one_until_there_is_room(rules, book):
    first = begin(rules, book, request(0), pages=8)
    begin(rules, book, request(1), pages=8)
    assert book.in_flight_tokens == 64
    limited = begin(rules, book, request(2), pages=2)
    assert limited.reason is Reason.RATE_LIMITED
    land(rules, book, request(0), first, arrived=8)
    assert book.due(8, head=None) == [request(2)]
    assert begin(rules, book, request(2), pages=2, step=8).tokens == 2 * PAGE
    assert book.due(99, head=None) == []


def test_what_was_put_off_is_due_in_order_and_step_by_step(book):
    for step in range(3):
        book.put_off(request(step), step)
    assert book.due(7, head=None) == []
    assert book.due(9, head=None) == [request(0), request(1)]
    assert book.due(10, head=request(0)) == [request(1), request(2)]
    book.put_off(request(0), 9)
    assert book.due(10, head=None) == [request(1), request(2)]
    assert book.due(17, head=None) == [request(1), request(2), request(0)]


def test_what_was_put_off_and_is_being_asked_again_is_not_due(book):
    book.put_off(request(0), 0)
    book.put_off(request(1), 0)
    assert book.due(8, head=None) == [request(0), request(1)]
    book.disarm(request(0))
    assert book.due(8, head=None) == [request(1)]


def test_each_time_that_a_request_is_put_off_counts(book):
    book.put_off(request(0), 0)
    book.put_off(request(0), 8)
    assert book.counters.abandoned[Reason.RATE_LIMITED] == 2


def test_what_an_earlier_attempt_found_counts_where_a_later_one_gets_no_answer(rules, book):
    begin(rules, book, request(0), pages=5, free=0)
    assert book.before(request(1)) is None
    assert book.before(request(0)).found == 5
    later = probing(book, request(0))
    book.move(request(0), later, 8)
    book.move(request(0), rules.abandon(later, Reason.IO_ERROR), 9)
    book.settle(request(0), 0, Reason.ABORTED)
    assert book.counters.found == 5 * PAGE


def test_attempts_come_to_an_end_and_none_is_armed_again(rules, book):
    for attempt in range(9):
        begin(rules, book, request(0), pages=0, step=8 * attempt)
        assert bool(book.due(8 * attempt + 8, head=None)) == (attempt < 8)
    book.put_off(request(0), 100)
    assert book.due(1000, head=None) == []
    assert book.counters.abandoned[Reason.BELOW_THRESHOLD] == 9


def test_a_landing_or_an_abort_arms_no_retry(rules, book):
    state = begin(rules, book, request(0), pages=4)
    land(rules, book, request(0), state, arrived=4)
    state = begin(rules, book, request(1), pages=4)
    book.move(request(1), rules.abandon(state, Reason.ABORTED), 0)
    assert book.due(1000, head=None) == []


def test_what_a_request_found_counts_once_however_many_attempts_there_were(rules, book):
    for step in range(3):
        begin(rules, book, request(0), pages=5, step=step, free=0)
    assert book.counters.found == 0
    state = begin(rules, book, request(0), pages=5, step=4)
    land(rules, book, request(0), state, arrived=3)
    book.settle(request(0), 3, Reason.NOT_LOADED)
    counters = book.counters
    assert (counters.found, counters.hits) == (5 * PAGE, 3 * PAGE)
    assert counters.lost[Reason.EVICTED] == 2 * PAGE
    assert sum(counters.lost.values()) == 2 * PAGE
    assert counters.abandoned[Reason.HOST_CAPACITY] == 3


def test_what_landed_and_was_not_used_has_the_reason_that_admission_gives(rules, book):
    state = begin(rules, book, request(0), pages=5)
    land(rules, book, request(0), state, arrived=5)
    book.settle(request(0), 0, Reason.NOT_LOADED)
    assert book.counters.lost[Reason.NOT_LOADED] == 5 * PAGE
    assert book.counters.hits == 0


def test_a_request_that_computed_more_than_storage_had_hit_what_it_had(rules, book):
    state = begin(rules, book, request(0), pages=5)
    land(rules, book, request(0), state, arrived=5)
    book.settle(request(0), 7, Reason.NOT_LOADED)  # others brought more meanwhile
    assert book.counters.hits == 5 * PAGE


def test_a_request_cannot_be_settled_while_its_prefetch_runs(rules, book):
    begin(rules, book, request(0), pages=5)
    with pytest.raises(AssertionError, match="still runs"):
        book.settle(request(0), 0, Reason.ABORTED)


def test_a_request_without_a_prefetch_settles_to_nothing(book):
    book.settle(request(0), 3, Reason.ABORTED)
    book.put_off(request(1), 0)
    book.settle(request(1), 3, Reason.ABORTED)
    assert book.counters.found == 0
    assert book.due(99, head=None) == []


def test_the_book_is_empty_when_all_have_settled(rules, book):
    for i in range(200):
        state = begin(rules, book, request(i), pages=i % 9, step=i)
        if i % 9 >= 2 and i % 3:
            land(rules, book, request(i), state, arrived=i % 5)
        elif i % 9 >= 2:
            book.move(request(i), rules.abandon(state, Reason.ABORTED), i)
        book.settle(request(i), 8, Reason.ABORTED)
    counters = book.counters
    assert counters.found == counters.hits + sum(counters.lost.values()) > 0
    assert not len(book)
    assert book.in_flight_tokens == 0

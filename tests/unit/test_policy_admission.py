"""Admission's arithmetic against a brute-force walk over everything a request can hold."""

import itertools

import numpy as np
import pytest

from stratakv.policy.admission import Demand, PageBudget, demand
from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    needed,
    peak_pages,
)
from stratakv.testing.specs import small_spec

RULES = [KeepAll(), *(rule(n) for rule in (KeepWindow, KeepChunk) for n in (1, 2, 5, 8, 11))]
SHAPES = list(itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 6, 9), (1, 4, 13, 40)))


def asks(growth: tuple[int, ...], peak: tuple[int, ...]) -> Demand:
    """Of one that may be retracted, and needs little more."""
    none = (0,) * len(peak)
    return Demand(growth=growth, peak=peak, fixed=none, rest=none)


def most_held(rule, total, chunk, page):
    """Pages from what the last page boundary needs to the end of a chunk that begins anywhere."""
    held = 0
    for start in range(total):
        boundary = start // page * page
        first = min(needed(rule, boundary, page).start, boundary // page)
        held = max(held, -(-min(start + chunk, total) // page) - first)
    return held


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_peak_is_what_a_request_holds_at_most(rule):
    for page, chunk, total in SHAPES:
        held, peak = most_held(rule, total, chunk, page), peak_pages(rule, total, chunk, page)
        # Exact but for windows that no page boundary ever meets in the worst way: one page more.
        assert held <= peak <= held + (not isinstance(rule, KeepAll)), (page, chunk, total)


def test_a_state_takes_two_slots_and_a_live_one_one():
    assert peak_pages(KeepBoundary(), 100, 8, 4) == 2
    assert peak_pages(KeepBoundary(), 3, 8, 4) == 1
    assert peak_pages(KeepLive(), 100, 8, 4) == 1


def test_demand_grows_by_what_is_not_cached():
    spec = small_spec([KeepWindow(8)], page_tokens=4)
    wanted = demand(spec, 41, 41, 8, 5)
    peak = peak_pages(KeepWindow(8), 41, 8, 4)
    assert (wanted.growth, wanted.peak) == ((11 - 5, max(0, peak - 5)), (11, peak))
    assert demand(spec, 41, 41, 8, 30).growth == (0, 0)


def test_what_can_never_fit_names_the_group():
    budget = PageBudget(small_spec([KeepWindow(8)], page_tokens=4), (10, 5))
    assert budget.refusal(asks(growth=(10, 5), peak=(10, 5))) is None
    assert "group g0, which has 10" in (budget.refusal(asks(growth=(0, 0), peak=(11, 5))) or "")
    assert "group g1, which has 5" in (budget.refusal(asks(growth=(0, 0), peak=(10, 6))) or "")


def test_peaks_of_a_window_share_the_pool_and_growth_of_the_anchor_what_is_available():
    budget = PageBudget(small_spec([KeepWindow(8)], page_tokens=4), (20, 10))
    one = asks(growth=(8, 5), peak=(8, 5))
    assert budget.fits(one, (8, 0))
    assert not budget.fits(one, (7, 10))
    budget.book(one)
    assert not budget.fits(one, (15, 10)), "8 of the 15 are promised"
    assert budget.fits(one, (16, 0))
    budget.book(one)
    assert not budget.fits(asks(growth=(0, 1), peak=(0, 1)), (20, 10)), "10 of 10 are promised"
    budget.settle(one, (8, 5))
    assert budget.fits(one, (16, 0))


def test_a_request_that_ends_takes_its_own_demand_along_and_no_more():
    budget = PageBudget(small_spec([KeepWindow(8)], page_tokens=4), (20, 10))
    one, other = asks(growth=(8, 5), peak=(8, 5)), asks(growth=(3, 2), peak=(3, 2))
    budget.book(one)
    budget.book(other)
    budget.settle(one, (8, 5))
    assert budget.fits(asks(growth=(5, 8), peak=(5, 8)), (8, 0)), "3 and 2 are still booked"
    assert not budget.fits(asks(growth=(6, 0), peak=(6, 0)), (8, 0))
    assert not budget.fits(asks(growth=(0, 9), peak=(0, 9)), (8, 0))


def test_every_promise_can_be_kept():
    """Random requests come, grow and go against a pool of plain counts: what was promised is there
    whenever it is taken, and nothing that fits is refused."""
    rng = np.random.default_rng(0)
    spec = small_spec([KeepWindow(8)], page_tokens=4)
    for _ in range(100):
        total = int(rng.integers(12, 60))
        budget = PageBudget(spec, (total, 1000))
        running: list[list] = []  # demand, growth left
        free = total
        for _ in range(60):
            tokens = int(rng.integers(1, 48))
            wanted = demand(spec, tokens, tokens, 8, 0)
            promised = sum(left for _, left in running)
            fits = budget.fits(wanted, (free, 1000))
            assert fits == (free - promised >= wanted.growth[0])
            if fits:
                budget.book(wanted)
                running.append([wanted, wanted.growth[0]])
            for request in running:
                step = int(rng.integers(0, request[1] + 1))
                free -= step
                assert free >= 0, "a promise was broken"
                request[1] -= step
                budget.grown(0, step)
            if running and rng.random() < 0.4:
                gone, left = running.pop(int(rng.integers(len(running))))
                free += gone.growth[0] - left
                budget.settle(gone, (left, gone.growth[1]))


def test_a_request_past_its_prefill_makes_room_for_others():
    spec = small_spec([KeepWindow(8)], page_tokens=4)
    prefill, decode = demand(spec, 60, 20, 16, 0), demand(spec, 60, 20, 1, 0)
    assert decode.peak[1] < prefill.peak[1]
    budget = PageBudget(spec, (100, prefill.peak[1] + decode.peak[1]))
    budget.book(prefill)
    assert not budget.fits(prefill, (100, 100))
    now = budget.decodes(prefill, decode.peak)
    assert budget.fits(prefill, (100, 100))
    budget.settle(now, (0, 0))
    budget.book(prefill)
    assert not budget.fits(demand(spec, 60, 20, 16, 0), (100, 100)), "settled twice"

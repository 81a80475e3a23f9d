"""Letting requests in, over every small pool: a refusal changes nothing, and whoever is in finds
all that was booked for it, whatever the others do.
"""

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest

from stratakv.cache.records import Admission, CacheUse, Refusal
from stratakv.policy.admission import PageBudget, demand
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.testing.specs import small_spec
from stratakv.tree.nodes import Tier
from tests.small_cache import SmallCache

PAGE = 2
SPECS = {
    "anchor": small_spec([], page_tokens=PAGE),
    "window": small_spec([KeepWindow(3)], page_tokens=PAGE),
    "state": small_spec([KeepBoundary()], page_tokens=PAGE),
}
A, B = [1] * 5, [2] * 7


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request: pytest.FixtureRequest) -> CacheSpec:
    return request.param


def run(cache: SmallCache, row: int, tokens: list[int], start: int) -> None:
    cache.compute(row, tokens, start)
    cache.release(row, np.array(tokens, np.int32))


@pytest.mark.parametrize("served", [False, True], ids=["cold", "cached"])
def test_a_refusal_changes_nothing_and_who_is_in_finds_its_pages(spec: CacheSpec, *, served: bool):
    outcomes = set[object]()
    for device, host, rows in product(range(2, 10), (0, 6), (1, 2)):
        cache = SmallCache(spec, device, host, rows=rows, reserve=2)
        if served and not isinstance(cache.admission.admit(cache.ask(A)), Refusal):
            run(cache, 0, A, 0)
            cache.progress.settle()
        inside = list[tuple[int, list[int], int]]()
        for tokens in (A, B, A):
            before = cache.picture()
            found = cache.admission.admit(cache.ask(tokens, more=2))
            match found:
                case Admission():
                    inside.append((found.row, tokens, found.computed))
                    outcomes.add("cached" if found.computed else "in")
                case Refusal():
                    outcomes.add(found)
                    if not host:  # else what stood in the way may have been evicted or backed up
                        assert cache.picture() == before
                    assert cache.rows.taken == len(inside)
            cache.check()
        for row, tokens, computed in reversed(inside):  # nobody leaves before all have theirs
            cache.compute(row, [*tokens, 8, 9], computed)
            cache.check()
        for row, tokens, _ in inside:
            cache.release(row, np.array([*tokens, 8, 9], np.int32))
            cache.check()
        cache.progress.settle()
        assert cache.progress.flush()
        assert cache.free_pages() == [device] * len(spec.groups)
    assert {"in", Refusal.NO_PAGES, Refusal.NO_ROW} <= outcomes
    assert not served or "cached" in outcomes


def test_what_is_booked_is_there_in_whatever_order_requests_take_it(spec: CacheSpec):
    """Three at once in a pool that holds just them: each step of any of them finds its pages."""
    for order in permutations(range(3)):
        cache = SmallCache(spec, 12)
        inside = [(cache.enter(tokens).row, tokens) for tokens in ([n] * 7 for n in (1, 2, 3))]
        at = dict.fromkeys(range(3), 0)
        while any(at[who] < 7 for who in order):
            for who in order:
                row, tokens = inside[who]
                if at[who] < 7:
                    end = min(7, at[who] + 1 + who, cache.cut(row) or 7)
                    cache.compute(row, tokens, at[who], end)
                    at[who] = end
            cache.check()
        for row, tokens in inside:
            cache.release(row, np.array(tokens, np.int32))
        cache.check()


def test_a_prefix_that_is_there_costs_only_what_follows(spec: CacheSpec):
    cache = SmallCache(spec, 12)
    cache.serve(A)
    found = cache.enter(A)
    assert found.computed == found.cached.device == 4
    assert cache.enter(B).computed == 0


def test_one_token_is_always_left_to_compute(spec: CacheSpec):
    cache = SmallCache(spec, 12)
    cache.serve(A)
    assert cache.enter(A[:4]).computed <= 2


def test_what_is_on_the_host_alone_is_loaded_and_counted_apart(spec: CacheSpec):
    cache = SmallCache(spec, 12, 12)
    cache.serve(A)
    cache.progress.push_out(Tier.DEVICE)
    found = cache.enter(A)
    assert (found.cached.device, found.cached.host, found.computed) == (0, 4, 4)
    assert found.tickets, "the first forward waits for it"
    cache.progress.tick()
    cache.check()


def test_without_reuse_nothing_is_found_and_nothing_is_left(spec: CacheSpec):
    cache = SmallCache(spec, 12, reuse=False)
    for _ in range(2):
        assert cache.serve(A).computed == 0
    assert not len(cache.tiers.tree)


@pytest.mark.parametrize("use", [CacheUse.NOTHING, CacheUse.READ, CacheUse.STORE])
def test_one_apart_does_what_it_may_and_no_more(spec: CacheSpec, use: CacheUse):
    cache = SmallCache(spec, 12)
    cache.serve(A)
    assert cache.serve(A, use=use).computed == (4 if CacheUse.READ in use else 0)
    nodes = len(cache.tiers.tree)
    cache.serve(B, use=use)
    assert (len(cache.tiers.tree) > nodes) == (CacheUse.STORE in use)


def test_what_could_never_run_says_which_group_is_too_small(spec: CacheSpec):
    cache = SmallCache(spec, [4, 9][: len(spec.groups)])
    assert cache.admission.refusal(8) is None
    why = cache.admission.refusal(9)
    assert why is not None
    assert why.startswith("5 pages of group g0, which has 4")


def test_a_request_that_comes_back_does_not_count_as_a_second_use(spec: CacheSpec):
    cache = SmallCache(spec, 12)
    cache.serve(A)
    hits = cache.tiers.tree.internals.nodes.hits.sum()
    found = cache.admission.admit(cache.ask(A, again=True))
    assert isinstance(found, Admission)
    assert cache.tiers.tree.internals.nodes.hits.sum() == hits


def test_what_comes_first_has_its_pages_though_it_does_not_run(spec: CacheSpec):
    """One that was retracted waits for somebody else, and will decode when it comes."""
    outcomes = set[bool]()
    for device in range(3, 12):
        cache = SmallCache(spec, device, reserve=1)
        first, asked = cache.ask(B, more=2), cache.ask(A, more=2)
        wanted, ahead = demand(spec, 7, 6, 4, 0), demand(spec, 9, 8, 1, 0)
        room = [device] * len(spec.groups)
        fits = PageBudget(spec, room).fits(wanted, room, [ahead])
        found = cache.admission.admit(replace(asked, ahead=(first,)))
        assert isinstance(found, Admission) == fits
        outcomes.add(fits)
    assert outcomes == {False, True}


def test_what_another_engine_fills_cannot_be_taken_back_from_it(spec: CacheSpec):
    """Of twelve pages it has six, so that nobody may come to hold ten."""
    for receives in (False, True):
        cache = SmallCache(spec, [12, 40][: len(spec.groups)])
        inside = cache.admission.admit(replace(cache.ask([1] * 12), receives=receives))
        assert isinstance(inside, Admission)
        found = cache.admission.admit(cache.ask([2] * 3, more=17))
        assert (found is Refusal.NO_PAGES) == receives
        small = cache.admission.admit(cache.ask([3] * 3, more=9))
        assert isinstance(small, Admission)


def test_who_decodes_leaves_room_for_another_ones_prompt():
    spec, tokens = SPECS["window"], [1] * 8
    prompt, decode = (demand(spec, 12, 8, chunk, 0).peak[1] for chunk in (4, 1))
    cache = SmallCache(spec, [40, prompt + decode])
    row = cache.enter(tokens, more=4).row
    cache.compute(row, tokens, 0)
    assert cache.admission.admit(cache.ask([2] * 8, more=4)) is Refusal.NO_PAGES
    cache.prefilled(row, 8, 12)
    other = cache.enter([2] * 8, more=4).row
    cache.compute(other, [2] * 8, 0)
    cache.compute(row, [*tokens, 5, 6, 7], 8)
    cache.check()


def test_pages_that_a_request_will_stand_on_are_no_room_for_it():
    """Of eight pages four are cached, and three are booked for another."""
    cache = SmallCache(SPECS["anchor"], 8)
    cache.serve([1] * 9)
    other = cache.enter([2] * 5).row
    assert cache.admission.admit(cache.ask([1] * 13)) is Refusal.NO_PAGES
    cache.release(other, np.empty(0, np.int32))
    assert cache.enter([1] * 13).cached.total == 8
    cache.check()

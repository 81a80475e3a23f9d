"""A prefetch's decisions, case by case: every kind of group, every fill of the host."""

import numpy as np
import pytest

from stratakv.policy.prefetch import (
    Abandoned,
    Fetching,
    HostSpace,
    Landed,
    MakeRoom,
    PrefetchRules,
    Probing,
)
from stratakv.policy.prefetch_ends import CachedPrefix
from stratakv.policy.prefetch_pace import PrefetchPolicy
from stratakv.policy.prefetch_reasons import FetchOutcome, Reason, Tally, reason_of
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepChunk, KeepLive, KeepWindow
from stratakv.testing.specs import small_spec

PAGE = 4
PLENTY = 99


def rules_of(*rules, threshold_pages=1, budget_pages=1000, anchor_bytes=True):
    spec = small_spec(rules, page_tokens=PAGE, anchor_bytes=anchor_bytes)
    policy = PrefetchPolicy(
        threshold_tokens=threshold_pages * PAGE, budget_tokens=budget_pages * PAGE
    )
    return PrefetchRules(spec, policy)


def flags(limit, *groups):
    """By group: the page indices that are set."""
    made = tuple(np.zeros(limit, np.bool_) for _ in groups)
    for of, pages in zip(made, groups, strict=True):
        of[list(pages)] = True
    return made


def probing(limit, *present, base=0):
    return Probing(CachedPrefix(base, flags(limit, *present)))


def answered(rules, probe, *stored, free=PLENTY, evictable=0, in_flight=0):
    """``free`` and ``evictable``: of all groups alike, or of each."""
    there = flags(probe.held.limit, *stored)
    groups = len(stored)
    room = HostSpace(*(n if isinstance(n, tuple) else (n,) * groups for n in (free, evictable)))
    return rules.answered(probe, there, rules.usable(probe, there), room, in_flight)


def arrived(rules, state, *, bad=(), what=FetchOutcome.MISSED, stopped=Reason.DEADLINE):
    """All of a fetch but the (group, page) pairs of ``bad``."""
    pairs = zip(state.plan.objects.groups.tolist(), state.plan.objects.pages.tolist(), strict=True)
    arrivals = np.array([what if pair in bad else FetchOutcome.ARRIVED for pair in pairs], np.uint8)
    return rules.arrived(state, arrivals, rules.landable(state, arrivals), stopped)


def asked(rules, probe):
    objects = rules.ends.question(probe.held)
    return set(zip(objects.groups.tolist(), objects.pages.tolist(), strict=True))


def fetched(state):
    assert isinstance(state, Fetching)
    objects = state.plan.objects
    return set(zip(objects.groups.tolist(), objects.pages.tolist(), strict=True))


# -- what is asked and fetched, by kind of group -------------------------------------------------


def test_a_full_group_fetches_what_the_tree_lacks():
    rules = rules_of()
    probe = probing(6, range(2), base=2)
    assert asked(rules, probe) == {(0, i) for i in range(2, 6)}
    state = answered(rules, probe, range(2, 5))
    assert (state.plan.end, state.plan.first, state.tokens) == (5, 2, 3 * PAGE)
    assert fetched(state) == {(0, 2), (0, 3), (0, 4)}
    assert state.tally == Tally(2, 5)


def test_a_hole_ends_a_full_hit():
    state = answered(rules_of(), probing(6, ()), [0, 1, 3, 4, 5])
    assert state.plan.end == 2
    assert state.tally == Tally(0, 2)  # what lies behind a hole cannot be used: it was not found


def test_a_window_is_fetched_whole_and_only_where_the_end_needs_it():
    rules = rules_of(KeepWindow(2 * PAGE))
    probe = probing(8, (), ())
    state = answered(rules, probe, range(8), [2, 3, 6, 7])
    assert state.plan.end == 8
    assert fetched(state) == {(0, i) for i in range(8)} | {(1, 6), (1, 7)}


def test_a_window_with_a_hole_falls_back_to_a_shorter_end():
    state = answered(rules_of(KeepWindow(2 * PAGE)), probing(8, (), ()), range(8), [2, 3, 7])
    assert state.plan.end == 4
    assert state.tally == Tally(0, 4, ((Reason.WINDOW_INCOMPLETE, 4),))


def test_a_short_prompt_from_the_root_needs_no_full_window():
    state = answered(rules_of(KeepWindow(9 * PAGE)), probing(3, (), ()), range(3), range(3))
    assert state.plan.end == 3


def test_a_chunked_group_needs_only_the_chunk_in_progress():
    state = answered(rules_of(KeepChunk(4 * PAGE)), probing(6, (), ()), range(6), [4, 5])
    assert state.plan.end == 6
    assert fetched(state) == {(0, i) for i in range(6)} | {(1, 4), (1, 5)}
    at_a_boundary = answered(rules_of(KeepChunk(4 * PAGE)), probing(4, (), ()), range(4), ())
    assert at_a_boundary.plan.end == 4


def test_a_state_is_needed_at_the_end_alone():
    rules = rules_of(KeepBoundary())
    state = answered(rules, probing(8, (), ()), range(8), [2, 4])
    assert state.plan.end == 5
    assert fetched(state) == {(0, i) for i in range(5)} | {(1, 4)}
    assert state.tally.lost == ((Reason.STATE_MISSING, 3),)


def test_an_anchor_without_bytes_has_pages_but_no_objects():
    rules = rules_of(KeepBoundary(), anchor_bytes=False)
    probe = probing(8, (), ())
    assert asked(rules, probe) == {(1, i) for i in range(8)}
    state = answered(rules, probe, (), [5])
    assert state.plan.end == 6
    assert fetched(state) == {(1, 5)}
    assert [len(pages) for pages in state.plan.allocate] == [6, 1]
    assert state.tally == Tally(0, 6)
    landed = arrived(rules, state)
    assert [int(keep.sum()) for keep in landed.keep] == [6, 1]


def test_where_nothing_needs_bytes_no_more_is_cached_than_was_shared():
    """Chunks below an anchor without bytes: at a chunk's end there is nothing to fetch, for a
    prompt that nobody has sent before as for one that somebody has."""
    rules = rules_of(KeepChunk(4 * PAGE), anchor_bytes=False)
    probe = probing(10, (), ())
    nobody = answered(rules, probe, (), ())
    assert (nobody.reason, nobody.tally) == (Reason.BELOW_THRESHOLD, Tally(0, 0))
    somebody = answered(rules, probe, (), [0, 1, 2, 4, 5])  # of the end of a chunk nothing is kept
    assert (somebody.plan.end, somebody.tally) == (6, Tally(0, 6))
    assert answered(rules, probe, (), [0, 1, 2, 5]).plan.end == 4  # not 8


def test_a_live_group_is_never_asked_for():
    rules = rules_of(KeepLive())
    probe = probing(3, (), ())
    assert asked(rules, probe) == {(0, 0), (0, 1), (0, 2)}


def test_a_window_that_left_the_tree_is_fetched_below_the_anchors_end():
    rules = rules_of(KeepWindow(2 * PAGE))
    probe = probing(6, range(5), (), base=0)
    state = answered(rules, probe, [5], [4, 5])
    assert fetched(state) == {(0, 5), (1, 4), (1, 5)}
    assert state.plan.first == 4
    assert state.tokens == 6 * PAGE


def test_one_page_that_mends_a_window_brings_all_that_stands_on_it():
    """The last page lies in the tree already, and no request could use it without the one above."""
    rules = rules_of(KeepWindow(2 * PAGE))
    state = answered(rules, probing(5, range(5), [0, 1, 2, 4], base=3), (), [3])
    assert fetched(state) == {(1, 3)}
    assert (state.plan.end, state.tally) == (5, Tally(3, 5))


def test_storage_that_adds_nothing_found_nothing():
    state = answered(rules_of(KeepWindow(PAGE)), probing(6, range(5), ()), (), ())
    assert isinstance(state, Abandoned)
    assert state.tally.found == 0


def test_nothing_is_asked_beyond_the_last_end_that_can_be_used():
    assert asked(rules_of(), probing(0, ())) == set()
    assert asked(rules_of(), probing(3, range(3), base=3)) == set()


def test_a_long_prompt_has_tables_as_long():
    rules = rules_of(KeepWindow(2 * PAGE))
    state = answered(rules, probing(300, (), ()), range(300), range(290, 300), free=300)
    assert state.plan.end == 300
    assert len(state.plan.objects.pages) == 302


@pytest.mark.parametrize("pages", range(62, 68))
def test_tables_grow_where_a_prompt_is_one_page_longer(pages):
    assert len(asked(rules_of(), probing(pages, ()))) == pages


# -- how much of it ------------------------------------------------------------------------------


def test_too_small_a_hit_is_left_and_tried_again():
    state = answered(rules_of(threshold_pages=4), probing(8, range(2), base=2), range(2, 5))
    assert (state.reason, state.retry) == (Reason.BELOW_THRESHOLD, True)
    assert state.tally.lost == ((Reason.BELOW_THRESHOLD, 3),)


def test_a_hit_beyond_the_budget_waits_and_one_alone_does_not():
    rules = rules_of(budget_pages=4)
    probe = probing(8, ())
    limited = answered(rules, probe, range(8), in_flight=1)
    assert (limited.reason, limited.retry) == (Reason.RATE_LIMITED, True)
    assert answered(rules, probe, range(8), in_flight=0).tokens == 8 * PAGE
    assert answered(rules, probe, range(3), in_flight=PAGE).tokens == 3 * PAGE


@pytest.mark.parametrize("free", range(9))
def test_a_full_group_shrinks_to_any_fill_of_the_host(free):
    state = answered(rules_of(threshold_pages=3), probing(8, ()), range(8), free=free)
    if free < 3:
        assert (state.reason, state.retry) == (Reason.HOST_CAPACITY, True)
        assert state.tally.lost == ((Reason.HOST_CAPACITY, 8),)
    else:
        assert state.plan.end == free
        assert state.tokens == free * PAGE  # the shrunk length is in flight
        assert state.tally.hits == free


def test_pages_that_the_tree_has_need_no_room():
    rules = rules_of(KeepAll())
    state = answered(rules, probing(6, range(4), ()), [4, 5], range(6), free=(2, 6))
    assert state.plan.end == 6


def test_a_group_that_does_not_shrink_and_is_short_ends_it():
    rules = rules_of(KeepWindow(2 * PAGE))
    state = answered(rules, probing(8, (), ()), range(8), range(8), free=(8, 1), evictable=0)
    assert state.plan.end == 1  # from the root a window is shorter still
    mid = probing(8, range(3), (), base=0)
    state = answered(rules, mid, range(3, 8), range(2, 8), free=(8, 1))
    assert (state.reason, state.retry) == (Reason.HOST_CAPACITY, True)


def test_a_state_group_shrinks_to_another_checkpoint():
    rules = rules_of(KeepBoundary())
    state = answered(rules, probing(8, (), ()), range(8), [2, 7], free=(5, 1))
    assert state.plan.end == 3
    assert state.tally.lost == ((Reason.HOST_CAPACITY, 5),)


def test_room_is_made_once_and_for_what_can_be_had():
    rules = rules_of(KeepWindow(2 * PAGE))
    probe = probing(8, (), ())
    state = answered(rules, probe, range(8), range(8), free=(2, 9), evictable=(4, 0))
    assert isinstance(state, MakeRoom)
    assert state.pages == (6, 2)  # not for the eight that there will never be room for
    assert rules.made_room(state, (6, 9)).plan.end == 6
    assert rules.made_room(state, (9, 9)).plan.end == 8  # the eviction brought more
    short = rules.made_room(state, (3, 9))  # and here less
    assert short.plan.end == 3
    assert short.tally.lost == ((Reason.HOST_CAPACITY, 5),)
    gone = rules.made_room(state, (0, 9))
    assert (gone.reason, gone.retry) == (Reason.HOST_CAPACITY, True)


def test_a_host_that_cannot_have_room_is_not_evicted():
    state = answered(rules_of(threshold_pages=4), probing(8, ()), range(8), free=1, evictable=2)
    assert isinstance(state, Abandoned)


def test_the_second_allocation_may_fail_too():
    rules = rules_of()
    state = answered(rules, probing(4, ()), range(4))
    gone = rules.abandon(state, Reason.HOST_CAPACITY)
    assert gone.tally.lost == ((Reason.HOST_CAPACITY, 4),)
    assert gone.retry


# -- what lands ----------------------------------------------------------------------------------


def test_all_of_it_lands():
    rules = rules_of(KeepWindow(PAGE))
    landed = arrived(rules, answered(rules, probing(4, (), ()), range(4), range(4)))
    assert isinstance(landed, Landed)
    assert (landed.end, landed.tally) == (4, Tally(0, 4))
    assert all(keep.all() for keep in landed.keep)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (FetchOutcome.MISSED, Reason.EVICTED),
        (FetchOutcome.CORRUPT, Reason.CORRUPT),
        (FetchOutcome.FAILED, Reason.IO_ERROR),
        (FetchOutcome.NOT_TRIED, Reason.DEADLINE),
    ],
)
def test_a_part_of_a_full_group_lands_and_the_rest_has_a_reason(what, reason):
    rules = rules_of()
    landed = arrived(rules, answered(rules, probing(6, ()), range(6)), bad={(0, 4)}, what=what)
    assert landed.end == 4
    assert landed.keep[0].tolist() == [True] * 4 + [False] * 2
    assert landed.tally == Tally(0, 4, ((reason, 2),))


@pytest.mark.parametrize("rule", [KeepWindow(2 * PAGE), KeepBoundary()])
def test_a_window_or_a_state_that_did_not_arrive_lands_nothing(rule):
    rules = rules_of(rule)
    state = answered(rules, probing(6, (), ()), range(6), range(6))
    gone = arrived(rules, state, bad={(1, 5)}, what=FetchOutcome.CORRUPT)
    assert isinstance(gone, Abandoned)
    assert (gone.reason, gone.retry) == (Reason.CORRUPT, False)
    assert gone.tally.lost == ((Reason.CORRUPT, 6),)


def test_a_shorter_end_that_stands_on_the_trees_own_window_lands():
    rules = rules_of(KeepWindow(2 * PAGE))
    # The tree's anchor ends at 4, and of its windows page 3 alone is left.
    state = answered(rules, probing(6, range(4), [3]), [4, 5], [4, 5])
    assert fetched(state) == {(0, 4), (0, 5), (1, 4), (1, 5)}
    landed = arrived(rules, state, bad={(0, 5)})
    assert landed.end == 5  # windows 3 and 4
    assert [keep.tolist() for keep in landed.keep] == [[True, False], [True, False]]


def test_a_landing_below_the_threshold_is_none():
    rules = rules_of(threshold_pages=3)
    gone = arrived(rules, answered(rules, probing(6, ()), range(6)), bad={(0, 2)})
    assert isinstance(gone, Abandoned)
    assert gone.tally.lost == ((Reason.EVICTED, 6),)


def test_ranks_land_the_same_end_or_none():
    rules = rules_of()
    state = answered(rules, probing(6, ()), range(6))
    arrivals = np.zeros(6, np.uint8)
    mine = rules.landable(state, arrivals)
    theirs = mine.copy()
    theirs[4:] = False
    landed = rules.arrived(state, arrivals, mine & theirs, Reason.DEADLINE)
    assert landed.end == 3
    assert landed.tally.lost == ((Reason.SHARD_DISAGREEMENT, 3),)
    gone = rules.arrived(state, arrivals, mine & False, Reason.DEADLINE)
    assert gone.reason is Reason.SHARD_DISAGREEMENT


def test_ranks_that_can_use_different_ends_use_neither():
    rules = rules_of(KeepBoundary())
    probe = probing(8, (), ())
    mine, theirs = flags(8, range(8), [4]), flags(8, range(8), [1, 2])
    agreed = rules.usable(probe, mine) & rules.usable(probe, theirs)
    state = rules.answered(probe, mine, agreed, HostSpace((9, 9), (0, 0)), 0)
    assert isinstance(state, Abandoned)
    assert state.tally.lost == ((Reason.STATE_MISSING, 3), (Reason.SHARD_DISAGREEMENT, 5))


def test_an_abort_while_probing_found_nothing_that_it_knows_of():
    gone = rules_of().abandon(probing(6, range(2), base=2), Reason.ABORTED)
    assert gone.tally.found == 0
    assert not gone.retry


def test_a_failed_second_question_keeps_what_the_first_one_found():
    before = Tally(0, 0, ((Reason.RATE_LIMITED, 5),))
    probe = Probing(probing(6, ()).held, before)
    assert rules_of().abandon(probe, Reason.IO_ERROR).tally == before


def test_an_end_beyond_the_plan_never_lands():
    rules = rules_of(KeepChunk(2 * PAGE), anchor_bytes=False)  # needs nothing at even ends
    state = answered(rules, probing(8, (), ()), (), [0, 2, 4, 6], free=3)
    assert state.plan.end == 3
    assert arrived(rules, state).end == 3


# -- the sum -------------------------------------------------------------------------------------


def test_a_tally_only_moves_pages_from_hits_to_losses():
    tally = Tally(2, 10).cut(12, Reason.CORRUPT)
    assert tally == Tally(2, 10)
    tally = tally.cut(7, Reason.HOST_CAPACITY).cut(0, Reason.ABORTED)
    assert tally.lost == ((Reason.HOST_CAPACITY, 3), (Reason.ABORTED, 5))
    assert (tally.hits, tally.found) == (0, 8)


def test_where_nothing_was_to_arrive_the_reason_is_why_it_stopped():
    nothing = np.zeros(0, np.uint8)
    assert reason_of(nothing, Reason.DEADLINE) is Reason.DEADLINE
    assert reason_of(np.array([FetchOutcome.ARRIVED], np.uint8), Reason.ABORTED) is Reason.ABORTED
    assert reason_of(
        np.array([FetchOutcome.MISSED, FetchOutcome.CORRUPT], np.uint8), Reason.ABORTED
    ) is (Reason.CORRUPT)


def test_what_fits_must_be_worth_it_beyond_what_the_tree_has():
    rules = rules_of(threshold_pages=3)
    probe = probing(8, range(2), base=2)
    short = answered(rules, probe, range(2, 8), free=2)
    assert isinstance(short, Abandoned)
    assert short.reason is Reason.HOST_CAPACITY
    assert answered(rules, probe, range(2, 8), free=3).plan.end == 5


@pytest.mark.parametrize("reason", Reason)
def test_what_may_pass_by_itself_is_tried_again(reason):
    rules = rules_of()
    fetching = answered(rules, probing(8, ()), range(8))
    passing = {Reason.HOST_CAPACITY, Reason.IO_ERROR, Reason.RATE_LIMITED}
    for state in (probing(8, ()), fetching):
        assert rules.abandon(state, reason).retry is (reason in passing)


def test_where_no_rank_can_use_what_another_can_the_ranks_are_the_reason():
    """Here a part has come, which would do; elsewhere nothing."""
    rules = rules_of()
    state = answered(rules, probing(8, ()), range(8))
    arrivals = np.array([FetchOutcome.ARRIVED] * 5 + [FetchOutcome.MISSED] * 3, np.uint8)
    gone = rules.arrived(state, arrivals, np.zeros(9, np.bool_), Reason.DEADLINE)
    assert gone.reason is Reason.SHARD_DISAGREEMENT
    assert gone.tally.lost == ((Reason.EVICTED, 3), (Reason.SHARD_DISAGREEMENT, 5))


def test_a_plan_that_lacks_nothing_begins_at_its_end():
    rules = rules_of()
    held = CachedPrefix(0, flags(4, range(4)))
    assert rules.ends.plan(held, 4).first == 4

"""Every rule that keeps ranks alike, broken once: the fleet must see it, and within a few runs."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from stratakv.core.errors import DivergenceError, RankLostError
from stratakv.testing.fleet.loss import Loss, Point
from stratakv.testing.fleet.run import run_plan
from stratakv.testing.fleet.scenario import PAGE, plain_plan
from stratakv.testing.fleet.variety import adapted
from tests import fleet_faults
from tests.fleet_plans import CALM, over_one_store, storage_plan
from tests.integration.test_fleet_prefetch import Again

RUNS, FEW = 8, 5


pytestmark = pytest.mark.usefixtures("quiet")


def caught(plans):
    """What the first run that fails says; None where all went well."""
    for plan in plans:
        try:
            run_plan(plan)
        except (AssertionError, DivergenceError, RankLostError, IndexError) as fault:
            return str(fault)
    return None


@cache
def all_well(plans):
    """Without any fault; several faults are looked for with the same plans."""
    return caught(plans()) is None


def with_faults(seed, **fault_rates):
    plan = plain_plan(seed)
    return replace(plan, fault_rates=tuple(replace(one, **fault_rates) for one in plan.fault_rates))


def drawn():
    return [plain_plan(seed) for seed in range(RUNS)]


def failing_backups():
    return [with_faults(seed, backup_fails=0.3) for seed in range(RUNS)]


def refusing_stores():
    return [with_faults(seed, write_refused=0.3) for seed in range(RUNS)]


def missing_states():
    fault_rates = (CALM, replace(CALM, loses=0.4))
    names = ("state", "three")
    return [replace(storage_plan(n, names[n % 2]), fault_rates=fault_rates) for n in range(RUNS)]


def over_one_stores():
    """Of two or more slices a page and rank, next to groups that all have alike."""
    names = ("three", "state")
    return [over_one_store(storage_plan(n, names[n % 2]), heads=8, cut=8) for n in range(FEW)]


def forgetful_stores():
    return [
        replace(plan, fault_rates=(replace(CALM, read_misses=0.1),) * 2)
        for plan in over_one_stores()
    ]


def other_numbers():
    """Four ranks, and then two."""
    for n in range(2):
        four, two = (
            over_one_store(storage_plan(n, "window", ranks), heads=8, cut=8) for ranks in (4, 2)
        )
        yield replace(four, then=replace(two, events=two.events[-1:]))


def losses(*points, names=("anchor", "three")):
    return [
        replace(
            storage_plan(n, names[n % 2], 3),
            loss=Loss(rank=n % 3, step=6 + n, point=points[n % len(points)], objects=n % 5),
        )
        for n in range(FEW)
    ]


def ends_in_ballots():
    return losses(Point.BALLOT)


def ends_in_writes():
    return losses(Point.WRITE)


def ends_with_much_queued():
    slow = (replace(CALM, pace=CALM.pace | {"storage": 0.1}),) * 3
    return [
        replace(plan, fault_rates=slow)
        for plan in losses(Point.STEP, Point.BROADCAST, Point.RESULT)
    ]


def under_adapters():
    return [adapted(plain_plan(seed), Random(seed)) for seed in range(FEW)]


def followed():
    return [replace(plan, observed=True) for plan in refusing_stores()[:FEW]]


def without_reuse():
    plans = (storage_plan(n, "window") for n in range(FEW))
    return [replace(plan, host=(0, 0), reuse=False) for plan in plans]


def without_a_host():
    """With more requests than there is room for, so that some are retracted."""
    crowded = [
        plan for plan in map(plain_plan, range(32)) if not any(of.settled for of in plan.events)
    ]
    return [replace(plan, host=(0,) * len(plan.host)) for plan in crowded]


def in_two_lanes():
    return [replace(plan, io_lanes=2) for plan in drawn()[:FEW]]


CASES = {
    fleet_faults.a_collective_inside_a_condition: drawn,
    fleet_faults.a_clock_of_its_own: drawn,
    fleet_faults.a_backup_that_is_good_here: failing_backups,
    fleet_faults.pages_that_are_stored_here: refusing_stores,
    fleet_faults.a_sidecar_missing_in_the_vote: missing_states,
    fleet_faults.a_slice_of_another_rank: over_one_stores,
    fleet_faults.whole_groups_written_by_all_and_cut_wrongly: over_one_stores,
    fleet_faults.a_page_as_well_as_its_best_slice: forgetful_stores,
    fleet_faults.a_lost_rank_ignored: ends_in_ballots,
    fleet_faults.half_an_object_after_a_loss: ends_in_writes,
    fleet_faults.a_dead_rank_that_still_writes: ends_with_much_queued,
    fleet_faults.adapters_that_share_pages: under_adapters,
    fleet_faults.events_of_what_is_stored_here: followed,
    fleet_faults.pages_dropped_twice: without_reuse,
    fleet_faults.room_on_a_host_that_is_not_there: without_a_host,
    fleet_faults.answers_of_the_other_lane: in_two_lanes,
}


@pytest.mark.parametrize("fault", CASES, ids=lambda fault: fault.__name__)
def test_a_seeded_fault_is_caught_and_nothing_is_without_it(fault):
    plans = CASES[fault]
    assert all_well(plans)
    with fault():
        assert caught(plans()) is not None


def test_slices_that_know_how_many_ranks_there_are_are_not_found_by_fewer():
    def hits():
        return [run_plan(plan)[1].cached["storage"] for plan in other_numbers()]

    assert min(hits()) == 8 * PAGE
    with fleet_faults.slices_that_know_how_many_ranks_there_are():
        assert caught(other_numbers()) or not max(hits())


def test_a_condition_around_the_ballot_is_named_as_such():
    with fleet_faults.a_collective_inside_a_condition():
        assert "do not meet: rank" in (caught(drawn()) or "")


def test_lengths_instead_of_flags_lose_what_all_ranks_could_use():
    """Trees stay alike, since what arrives is looked at once more: what is caught is that less
    lands than all could use."""
    fault_rates = (replace(CALM, loses=0.25),) * 2

    def short():
        for seed in range(RUNS):
            again = Again(replace(storage_plan(seed, "window"), fault_rates=fault_rates))
            if again.run() != again.common * 4:
                return True
        return False

    assert not short()
    with fleet_faults.lengths_instead_of_flags():
        assert short()

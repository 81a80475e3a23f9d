"""Every rule of the ballot, broken once: the fleet must see it, and within a few runs."""

import logging
from dataclasses import replace

import pytest

from stratakv.core.errors import DivergenceError, RankLostError
from stratakv.sim.plan import plan_of
from stratakv.sim.run import Fleet
from tests import fleet_faults
from tests.fleet_plans import CALM, storage_plan
from tests.integration.test_fleet_prefetch import Again

RUNS = 8


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def caught(plans):
    """What the first run that fails says; None where all went well."""
    for plan in plans:
        try:
            Fleet(plan).run()
        except (AssertionError, DivergenceError, RankLostError) as fault:
            return str(fault)
    return None


def with_hazards(seed, **hazards):
    plan = plan_of(seed)
    return replace(plan, hazards=tuple(replace(one, **hazards) for one in plan.hazards))


def drawn():
    return [plan_of(seed) for seed in range(RUNS)]


def failing_backups():
    return [with_hazards(seed, backup_fails=0.3) for seed in range(RUNS)]


def refusing_stores():
    return [with_hazards(seed, write_refused=0.3) for seed in range(RUNS)]


def missing_states():
    hazards = (CALM, replace(CALM, loses=0.4))
    names = ("state", "three")
    return [replace(storage_plan(n, names[n % 2]), hazards=hazards) for n in range(RUNS)]


CASES = {
    fleet_faults.a_collective_inside_a_condition: drawn,
    fleet_faults.a_clock_of_its_own: drawn,
    fleet_faults.a_backup_that_is_good_here: failing_backups,
    fleet_faults.pages_that_are_stored_here: refusing_stores,
    fleet_faults.a_sidecar_missing_in_the_vote: missing_states,
}


@pytest.mark.parametrize("fault", CASES, ids=lambda fault: fault.__name__)
def test_a_seeded_fault_is_caught_and_nothing_is_without_it(fault):
    plans = CASES[fault]()
    assert caught(plans) is None
    with fault():
        assert caught(plans) is not None


def test_a_condition_around_the_ballot_is_named_as_such():
    with fleet_faults.a_collective_inside_a_condition():
        assert "do not meet: rank" in (caught(drawn()) or "")


def test_lengths_instead_of_flags_lose_what_all_ranks_could_use():
    """Trees stay alike, since what arrives is looked at once more: what is caught is that less
    lands than all could use."""
    hazards = (replace(CALM, loses=0.25),) * 2

    def short():
        for seed in range(RUNS):
            again = Again(replace(storage_plan(seed, "window"), hazards=hazards))
            if again.run() != again.common * 4:
                return True
        return False

    assert not short()
    with fleet_faults.lengths_instead_of_flags():
        assert short()

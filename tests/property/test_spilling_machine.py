"""Requests that are spilled walk at random beside books (``tests/spilling_machine.py``)."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from stratakv.core.ids import GroupId
from stratakv.policy.admission import demand
from stratakv.spec.budget import FILLING_PAGES
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepWindow
from tests.cache_machine import CHUNK, MOST, wide_spec
from tests.property.test_cache_machine import BUSY, CALM
from tests.spilling_machine import SpillingMachine

SPECS = {
    "selected": wide_spec(2, KeepAll(), away=(1,)),
    "two selected": wide_spec(3, KeepAll(), KeepAll(), away=(1, 2)),
    "with a window": wide_spec(2, KeepAll(), KeepWindow(5), away=(1,)),
    "with a state": wide_spec(2, KeepAll(), KeepBoundary(), away=(1,)),
}
MOVES = [*BUSY, "retract_all"]
SPARE = (0, 7, 1, 2, 30, 4, 13)
"""Host pages beyond those of the longest request."""
WALKS = 60


def machine_of(spec, seed, machine=SpillingMachine):
    """On a device where one spilled request fits, or a few; with every size of a host from the
    least that the longest request needs."""
    at_once = 1 + seed % 2
    peak = demand(spec, MOST, MOST, at_once * CHUNK, 0).peak
    buffers = {GroupId(group.id): 2 for group in spec.groups if group.at_home_on_host}
    least = 2 + -(-at_once * CHUNK // spec.page_tokens) + FILLING_PAGES
    device = [
        least + seed % 5 if group.id in buffers else (3 if group.id else 2) * most
        for group, most in zip(spec.groups, peak, strict=True)
    ]
    host = -(-MOST // spec.page_tokens) + SPARE[seed // 2 % len(SPARE)]
    return machine(spec, seed, device, host, buffers, at_once)


def walk(spec, seed, steps, machine=SpillingMachine):
    made = machine_of(spec, seed, machine)
    made.run(steps, CALM[:-1] if seed % 3 == 2 else MOVES)
    return made.seen


@pytest.mark.parametrize("name", SPECS)
def test_every_row_that_a_spilled_request_reads_is_its_own(name):
    walks = WALKS if name == "selected" else WALKS // 3
    seen = sum((walk(SPECS[name], seed, 70) for seed in range(walks)), Counter())
    for what in ("read on the host", "hits", "misses", "spilled", "saved", "restored", "loaded"):
        assert seen[what] > 0, what
    if name == "selected":
        for what in (
            "spilled, retracted",
            "spilled, aborted",
            "admitted spilled",
            "received on the host",
            "computed again",
        ):
            assert seen[what] > 0, what


class SpilledRequests(RuleBasedStateMachine):
    """``check`` holds all that a bounded buffer over host pages must be."""

    machine = None
    sound = True

    @initialize(name=st.sampled_from(sorted(SPECS)), seed=st.integers(0, 1 << 16))
    def begin(self, name, seed):
        self.machine = machine_of(SPECS[name], seed)

    @rule(moves=st.lists(st.sampled_from(sorted(set(MOVES))), min_size=1, max_size=6))
    def go_on(self, moves):
        self.sound = False
        self.machine.run_some(moves)
        self.sound = True

    def teardown(self):
        if self.machine is not None and self.sound:
            self.machine.drain()


@pytest.mark.parametrize("examples", [20, pytest.param(400, marks=pytest.mark.long)])
def test_spilled_requests_keep_the_invariants_by_hypothesis(examples):
    quick = settings(
        max_examples=examples, stateful_step_count=12, deadline=None, database=None,
        suppress_health_check=(HealthCheck.too_slow,),
    )  # fmt: skip
    run_state_machine_as_test(SpilledRequests, settings=quick)


@pytest.mark.long
@pytest.mark.parametrize("tenth", range(10))
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_longer_walks_of_spilled_requests(spec, tenth):
    for seed in range(18, 54):
        walk(spec, 100 * tenth + seed, 200)

"""Bounded buffers of many requests (``tests/hot_buffer_machine.py``), by Hypothesis and at random:
after every verb each row is what its table says, and the plan that of one request alone."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from stratakv.sparse.hot_buffer import DEFAULT_PLANNER, DEFAULT_READS
from stratakv.sparse.reads import NumpyReads
from stratakv.sparse.swap_in import plan_swap_in
from tests.hot_buffer_machine import HotBufferMachine, walk

RANDOM = st.randoms(use_true_random=False)
WAYS = [
    (planner, reads)
    for planner in (plan_swap_in, DEFAULT_PLANNER)
    for reads in (NumpyReads(), DEFAULT_READS)
]
"""An installation may have one helper in C without the other."""


class Buffers(RuleBasedStateMachine):
    machine = None

    @initialize(rng=RANDOM, way=st.sampled_from(WAYS))
    def begin(self, rng, way):
        self.machine = HotBufferMachine(rng, *way)

    @rule(rng=RANDOM)
    def come(self, rng):
        self.machine.come(rng)

    @rule(rng=RANDOM)
    def go(self, rng):
        self.machine.go(rng)

    @rule(rng=RANDOM)
    def step(self, rng):
        self.machine.step(rng)

    @invariant()
    def holds(self):
        if self.machine is not None:
            self.machine.check()


def test_the_invariants_hold_by_hypothesis():
    quick = settings(max_examples=60, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(Buffers, settings=quick)


def test_walks_pass_everywhere():
    seen = Counter()
    for seed in range(60):
        seen += walk(random.Random(seed), 80, *WAYS[seed % len(WAYS)])
    for what in ("come", "no room", "go", "step", "misses", "hits"):
        assert seen[what] > 100, what


@pytest.mark.long
@pytest.mark.parametrize("tenth", range(10))
def test_longer_walks(tenth):
    for seed in range(200):
        walk(random.Random(1000 + 200 * tenth + seed), 200, *WAYS[seed % len(WAYS)])

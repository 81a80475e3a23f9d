"""A device that runs ahead: step N + 1 is launched before the tokens of step N are known. Tokens
are the same, decisions depend on no device's pace, and who leaves between the two harms nobody.
"""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from stratakv.assembly.build import Sockets, build
from stratakv.core.ids import NONE, RequestId
from stratakv.engine.request import Failure, FinishReason
from stratakv.testing.fleet.adversary import Adversary
from stratakv.testing.fleet.ahead import AheadDevice
from stratakv.testing.fleet.device import SimMemory
from stratakv.testing.fleet.rank import engine_plan
from stratakv.testing.fleet.run import Fleet
from stratakv.testing.fleet.runner import TokenRunner
from stratakv.testing.fleet.scenario import plain_plan
from tests.engines import VOCABULARY, expected_tokens, greedy, tokens_of

SEEDS = range(4)
PROMPT = [n * 7 % (VOCABULARY - 1) for n in range(20)]
BREAKS = VOCABULARY - 1
"""A token after which nothing is finite any more."""


def ahead(seed, **changes):
    return replace(plain_plan(seed), steps_at_once=2, **changes)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("pace", [0.05, 1.0])
def test_ranks_that_run_ahead_are_alike_and_say_what_is_right(pace):
    most = set()
    for seed in range(6):
        fleet = Fleet(ahead(seed, device_pace=pace))
        fleet.run()
        most |= {rank.executor.most for rank in fleet.ranks}
    assert most == {2}, "no step was launched before the last one was collected"


@pytest.mark.usefixtures("quiet")
def test_decisions_do_not_depend_on_when_the_device_is_done():
    """Where no copy ends earlier or later with it."""
    unknown = 0
    for seed in range(5):
        batches = []
        for pace in (0.02, 1.0):
            plan = ahead(seed, device_pace=pace)
            fleet = Fleet(replace(plan, host=(0,) * len(plan.host)))
            fleet.run()
            batches.append(fleet.ranks[0].executor.batches)
        slow, *others = batches
        for other in others:
            assert len(other) == len(slow)
            for one, same in zip(slow, other, strict=True):
                for name in ("rows", "starts", "counts", "tokens", "sampled"):
                    assert np.array_equal(getattr(one, name), getattr(same, name))
        unknown += sum((batch.tokens == NONE).any() for batch in slow)
    assert unknown, "no step was launched over a token that nobody knew"


class Breaks(TokenRunner):
    def forward(self, batch):
        """Whoever has just said, or was asked, ``BREAKS`` goes on no further."""
        forward = super().forward(batch)
        rows = np.repeat(np.arange(len(batch.rows)), batch.counts)
        broken = np.isin(np.arange(len(batch.rows)), rows[batch.tokens == BREAKS])
        return replace(forward, finite=torch.from_numpy(~broken))


def right(asked, count):
    """What is said after ``asked``, and whether that is all."""
    expected = expected_tokens(asked, count)
    if BREAKS in expected[:-1]:
        return expected[: expected.index(BREAKS) + 1], False
    return expected, True


class Alone:
    """One engine on a device that runs ahead, and what it has said."""

    def __init__(self, seed):
        plan = ahead(seed)
        device = AheadDevice(2, Random(seed), 0.5)
        adversary = Adversary(seed, plan.fault_rates[0])
        spec = plan.rank_spec
        memory = SimMemory.of(spec, plan.device, plan.host, adversary, device.later)

        def runner(tables):
            return Breaks(spec, [of.rows for of in memory.device], tables)

        sockets = Sockets(sleep=lambda _: device.done())
        self.engine, self.cache = build(engine_plan(plan), memory, runner, sockets, device.executor)
        self.out = {}

    def submit(self, name, tokens, count):
        self.out[name] = []
        self.engine.submit(greedy(name, tokens, count))

    def step(self):
        for output in self.engine.step():
            assert not self.out[output.request] or self.out[output.request][-1].finish is None
            self.out[output.request].append(output)
        self.engine.check()

    def in_flight(self):
        return sum(one.in_flight for one in self.engine.statuses())

    def end(self):
        while self.engine.has_work():
            self.step()
        assert not self.in_flight()
        assert self.engine.flush()
        self.engine.check()
        pools = self.cache.tiers.pools.stats()
        assert all(pool.free == pool.total for pool in pools)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("seed", SEEDS)
def test_one_request_after_another_gets_the_tokens_of_the_closed_form(seed):
    this = Alone(seed)
    for turn in range(3):
        asked = PROMPT[: 10 + 3 * turn]
        this.submit(f"{turn}", asked, 12)
        while this.engine.has_work():
            this.step()
        assert tokens_of(this.out[f"{turn}"]) == right(asked, 12)[0]
    this.end()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("seed", SEEDS)
def test_an_abort_between_launch_and_collect_leaves_nothing(seed):
    this, between = Alone(seed), 0
    for steps in range(10):
        name, other = f"r{steps}", [steps, *PROMPT[:12]]
        this.submit(name, [steps, *PROMPT[:9]], 12)
        this.submit(f"s{steps}", other, 6)
        for _ in range(steps):
            this.step()
        between += this.in_flight() > 0
        this.engine.abort(RequestId(name))
        this.engine.check()
        while this.engine.has_work():
            this.step()
        assert this.out[name][-1].finish is not None
        assert tokens_of(this.out[f"s{steps}"]) == right(other, 6)[0]
    assert between > 3
    this.end()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_failure_between_launch_and_collect_harms_nobody_else(seed):
    """It has been launched once more by then."""
    this, failed = Alone(seed), 0
    for turn in range(12):
        asked, other = [turn, *PROMPT[:7]], [turn + 50, *PROMPT[:10]]
        this.submit(f"r{turn}", asked, 14)
        this.submit(f"s{turn}", other, 8)
        while this.engine.has_work():
            this.step()
        for name, (expected, whole) in (("r", right(asked, 14)), ("s", right(other, 8))):
            out = this.out[f"{name}{turn}"]
            assert tokens_of(out) == expected
            if not whole:
                assert (out[-1].finish, out[-1].failure) == (
                    FinishReason.ERROR,
                    Failure.NOT_FINITE,
                )
                failed += 1
    assert failed
    this.end()

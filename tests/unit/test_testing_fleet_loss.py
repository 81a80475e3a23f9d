"""The death of a simulated rank, and who hears of it."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from stratakv.core.errors import RankLostError
from stratakv.core.ids import RequestId
from stratakv.engine.ranks.step_messages import Submit
from stratakv.engine.request import Prompt, SamplingParams
from stratakv.policy.prefetch_pace import BestEffort
from stratakv.testing.fleet.loss import POINTS, Fate, Loss, MortalRanks, Point, RankDied
from stratakv.testing.fleet.run import Fleet
from stratakv.testing.fleet.scenario import PAGE, OperatorEvent
from tests.fleet_faults import a_lost_rank_ignored
from tests.fleet_plans import storage_plan
from tests.unit.test_testing_fleet_thread_ranks import together


@pytest.mark.parametrize("point", [Point.STEP, Point.BROADCAST, Point.BALLOT, Point.RESULT])
def test_a_rank_ends_at_its_point_in_its_step_and_stays_dead(point):
    fate = Fate(Loss(rank=1, step=3, point=point), 1)
    for fate.steps in range(3):
        for other in POINTS:
            fate.meets(other)
    fate.steps = 3
    for other in set(POINTS) - {point}:
        fate.meets(other)
    for _ in range(2):
        with pytest.raises(RankDied, match="rank 1 ends in step 3"):
            fate.meets(point)
    with pytest.raises(RankDied):
        fate.meets(Point.STEP)


def test_a_rank_ends_within_a_batch_of_writes():
    fate = Fate(Loss(rank=1, step=3, point=Point.WRITE, objects=2), 1)
    fate.meets(Point.WRITE)
    fate.steps = 5
    fate.meets(Point.WRITE)
    fate.meets(Point.WRITE)
    with pytest.raises(RankDied):
        fate.meets(Point.WRITE)


def test_others_and_who_was_asked_to_stop_live_on():
    loss = Loss(rank=1, step=0, point=Point.STEP)
    Fate(loss, 0).meets(Point.STEP)
    fate = Fate(loss, 1)
    fate.over = True
    fate.meets(Point.STEP)
    Fate(None, 1).meets(Point.STEP)


def votes(loss, size):
    """One ballot of ``size`` ranks; what each one has of it."""

    def body(ranks):
        mortal = MortalRanks(ranks.rank, ranks.rendezvous, Fate(loss, ranks.rank))
        try:
            return mortal.all_reduce_min(np.array([ranks.rank])).tolist()
        except (RankLostError, RankDied) as error:
            return type(error)

    return together(*[body] * size, seed=1)


def test_who_dies_before_a_ballot_leaves_nobody_a_result():
    assert votes(Loss(rank=1, step=0, point=Point.BALLOT), 3) == [
        RankLostError, RankDied, RankLostError,
    ]  # fmt: skip


def test_who_dies_within_a_ballot_leaves_some_a_result():
    loss = Loss(rank=2, step=0, point=Point.RESULT, deaf=frozenset({1}))
    assert votes(loss, 4) == [[0], RankLostError, RankDied, [0]]


@pytest.mark.parametrize("dies", [0, 2])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_a_fleet_that_loses_a_rank_ends_as_a_whole(point, dies):
    loss = Loss(rank=dies, step=6, point=point, objects=1, deaf=frozenset({1}))
    fleet = Fleet(replace(storage_plan(2, "three", 3), loss=loss))
    fleet.run()
    assert fleet.lost is fleet.ranks[dies]
    assert fleet.stores.check(fleet.plan) > 0
    for rank in fleet.ranks:
        assert rank.steps <= fleet.lost.steps + 1
        assert not rank.cache.storage.busy or rank is fleet.lost


def lost_in_its_last_step(point, dies, deaf):
    """Three ranks, of which one ends in the step whose message tells all to stop."""
    plan = storage_plan(2, "anchor", 3, pages=(1, 2))
    whole = Fleet(plan)
    whole.run()
    loss = Loss(rank=dies, step=whole.ranks[0].steps - 1, point=point, deaf=frozenset(deaf))
    return Fleet(replace(plan, loss=loss))


@pytest.mark.parametrize(("dies", "deaf"), [(2, ()), (2, (0,)), (2, (0, 1)), (0, (1,))])
def test_who_has_the_result_of_the_last_ballot_ends_as_it_was_asked_to(dies, deaf):
    fleet = lost_in_its_last_step(Point.RESULT, dies, deaf)
    fleet.run()
    assert fleet.lost is fleet.ranks[dies]
    stopped = {rank.rank for rank in fleet.ranks if rank.fate.over}
    assert stopped == {0, 1, 2} - {dies, *deaf}


@pytest.mark.parametrize("point", [Point.STEP, Point.BROADCAST, Point.BALLOT])
def test_who_lacks_the_result_of_the_last_ballot_is_lost_and_does_not_stop(point):
    fleet = lost_in_its_last_step(point, 2, ())
    fleet.run()
    assert fleet.lost is fleet.ranks[2]
    assert not any(rank.fate.over for rank in fleet.ranks)


@pytest.mark.parametrize(("point", "deaf"), [(Point.RESULT, (1,)), (Point.BALLOT, ())])
def test_who_stops_as_asked_without_the_result_of_the_last_ballot_has_gone_on(point, deaf):
    fleet = lost_in_its_last_step(point, 2, deaf)
    with a_lost_rank_ignored(), pytest.raises(AssertionError, match="gone on without rank 2"):
        fleet.run()


def test_who_ends_without_having_been_asked_to_has_gone_on():
    fleet = Fleet(replace(storage_plan(2, "anchor", 3), loss=Loss(rank=2, step=6, point=POINTS[0])))
    follow = fleet.ranks[1].engine.follow

    def followed():
        with suppress(RankLostError):
            follow()

    fleet.ranks[1].engine.follow = followed
    with pytest.raises(AssertionError, match="rank 1 has gone on without rank 2"):
        fleet.run()


def test_what_a_dead_rank_had_queued_is_not_written():
    """Who lives has its time to write; who dies has not."""
    plan = storage_plan(2, "anchor", 2, stop=BestEffort())
    loss = Loss(rank=1, step=9, point=Point.STEP)
    fleet = Fleet(replace(plan, loss=loss))
    for rank in fleet.ranks:
        rank.adversary.hold("storage", 1000)
    fleet.run()
    written = [len(fleet.stores.of(rank).names) for rank in range(2)]
    assert written[0] > written[1] == 0


@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize("name", ["state", "states-only", "three"])
def test_a_state_that_a_lost_step_has_moved_on_is_not_stored(name, step):
    """The forward has run, and its tokens never came: what the live page holds is one token ahead
    of what counts as computed, which is a whole page."""
    prompt = Prompt(
        id=RequestId("r"),
        tokens=np.arange(2 * PAGE, dtype=np.int32),
        sampling=SamplingParams(max_tokens=6, temperature=0.0),
    )
    plan = replace(
        storage_plan(1, name),
        snapshot_pages=4,
        chunk_tokens=16,
        events=(OperatorEvent(after=0, command=Submit(prompt)),),
        loss=Loss(rank=1, step=step, point=Point.BROADCAST),
    )
    fleet = Fleet(plan)
    fleet.run()
    assert fleet.lost

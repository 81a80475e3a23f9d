"""A simulated run: what a seed fixes, and what the comparison of ranks sees."""

import threading
from unittest import mock

import numpy as np
import pytest

from stratakv.cache.fetches import Fetches
from stratakv.core.errors import DivergenceError
from stratakv.core.ids import GroupId
from stratakv.engine.ranked import Submit
from stratakv.sim.picture import first_difference, picture
from stratakv.sim.plan import RULES, plan_of
from stratakv.sim.run import PICTURE_STEPS, Fleet
from stratakv.sim.runner import expected_tokens, next_token
from stratakv.tree.nodes import Tier
from tests.fleet_plans import storage_plan


def followed(seed):
    """A run, and the state of a follower after each of its steps."""
    fleet, seen = Fleet(plan_of(seed)), []
    rank = fleet.ranks[1]
    after = rank.after_step

    def after_step():
        after()
        seen.append(hash(picture(rank.inner)))

    rank.after_step = after_step
    return fleet.run(), seen


@pytest.mark.parametrize("seed", [3, 11, 20])
def test_one_seed_is_one_run(seed):
    assert followed(seed) == followed(seed)


def test_seeds_differ_and_draw_every_kind_of_cache_and_fleet():
    plans = [plan_of(seed) for seed in range(300)]
    assert {len(plan.spec.groups) for plan in plans} == {1, 2, 4}
    assert len({plan.spec.digest for plan in plans}) == len(RULES)
    assert {plan.ranks for plan in plans} >= {2, 3, 4, 8}
    assert len({plan.events[0].command.prompt.tokens.tobytes() for plan in plans}) > 290


def test_tokens_are_a_function_of_all_that_came_before():
    prompt = np.arange(5, 17, dtype=np.int32)
    said = expected_tokens(prompt, 4)
    for at in range(4):
        assert said[at] == next_token(np.array([*prompt.tolist(), *said[:at]]))
    assert expected_tokens(prompt[::-1], 1) != said[:1]


def half_way(change):
    """A run in which ``change`` happens to rank 1 after a while."""
    fleet = Fleet(storage_plan(1, "three"))
    rank = fleet.ranks[1]
    before = rank.before_step

    def before_step():
        before()
        if rank.steps == 12:
            change(rank)

    rank.before_step = before_step
    return fleet


def lose_a_free_page(rank):
    rank.cache._pools.tiers[Tier.HOST][1].alloc(1)


def warm_a_page(rank):
    nodes = rank.cache._tree.nodes
    nodes.rank[0][nodes.rows()[0]] += 1


def think_it_stored(rank):
    marks = rank.cache._tree.stored._marks[GroupId(0)]
    marks[:] = ~marks


def forget_a_key(rank):
    rank.inner._computing.add(b"nothing")


@pytest.mark.parametrize(
    "change", [lose_a_free_page, warm_a_page, think_it_stored, forget_a_key],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_the_slightest_difference_is_seen_within_four_steps(change):
    fleet = half_way(change)
    with pytest.raises((AssertionError, DivergenceError), match=r"is not as rank 0 is|differ in"):
        fleet.run()
    assert fleet.ranks[0].steps <= 12 + PICTURE_STEPS


def test_a_wrong_page_on_a_follower_is_seen():
    """What landed there is another page's bytes: nobody hears the follower, but it is compared."""
    fleet = Fleet(storage_plan(1, "anchor"))
    rank = fleet.ranks[1]
    mine, land = rank.cache.storage.prefetcher._fetches, Fetches.land

    def landed(self, keys, what, pages):
        if self is mine:
            self._arenas[0].rows += 1
        return land(self, keys, what, pages)

    with (
        mock.patch.object(Fetches, "land", landed),
        pytest.raises(AssertionError, match="rank 1 is not as rank 0 is"),
    ):
        fleet.run()


def test_equal_things_do_not_differ_and_others_name_the_place():
    assert first_difference({"a": [1, np.arange(3)]}, {"a": [1, np.arange(3)]}) is None
    assert first_difference({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}) == ".a.1.1: 3 against 4"
    assert first_difference([1], [1, 2]) is not None
    assert first_difference(np.arange(2), np.arange(3)) is not None


def test_a_rank_that_never_comes_is_named(monkeypatch):
    monkeypatch.setattr("stratakv.sim.run.PATIENCE_S", 0.3)
    free = threading.Event()
    fleet = Fleet(storage_plan(1, "anchor", 3))
    fleet.ranks[2].before_step = free.wait
    with pytest.raises(
        AssertionError, match=r"rank 0 in tell\[\], rank 1 in tell\[\]; not there: 2"
    ):
        fleet.run()
    free.set()


def test_a_plan_ends_with_every_request_answered():
    plan = plan_of(5)
    fleet = Fleet(plan)
    fleet.run()
    asked = sum(isinstance(event.command, Submit) for event in plan.events)
    assert len(fleet.client._ended) == asked

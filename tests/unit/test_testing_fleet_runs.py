"""A simulated run: what a seed fixes, and what the comparison of ranks sees."""

import sys
import threading
from dataclasses import replace
from functools import partial
from random import Random
from unittest import mock

import numpy as np
import pytest

from stratakv.core.errors import DivergenceError
from stratakv.core.ids import GroupId
from stratakv.engine.ranks.step_messages import Submit
from stratakv.testing.fleet.picture import first_difference, picture
from stratakv.testing.fleet.rank import PICTURE_STEPS
from stratakv.testing.fleet.run import Fleet
from stratakv.testing.fleet.runner import as_kept, expected_tokens, next_token
from stratakv.testing.fleet.scenario import RULES, plain_plan
from stratakv.testing.fleet.stores import Stores
from stratakv.testing.fleet.variety import adapted, loss_of, plan_of, restarted, shared
from stratakv.tiers.prefetch.fetches import Fetches
from stratakv.tree.nodes import Tier
from stratakv.tree.stored import Writing
from tests.fleet_plans import storage_plan


def followed(plan):
    """All that happens in the fleets of a plan: every rank's state after each of its steps, and
    every call of a store, in the order in which they came."""
    seen, stores = [], Stores(plan)
    for shelf in {id(stores.of(rank)): stores.of(rank) for rank in range(plan.ranks)}.values():
        write, read = shelf.memory.write, shelf.memory.read
        shelf.memory.write = lambda keys, pages, write=write: (
            seen.append((tuple(keys), threading.current_thread().name)), write(keys, pages)
        )[1]  # fmt: skip
        shelf.memory.read = lambda keys, into, read=read: (
            seen.append((len(keys), threading.current_thread().name)), read(keys, into)
        )[1]  # fmt: skip
    while plan is not None:
        fleet = Fleet(plan, stores)
        for rank in fleet.ranks:
            rank.after_step = partial(_after_step, rank, rank.after_step, seen)
        trace = fleet.run()
        seen.append((trace.steps, trace.output_tokens, dict(trace.cached), fleet.lost is None))
        plan = plan.then
    return seen


def _after_step(rank, after, seen):
    after()
    seen.append((rank.rank, hash(picture(rank.inner))))


def all_at_once(seed):
    """A plan with one store that serves two fleets, the first of which loses a rank."""
    draw = Random(seed)
    plan = shared(adapted(plain_plan(seed), draw), draw)
    plan = replace(plan, observed=True, io_lanes=2, loss=loss_of(draw, plan.ranks))
    return restarted(plan, draw)


@pytest.mark.parametrize("plan", [plain_plan(3), plain_plan(11), *map(all_at_once, range(4))],
                         ids=lambda plan: str(plan.seed))  # fmt: skip
def test_one_seed_is_one_run_whatever_threads_do(plan):
    first = followed(plan)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert followed(plan) == first
    finally:
        sys.setswitchinterval(usual)
    assert any(step[0] == plan.ranks - 1 for step in first)


def test_seeds_differ_and_draw_every_kind_of_cache_and_fleet():
    plans = [plan_of(seed) for seed in range(300)]
    whole = [plan.spec.groups for plan in plans if not plan.buffer_rows]
    assert set(map(len, whole)) == {1, 2, 4}
    assert len({tuple(group.retention for group in groups) for groups in whole}) == 6
    assert any(plan.spec.has_home_on_host for plan in plans)
    assert len({plain_plan(seed).spec.digest for seed in range(300)}) == len(RULES)
    assert {plan.ranks for plan in plans} >= {2, 3, 4, 8}
    assert len({plan.events[0].command.prompt.tokens.tobytes() for plan in plans}) > 290


def test_tokens_are_a_function_of_all_that_came_before():
    prompt = np.arange(5, 17, dtype=np.int32)
    tokens = expected_tokens(prompt, 4)
    for at in range(4):
        assert tokens[at] == next_token(np.array([*prompt.tolist(), *tokens[:at]]))
    assert expected_tokens(prompt[::-1], 1) != tokens[:1]


def test_tokens_depend_on_the_adapter_too():
    prompt = np.arange(5, 17, dtype=np.int32)
    outputs = [expected_tokens(prompt, 3, adapter) for adapter in (-1, 0, 1)]
    assert len({tuple(tokens) for tokens in outputs}) == 3
    whole = np.array([*prompt.tolist(), *outputs[2][:2]])
    assert outputs[2][2] == next_token(as_kept(whole, 1))
    assert (as_kept(prompt, -1) == prompt).all()


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
    rank.cache.tiers.pools.tiers[Tier.HOST][1].alloc(1)


def warm_a_page(rank):
    nodes = rank.cache.tiers.tree.internals.nodes
    nodes.rank[0][nodes.rows()[0]] += 1


def think_it_stored(rank):
    marks = rank.cache.tiers.tree.stored._marks[GroupId(0)]
    marks[:] = ~marks


def forget_a_key(rank):
    rank.inner._admissions._computing.add(b"nothing")


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


ROWS = np.arange(3)


def test_equal_things_do_not_differ_and_others_name_the_place():
    assert first_difference({"a": [1, np.arange(3)]}, {"a": [1, np.arange(3)]}) is None
    assert first_difference({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}) == ".a.1.1: 3 against 4"
    assert first_difference([1], [1, 2]) is not None
    assert first_difference({Writing(0, ROWS): 1}, {Writing(0, ROWS.copy()): 1}) is None
    other = first_difference({Writing(0, ROWS): 1}, {Writing(0, ROWS + 1): 1})
    assert other is not None
    assert other.startswith(".0.0.rows: ")
    assert first_difference({"a": 1, "b": 2}, {"b": 2, "a": 1}) is not None
    assert first_difference(np.arange(2), np.arange(3)) is not None


def test_a_rank_that_never_comes_is_named(monkeypatch):
    monkeypatch.setattr("stratakv.testing.fleet.run.PATIENCE_S", 0.3)
    free = threading.Event()
    fleet = Fleet(storage_plan(1, "anchor", 3))
    fleet.ranks[2].before_step = free.wait
    with pytest.raises(AssertionError, match=r"not there: .*2"):
        fleet.run()
    free.set()


def test_a_plan_ends_with_every_request_answered():
    plan = plain_plan(5)
    fleet = Fleet(plan)
    fleet.run()
    asked = sum(isinstance(event.command, Submit) for event in plan.events)
    assert len(fleet.client.ended) == asked

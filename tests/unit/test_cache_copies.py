"""KVCache's own promises: a step's backups are one plan and its loads another, a refusal changes
nothing, and an allocation waits for a copy that holds back what it was promised.
"""

import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from stratakv.cache.prices import AdmissionRequest
from stratakv.cache.records import Admission, Refusal
from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId
from stratakv.core.page_keys import Namespace, PageHasher
from stratakv.engine.request import Phase
from stratakv.spec.retention import KeepWindow
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.transfer_ends import HookedCopier
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.cpu import DEFAULT_COPIER
from stratakv.tree.nodes import Tier
from tests.engines import (
    allocator,
    drain,
    evict_device,
    expected_tokens,
    greedy,
    run,
    token_engine,
    token_spec,
    tokens_of,
)

SPEC = token_spec(4, KeepWindow(10))
CONFIG = EngineConfig(
    page_tokens=4, max_running=3, max_model_len=200, chunk_tokens=20, step_tokens=80
)
PROMPTS = [[(n * 5 + k) % 97 for n in range(41)] for k in range(4)]


def admission_request(prefix, tokens, total_tokens):
    return AdmissionRequest(prefix=prefix, tokens=tokens, total_tokens=total_tokens)


def engine(device=(60, 30), host=(60, 30), copier=DEFAULT_COPIER, **settings):
    return token_engine(SPEC, replace(CONFIG, **settings), device, host, copier)


def prefix_of(tokens):
    prefix = PageHasher(Namespace(model=b"m", spec_digest=b"s"), 4)
    prefix.extend(np.array(tokens, np.int32))
    return prefix


def test_all_backups_of_a_step_are_one_plan(monkeypatch):
    with engine() as parts:
        plans = []
        submit = parts.transfer.submit

        def counting(plan):
            plans.append(plan)
            return submit(plan)

        monkeypatch.setattr(parts.transfer, "submit", counting)
        for n in range(3):
            parts.engine.submit(greedy(str(n), PROMPTS[n], 2))
        for step in range(1, 3):
            parts.engine.step()
            assert len(plans) == step
            assert plans[-1].direction is Direction.BACKUP
            anchor = next(copy for copy in plans[-1].copies if copy.group == 0)
            assert len(anchor.device) == 3 * 5  # of three requests, 20 tokens each
        drain(parts)
        assert sum(len(c.device) for p in plans for c in p.copies if c.group == 0) == 3 * 10


def test_a_refusal_changes_nothing():
    with engine(device=(25, 14)) as parts:
        cache = parts.cache
        held = cache.admission.admit(admission_request(prefix_of(PROMPTS[0]), 41, 60))
        assert isinstance(held, Admission)
        before = cache.tiers.pools.stats(), cache.tiers.pools.counters.snapshot()
        assert (
            cache.admission.admit(admission_request(prefix_of(PROMPTS[1]), 41, 60))
            is Refusal.NO_PAGES
        )
        assert (cache.tiers.pools.stats(), cache.tiers.pools.counters.snapshot()) == before
        cache.check()
        small = [cache.admission.admit(admission_request(prefix_of([k]), 1, 4)) for k in range(2)]
        assert all(isinstance(admission, Admission) for admission in small)
        assert cache.admission.admit(admission_request(prefix_of([9]), 1, 4)) is Refusal.NO_ROW
        for admission in (held, *small):
            cache.release(admission.row, np.empty(0, np.int32))
        assert cache.progress.flush()
        assert all(pool.free == pool.total for pool in cache.tiers.pools.stats())


def test_an_allocation_waits_for_the_copy_that_holds_its_page_back(monkeypatch):
    """Half of a prefix is saved, the half below it is being saved: the upper pages are nobody's,
    but an anchor's pages leave from the leaf up."""
    allowed = threading.Event()
    plans = []

    def second_plan_waits(direction, group, layers):
        del layers
        plans.append((direction, group))
        if plans.count((Direction.BACKUP, 0)) == 2:
            assert allowed.wait(PATIENCE_S), "nobody waited for the copy"

    with engine((12, 20), copier=HookedCopier(DEFAULT_COPIER, second_plan_waits)) as parts:
        progress, flights = parts.cache.progress, parts.cache.tiers.copies.flights
        wait = progress.wait

        def allow_and_wait():
            allowed.set()
            return wait()

        parts.engine.submit(greedy("a", PROMPTS[0], 1))
        parts.engine.step()
        while not flights.ready:  # the first plan, on its own thread
            threading.Event().wait(0.001)
        out = parts.engine.step() + parts.engine.step()
        assert not parts.engine.statuses()
        monkeypatch.setattr(progress, "wait", allow_and_wait)
        parts.engine.submit(greedy("b", PROMPTS[1][:21], 2))
        out += drain(parts)
        assert parts.cache.tiers.pools.counters.copy_waits > 0
        for name, prompt, count in (("a", PROMPTS[0], 1), ("b", PROMPTS[1][:21], 2)):
            generated = tokens_of([output for output in out if output.request == name])
            assert generated == expected_tokens(prompt, count)


def test_a_prefix_that_is_being_loaded_is_joined_not_loaded_twice():
    with engine() as parts:
        run(parts, greedy("a", PROMPTS[0], 2))
        evict_device(parts)
        loaded = parts.cache.tiers.pools.counters.load_pages
        out = run(parts, *(greedy(str(n), PROMPTS[0], 2) for n in range(3)))
        assert [out[str(n)][0].cached.total for n in range(3)] == [40] * 3
        assert sum(out[str(n)][0].cached.host for n in range(3)) == 40
        assert parts.cache.tiers.pools.counters.load_pages - loaded == 10 + 3


# -- the loads of a step -------------------------------------------------------------------------


@contextmanager
def all_on_the_host(prompts, **settings):
    """An engine that has served ``prompts`` and has nothing of them on the device any more."""
    with engine(**settings) as parts:
        for n, prompt in enumerate(prompts):
            run(parts, greedy(f"before {n}", prompt, 1))
        evict_device(parts)
        yield parts


def asked(parts, tokens):
    """What the engine would ask of its cache for a prompt, and a few tokens more."""
    prefix = PageHasher(parts.plan.namespaces.of("", ""), 4)
    prefix.extend(np.array(tokens, np.int32))
    return admission_request(prefix, len(tokens), len(tokens) + 3)


def plans_of(parts, monkeypatch):
    """The load plans that are submitted from now on."""
    plans, submit = [], parts.transfer.submit

    def seen(plan):
        if plan.direction is Direction.LOAD:
            plans.append(plan)
        return submit(plan)

    monkeypatch.setattr(parts.transfer, "submit", seen)
    return plans


def pages_in(plan):
    return [len(copy.device) for copy in plan.copies]


def test_all_loads_of_a_step_are_one_plan(monkeypatch):
    """One copy of each group, ten pages and the window's three of each request; nothing follows."""
    with all_on_the_host(PROMPTS[:3]) as parts:
        plans = plans_of(parts, monkeypatch)
        for n in range(3):
            parts.engine.submit(greedy(str(n), PROMPTS[n], 3))
        out = parts.engine.step()
        assert [pages_in(plan) for plan in plans] == [[3 * 10, 3 * 3]]
        out += drain(parts)
        assert len(plans) == 1
        for n in range(3):
            mine = [output for output in out if output.request == str(n)]
            assert mine[0].cached.host == 40
            assert tokens_of(mine) == expected_tokens(PROMPTS[n], 3)


def test_one_that_comes_back_loads_with_the_new_ones(monkeypatch):
    """Its live page, and what it stands on, leave with the load of the request behind it."""
    with all_on_the_host([PROMPTS[0]]) as parts:
        parts.engine.submit(greedy("r", PROMPTS[1], 9))
        out = []
        while not out:
            out += parts.engine.step()
        parts.engine.retract(RequestId("r"))
        evict_device(parts)
        plans = plans_of(parts, monkeypatch)
        parts.engine.submit(greedy("new", PROMPTS[0], 3))
        out += parts.engine.step()
        assert [pages_in(plan) for plan in plans] == [[(10 + 1) + 10, (3 + 1) + 3]]
        out += drain(parts)
        for name, prompt, count in (("r", PROMPTS[1], 9), ("new", PROMPTS[0], 3)):
            generated = tokens_of([output for output in out if output.request == name])
            assert generated == expected_tokens(prompt, count)


def test_leases_of_one_plan_carry_its_ticket_once():
    """The second stands on pages that the first is loading, and loads more with the same plan."""
    half = PROMPTS[0][:21]
    with all_on_the_host([half, PROMPTS[0]]) as parts:
        first = parts.cache.admission.admit(asked(parts, half))
        both = parts.cache.admission.admit(asked(parts, PROMPTS[0]))
        assert (first.cached.host, both.cached.host) == (20, 20)
        assert first.tickets == both.tickets
        assert len(both.tickets) == 1
        parts.cache.check()
        gate = parts.cache.tiers.copies.flights.gate(both.tickets)
        for layer in range(2):
            gate.wait(layer)
        for admission in (first, both):
            parts.cache.release(admission.row, np.empty(0, np.int32))
        parts.cache.progress.settle()
        parts.cache.check()


def test_a_load_that_finds_no_page_leaves_the_others_of_its_step_alone(monkeypatch):
    with all_on_the_host(PROMPTS[:2]) as parts:
        plans, space = plans_of(parts, monkeypatch), allocator(parts, Tier.DEVICE, 1)
        first = parts.cache.admission.admit(asked(parts, PROMPTS[0]))
        before = parts.cache.tiers.pools.stats(), set(parts.cache.tiers.tree.leases)
        with monkeypatch.context() as patch:
            patch.setattr(space, "alloc", lambda count: None)
            second = parts.cache.admission.admit(asked(parts, PROMPTS[1]))
        assert parts.engine.stats().lost_tokens["host", "device_capacity"] == 40
        assert second.cached.total == 0
        parts.cache.release(second.row, np.empty(0, np.int32))
        assert (parts.cache.tiers.pools.stats(), set(parts.cache.tiers.tree.leases)) == before
        parts.cache.check()
        parts.cache.tiers.copies.flights.gate(first.tickets)
        assert [pages_in(plan) for plan in plans] == [[10, 3]]
        parts.cache.release(first.row, np.empty(0, np.int32))
        assert run(parts, greedy("again", PROMPTS[1], 2))["again"][0].cached.host == 40


@pytest.mark.parametrize("group", [0, 1])
def test_one_that_comes_back_without_a_page_for_its_live_page_begins_no_load(group, monkeypatch):
    """Nothing may fail after a load has begun; as before is also what the device has."""
    with all_on_the_host([]) as parts:
        parts.engine.submit(greedy("r", PROMPTS[1], 9))
        out = []
        while not out:
            out += parts.engine.step()
        parts.engine.retract(RequestId("r"))
        evict_device(parts)
        plans, space = plans_of(parts, monkeypatch), allocator(parts, Tier.DEVICE, group)
        before = parts.cache.tiers.pools.stats(), set(parts.cache.tiers.tree.leases)
        assert all(
            pool.free == pool.total
            for pool in parts.cache.tiers.pools.stats()
            if pool.tier == "device"
        )
        with monkeypatch.context() as patch:
            patch.setattr(space, "alloc", lambda count: None)
            parts.engine.admit()
        assert parts.engine.status(RequestId("r")).phase is Phase.RETRACTED
        assert (parts.cache.tiers.pools.stats(), set(parts.cache.tiers.tree.leases)) == before
        assert not parts.cache.progress.busy
        parts.cache.check()
        out += drain(parts)
        assert [pages_in(plan) for plan in plans] == [[10 + 1, 3 + 1]]
        assert tokens_of(out) == expected_tokens(PROMPTS[1], 9)


def test_the_budget_counts_every_load_of_a_plan():
    with all_on_the_host(PROMPTS[:3], load_back_budget=100) as parts:
        both = [parts.cache.admission.admit(asked(parts, prompt)) for prompt in PROMPTS[:2]]
        assert parts.cache.tiers.pools.counters.load_waited == 0
        for waited in (1, 2):
            found = parts.cache.admission.admit(asked(parts, PROMPTS[2]))
            assert found is Refusal.LOAD_BUDGET
            assert parts.cache.tiers.pools.counters.load_waited == waited
        parts.cache.progress.settle()
        third = parts.cache.admission.admit(asked(parts, PROMPTS[2]))
        assert [admission.cached.host for admission in (*both, third)] == [40] * 3
        for admission in (*both, third):
            parts.cache.release(admission.row, np.empty(0, np.int32))


def test_who_loads_nothing_does_not_wait_for_the_budget():
    with all_on_the_host(PROMPTS[:2], load_back_budget=50) as parts:
        run(parts, greedy("on the device", PROMPTS[2], 1))
        first = parts.cache.admission.admit(asked(parts, PROMPTS[0]))
        assert parts.cache.admission.admit(asked(parts, PROMPTS[1])) is Refusal.LOAD_BUDGET
        there = parts.cache.admission.admit(asked(parts, PROMPTS[2]))
        assert (first.cached.host, there.cached.device) == (40, 40)
        for admission in (first, there):
            parts.cache.release(admission.row, np.empty(0, np.int32))


def test_one_that_leaves_before_its_load_was_submitted_leaves_nothing():
    """The load goes out all the same: others of its step may stand on what it brings."""
    with all_on_the_host([PROMPTS[0]]) as parts:
        cache = parts.cache
        admission = cache.admission.admit(asked(parts, PROMPTS[0]))
        assert cache.progress.busy
        cache.release(admission.row, np.empty(0, np.int32))
        cache.check()
        assert not cache.tiers.tree.leases
        cache.progress.settle()
        cache.check()
        assert all(pool.free + pool.evictable == pool.total for pool in cache.tiers.pools.stats())
        assert cache.admission.match(asked(parts, PROMPTS[0]).prefix, 41).device_end == 10
        assert cache.progress.flush()
        assert all(pool.free == pool.total for pool in cache.tiers.pools.stats())

"""Fleets of simulated ranks: all are alike after every step, what they say is right, and they meet
exactly as often as they should. `make test-long` has ten thousand runs more.
"""

from collections import Counter

import pytest

from stratakv.agreement import ballot
from stratakv.engine.ranks.step_messages import Flush, Stop, Submit
from stratakv.testing.fleet.loss import Point
from stratakv.testing.fleet.run import Fleet, run
from stratakv.testing.fleet.scenario import plain_plan
from stratakv.testing.fleet.stores import Stores
from stratakv.testing.fleet.variety import plan_of
from stratakv.tiers.progress import Progress

RUNS, CHUNK = 30, 15
LONG_RUNS, LONG_CHUNK = 10_400, 260
PLANS = 500


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("first", range(0, RUNS, CHUNK))
def test_ranks_are_alike_after_every_step(first):
    for seed in range(first, first + CHUNK):
        run(seed)


@pytest.mark.long
@pytest.mark.parametrize("first", range(RUNS, RUNS + LONG_RUNS, LONG_CHUNK))
def test_ranks_are_alike_after_every_step_of_many_runs(first):
    for seed in range(first, first + LONG_CHUNK):
        run(seed)


def test_runs_come_by_everything_that_may_happen():
    """A campaign in which no page moves proves nothing."""
    moved: dict[str, int] = {}
    for seed in range(15):
        fleet = Fleet(plain_plan(seed))
        cached = fleet.run().cached
        storage = fleet.ranks[0].cache.storage
        prefetched = storage.prefetcher.counters
        counts = fleet.ranks[0].cache.tiers.pools.counters.snapshot() | {
            "from the device": cached["device"],
            "from storage": cached["storage"],
            "lost to another rank": sum(prefetched.lost.values()),
            "stored": storage.persister.counters.stored,
        }
        for name, count in counts.items():
            moved[name] = moved.get(name, 0) + count
    wanted = ("from the device", "from storage", "lost to another rank", "stored", "retracted",
              "retracted_pages", "load_pages", "backup_pages", "backup_failed_pages", "copy_waits",
              "evicted_device_pages", "evicted_host_pages", "snapshots")  # fmt: skip
    assert not [name for name in wanted if not moved[name]]


SPILLED_RUNS, SPILLED_CHUNK = 25_000, 500


def spilled_runs(seeds):
    """All of these whose requests may read rows on the host; what they have come to."""
    seen = Counter()
    for plan in [plan for plan in map(plan_of, seeds) if plan.buffer_rows]:
        stores, now = Stores(plan), plan
        while now is not None:
            fleet = Fleet(now, stores)
            fleet.run()
            first = fleet.ranks[0]
            counters = first.cache.tiers.pools.counters.snapshot()
            seen.update({name: counters[name] for name in ("spilled", "retracted")})
            seen["copied to buffers"] += first.runner.spilled.read
            seen["found in buffers"] += first.runner.spilled.kept
            now = now.then
    return seen


def test_requests_that_read_rows_on_the_host_are_right_on_all_ranks():
    seen = spilled_runs(range(30))
    wanted = "copied to buffers", "found in buffers", "spilled", "retracted"
    assert not [name for name in wanted if not seen[name]]


@pytest.mark.long
@pytest.mark.parametrize("first", range(RUNS, SPILLED_RUNS, SPILLED_CHUNK))
def test_requests_that_read_rows_on_the_host_are_right_in_many_runs(first):
    assert spilled_runs(range(first, first + SPILLED_CHUNK))["spilled"]


def test_ranks_count_the_same_losses():
    """Where there is no storage: what it had may differ, and with it what it explains."""
    seen = 0
    plans = [plan for plan in map(plan_of, range(PLANS)) if plan.reuse and not plan.stores]
    for plan in [plan for plan in plans if plan.loss is None]:
        fleet = Fleet(plan)
        fleet.run()
        of = [rank.cache.admission.losses.by_tier() for rank in fleet.ranks]
        assert all(lost == of[0] for lost in of)
        seen += sum(of[0].values())
    assert seen


def test_plans_draw_everything_that_a_fleet_can_be():
    plans = [plan_of(seed) for seed in range(PLANS)]
    kinds = {
        "one store, split": [p.one_store and p.one_store.sharding.split for p in plans],
        "one store, not split": [p.one_store and not p.one_store.sharding.split for p in plans],
        "slices finer than ranks": [p.one_store and p.one_store.cut > p.ranks for p in plans],
        "adapters": [any(of.command.prompt.adapter for of in asked(p)) for p in plans],
        "followed": [p.observed for p in plans],
        "without a host": [p.reuse and not any(p.host) for p in plans],
        "without reuse": [not p.reuse for p in plans],
        "rows on the host": [p.spec.has_home_on_host and p.buffer_rows for p in plans],
        "rows on the host, ahead": [p.buffer_rows and p.steps_at_once > 1 for p in plans],
        "rows on the host, retracted": [p.buffer_rows and p.retractions for p in plans],
        "two lanes": [p.io_lanes == 2 and p.stores for p in plans],
        "another number of ranks": [p.then and p.then.ranks != p.ranks for p in plans],
        "lost, and then again": [p.then and p.loss for p in plans],
        **{point.name: [p.loss and p.loss.point is point for p in plans] for point in Point},
    }
    assert [name for name, found in kinds.items() if sum(map(bool, found)) < 5] == []


def asked(plan):
    return [of for of in plan.events if isinstance(of.command, Submit)]


def test_ranks_are_lost_and_who_comes_back_finds_what_was_stored():
    lost, found = set(), 0
    for plan in [plan for plan in map(plan_of, range(150)) if plan.then][:12]:
        stores = Stores(plan)
        first = Fleet(plan, stores)
        first.run()
        if first.lost:
            lost.add(plan.loss.point)
        found += Fleet(plan.then, stores).run().cached["storage"] > 0
    assert len(lost) >= 3
    assert found >= 3


@pytest.mark.parametrize("first", range(0, 12, 4))
def test_ballots_that_are_too_narrow_for_their_fields_only_take_longer(first, monkeypatch):
    flags = (2, 0, 8, 8, 8, 0, 0)
    monkeypatch.setattr(ballot, "FLAGS", flags)  # the lanes stay where they are; some are empty
    for seed in range(first, first + 4):
        run(seed)


@pytest.mark.parametrize("seed", range(0, 60, 4))
def test_a_step_takes_one_ballot_and_one_message(seed, monkeypatch):
    """But where it must wait for a copy, and then one more ballot for each look at it."""
    fleet, extra = Fleet(plain_plan(seed)), []
    rank = fleet.ranks[-1]
    wait, tick = Progress.wait, Progress.tick

    def waited(progress):
        before = rank.agreement.ballots
        found = wait(progress)
        if progress is rank.cache.progress:
            extra.append(rank.agreement.ballots - before)
        return found

    ticks = []

    def ticked(progress, head=None):
        ticks.append(progress)
        tick(progress, head)

    monkeypatch.setattr(Progress, "wait", waited)
    monkeypatch.setattr(Progress, "tick", ticked)
    plain = []
    step = rank.engine.step

    def stepped():
        extra.clear()
        ticks.clear()
        ballots, broadcasts = rank.agreement.ballots, rank.agreement.broadcasts
        outputs = step()
        assert rank.agreement.broadcasts - broadcasts == 1
        mine = sum(progress is rank.cache.progress for progress in ticks)
        assert rank.agreement.ballots - ballots == mine + sum(extra)
        if not done:
            assert mine == 1
        plain.append(mine + sum(extra) == 1)
        done.clear()
        return outputs

    done = []
    flushed, stop = rank.flushed, rank.fate.stop
    rank.flushed = lambda: (done.append(Flush()), flushed())
    rank.fate.stop = lambda: (done.append(Stop()), stop())
    rank.engine.step = stepped
    fleet.run()
    assert sum(plain) > len(plain) / 2

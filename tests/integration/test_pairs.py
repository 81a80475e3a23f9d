"""Simulated pairs, one engine that computes prompts and one that decodes, on a hostile schedule:
what is answered is right, whoever may not fail does not, and nothing is left.

In the first seeds everything that may happen is counted; `make test` has a few more, `make
test-long` ten thousand.
"""

import sys
from collections import Counter
from dataclasses import replace
from random import Random
from unittest import mock

import pytest

from stratakv.disagg.decode_role import DecodeRole
from stratakv.disagg.recompute import Recompute
from stratakv.disagg.session import Session
from stratakv.engine.ranks.step_messages import Submit
from stratakv.engine.request import FinishReason, TransferSession
from stratakv.testing.fleet.network import NetworkPace
from stratakv.testing.fleet.pair import SimPair, run_pair
from stratakv.testing.fleet.pair_plan import (
    ADDRESS,
    DECODE,
    PREFILL,
    BreakLink,
    PairEvent,
    pair_plan_of,
)
from stratakv.testing.fleet.scenario import prompt_of, tokens_of

COUNTED = 60
RUNS, CHUNK = 120, 30
LONG_RUNS, LONG_CHUNK = 10_000, 250


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("first", range(COUNTED, RUNS, CHUNK))
def test_what_two_engines_answer_together_is_right(first):
    for seed in range(first, first + CHUNK):
        run_pair(seed)


@pytest.mark.long
@pytest.mark.parametrize("first", range(RUNS, RUNS + LONG_RUNS, LONG_CHUNK))
def test_what_two_engines_answer_together_is_right_in_many_runs(first):
    for seed in range(first, first + LONG_CHUNK):
        run_pair(seed)


def test_a_request_that_is_submitted_behind_its_abort_is_given_up_all_the_same():
    """Of seed 6283: what it holds where it decodes, another one waits for."""
    run_pair(6283)


@pytest.mark.parametrize("again", [9, 10, 11])
def test_a_link_that_breaks_while_it_is_met_again_is_lost_once_more(again):
    """At the turn ``again``. Who asks between the meeting and that loss may fail."""
    plan, draw = pair_plan_of(0), Random(1)
    cuts = [PairEvent(at=at, side=DECODE, command=BreakLink(0, 0)) for at in (2, again)]
    asked = [prompt_of(draw, f"r{n}", tokens_of(draw, 20), 3) for n in range(4)]
    events = [
        PairEvent(at=again + 2 * n, side=side, command=Submit(replace(one, session=session)))
        for n, one in enumerate(asked)
        for session in [TransferSession(one.id, ADDRESS)]
        for side in (PREFILL, DECODE)
    ]
    slow, calm = NetworkPace(fence_looks=20), {"retractions": frozenset()}
    sides = {side: replace(each, **calm) for side, each in plan.sides.items()}
    pair = SimPair(replace(plan, sides=sides, network=slow, rounds=((*cuts, *events),)))
    assert pair.run().joins == 3, "as they begin, behind the first break, and behind the second"


@pytest.mark.parametrize("seed", [0, 3, 14])
def test_one_seed_is_one_run_whatever_threads_do(seed):
    first = run_pair(seed)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert run_pair(seed) == first
    finally:
        sys.setswitchinterval(usual)
    assert first != run_pair(seed + 1)


def test_no_page_is_named_to_prefill_that_a_launched_step_may_still_read():
    """On a device that does nothing before somebody waits for it."""
    passed = []
    real = DecodeRole.reserved

    def reserved(role, request, pages):
        (decode,) = pair.members[DECODE].ranks
        passed.append(decode.executor.launched().passed())
        real(role, request, pages)

    with mock.patch.object(DecodeRole, "reserved", reserved):
        for seed in (1, 2, 4):
            plan = pair_plan_of(seed)
            lazy = {"steps_at_once": 2, "device_pace": 0.0, "retractions": frozenset()}
            sides = {**plan.sides, DECODE: replace(plan.sides[DECODE], **lazy)}
            pair = SimPair(replace(plan, sides=sides))
            pair.run()
    assert len(passed) > 5
    assert all(passed)


def test_runs_come_by_everything_that_may_happen(monkeypatch):
    """A campaign in which nobody is lost and nothing is late proves nothing."""
    seen: Counter[str] = Counter()
    extended = Session.extended

    def counted(session, now_s):
        seen["parts"] += 1
        return extended(session, now_s)

    prompt = Recompute.prompt

    def computed_again(again, session):
        seen["sent back"] += 1
        seen["sent back under an adapter"] += bool(again.adapter)
        return prompt(again, session)

    monkeypatch.setattr(Session, "extended", counted)
    monkeypatch.setattr(Recompute, "prompt", computed_again)
    for seed in (*range(COUNTED), 110):  # decode finds pages in its store once in some fifty runs
        pair = SimPair(pair_plan_of(seed))
        totals = pair.run()
        seen["late writes"] += pair.network.late
        seen["joined again"] += totals.joins - len(pair.links)
        for side, member in pair.members.items():
            stats = member.roles[0].stats()
            first = member.ranks[0]
            counters = first.cache.tiers.pools.counters.snapshot()
            seen[f"{side.name} read on the host"] += first.runner.spilled.read
            seen[f"{side.name} succeeded"] += stats.succeeded
            seen[f"{side.name} retracted"] += counters["retracted"]
            seen[f"{side.name} loaded"] += counters["load_pages"]
            seen["overdue"] += 0 if stats.leases is None else stats.leases.overdue
            client = pair.client.sides[side]
            seen[f"{side.name} from storage"] += client.trace.cached["storage"]
            seen["handed over under an adapter"] += sum(
                bool(client.prompts[request].adapter) and len(found) > 1
                for request, found in client.outputs.items()
            )
            for reason in (FinishReason.ABORT, FinishReason.ERROR):
                seen[f"{side.name} {reason.name}"] += client.outcomes[reason]
    wanted = {
        "parts", "late writes", "joined again", "overdue", "sent back",
        "sent back under an adapter", "handed over under an adapter", "DECODE read on the host",
    }  # fmt: skip
    wanted |= {
        f"{side.name} {what}"
        for side in (PREFILL, DECODE)
        for what in ("succeeded", "retracted", "loaded", "from storage", "ABORT", "ERROR")
    }
    assert not [name for name in sorted(wanted) if not seen[name]]


def test_plans_draw_everything_that_a_pair_can_be():
    plans = [pair_plan_of(seed) for seed in range(500)]
    sides = [plan for pair in plans for plan in pair.sides.values()]
    kinds = {
        "several ranks": [plan.ranks > 1 for plan in sides],
        "run-ahead": [plan.steps_at_once > 1 for plan in sides],
        "without a host": [plan.reuse and not any(plan.host) for plan in sides],
        "without reuse": [not plan.reuse for plan in sides],
        "retracted": [bool(plan.retractions) for plan in sides],
        "home on the host": [plan.spec.has_home_on_host for plan in sides],
        "home on the host, ahead": [plan.buffer_rows and plan.steps_at_once > 1 for plan in sides],
        "home on the host, several ranks": [plan.buffer_rows and plan.ranks > 1 for plan in sides],
        "hasty": [not pair.patient for pair in plans],
        "under adapters": [
            any(
                isinstance(event.command, Submit) and event.command.prompt.adapter
                for some in pair.rounds
                for event in some
            )
            for pair in plans
        ],
        "one store": [pair.one_store for pair in plans],
        "untidy": [pair.untidy is not None for pair in plans],
        "ends that are never reported": [bool(pair.untidy and pair.untidy.lost) for pair in plans],
        "meet late": [pair.meets_at > 0 for pair in plans],
        "broken": [
            any(isinstance(event.command, BreakLink) for some in pair.rounds for event in some)
            for pair in plans
        ],
    }
    assert [name for name, found in kinds.items() if sum(map(bool, found)) < 5] == []

"""Requests that are partly on the host, on a device that runs ahead: who was spilled for others is
resident again when they have ended, and no step is launched over the one that is to leave."""

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from stratakv.cache.kv_cache import KVCache
from stratakv.core.ids import RequestId
from stratakv.engine.ranks.step_messages import Submit
from stratakv.engine.request import Prompt, SamplingParams
from stratakv.testing.fleet.adversary import FaultRates
from stratakv.testing.fleet.run import Fleet
from stratakv.testing.fleet.scenario import LANES, OperatorEvent, plain_plan, spec_named
from stratakv.testing.fleet.variety import spilling

PROMPT, LONG, SHORT = 20, 22, 3


def plan_of(steps_at_once, ranks, pace):
    """One long request; when it decodes, two short ones for which it is spilled."""
    prompts = [
        Prompt(
            id=RequestId(f"r{at}"),
            tokens=np.full(PROMPT, at + 1, np.int32),
            sampling=SamplingParams(max_tokens=LONG if at == 0 else SHORT, temperature=0.0),
        )
        for at in range(3)
    ]
    plan = replace(
        plain_plan(0),
        ranks=ranks,
        spec=spec_named("anchor"),
        device=(60,),
        host=(60,),
        max_running=3,
        chunk_tokens=16,
        step_tokens=24,
        reserve_tokens=0,
        load_back_threshold=0,
        events=tuple(
            OperatorEvent(after=after, command=Submit(prompt))
            for after, prompt in zip((0, 8, 0), prompts, strict=True)
        ),
        fault_rates=(FaultRates(pace=dict.fromkeys(LANES, 1.0)),) * ranks,
        skew=(1.0,) * ranks,
        steps_at_once=steps_at_once,
        device_pace=pace,
        check_steps=1,
    )
    plan = spilling(plan, Random("1"))
    return replace(plan, device=(60, 15), host=(60, 60), buffer_rows=4)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("steps_at_once", "ranks", "pace"), [(1, 1, 1.0), (2, 1, 0.05), (2, 1, 1.0), (2, 2, 0.5)]
)
def test_who_was_spilled_is_resident_again(steps_at_once, ranks, pace, monkeypatch):
    seen, retract = Counter(), KVCache.retract

    def retracted(cache, row, tokens):
        seen[sum(row in places for places in cache.beside[0].spilled.values())] += 1
        return retract(cache, row, tokens)

    monkeypatch.setattr(KVCache, "retract", retracted)
    fleet = Fleet(plan_of(steps_at_once, ranks, pace))
    fleet.run()
    for rank in fleet.ranks:
        counters = rank.cache.tiers.pools.counters.snapshot()
        assert counters["spilled"] == 1
        assert counters["retracted"] == 1, "it stays on the host"
        assert counters["retracted_unsaved"] == 0
    assert seen == {1: ranks}

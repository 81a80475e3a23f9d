"""Plans of fleets that are about one thing. Owns what they leave out; the rest is drawn as ever."""

from dataclasses import replace
from random import Random

import numpy as np

from stratakv.core.ids import RequestId
from stratakv.engine.ranks.step_messages import Flush, Submit
from stratakv.engine.request import Prompt, SamplingParams
from stratakv.policy.prefetch_pace import PrefetchPolicy, StopPolicy, WaitComplete
from stratakv.policy.write import WriteThrough
from stratakv.spec.sharding import Sharding
from stratakv.testing.fleet.adversary import FaultRates
from stratakv.testing.fleet.runner import VOCABULARY
from stratakv.testing.fleet.scenario import (
    LANES,
    LONGEST,
    PAGE,
    OneStore,
    OperatorEvent,
    Plan,
    plain_plan,
    spec_named,
)
from stratakv.testing.fleet.variety import with_heads

PACE = dict.fromkeys(LANES, 0.9)
CALM = FaultRates(pace=PACE)


def asked(name: str, tokens: list[int], **settings) -> OperatorEvent:
    """One request for one token, once nothing runs."""
    prompt = Prompt(
        id=RequestId(name),
        tokens=np.array(tokens, np.int32),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
    )
    return OperatorEvent(after=0, command=Submit(prompt), settled=True, **settings)


def storage_plan(
    seed: int,
    name: str,
    ranks: int = 2,
    pages: tuple[int, ...] = (1, 2, 3, 5, 6, 8),
    stop: StopPolicy | None = None,
    threshold_pages: int = 0,
) -> Plan:
    """Prompts of ``pages`` pages, heads of one another, are asked for one after the other; then all
    is dropped, and the longest is asked for again: all of it that comes, comes from storage. There
    is room for everything."""
    draw = Random(seed)
    spec = spec_named(name)
    tokens = [draw.randrange(VOCABULARY) for _ in range(LONGEST)]
    first = [asked(f"r{at}", tokens[: n * PAGE + 1]) for at, n in enumerate(pages)]
    again = asked("again", tokens[: max(pages) * PAGE + 1])
    return replace(
        plain_plan(seed),
        ranks=ranks,
        spec=spec,
        device=(60,) * len(spec.groups),
        host=(60,) * len(spec.groups),
        max_running=3,
        write=WriteThrough(),
        prefetch=PrefetchPolicy(
            threshold_tokens=max(1, threshold_pages * PAGE),
            budget_tokens=10 * LONGEST,
            stop=stop or WaitComplete(),
        ),
        queue_pages=400,
        store_objects=10_000,
        fault_rates=(CALM,) * ranks,
        skew=(1.0,) * ranks,
        events=(*first, OperatorEvent(after=0, command=Flush(), settled=True), again),
    )


def over_one_store(plan: Plan, heads: int, cut: int) -> Plan:
    """The same, all ranks over one store. Groups with a row per token have so many heads, which
    ranks share; of what else there is all have the same."""
    counts = tuple(
        1 if group.stateful or not group.buffers else heads for group in plan.spec.groups
    )
    whole = with_heads(plan.spec, counts)
    sharding = Sharding(whole=whole, ranks=plan.ranks, heads=counts, split=plan.ranks > 1)
    return replace(plan, spec=whole, one_store=OneStore(sharding=sharding, cut=cut))

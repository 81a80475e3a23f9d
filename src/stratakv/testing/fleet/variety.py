"""What makes a run more than a plain one: a shared store, the loss of a rank, what comes after it,
adapters, observers, requests that run partly on the host, and caches that lack a tier.

Owns the distributions of these. They are drawn behind the plain run's, so that each changes nothing
else. Must not know how anything is run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Final

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.ranks.step_messages import Submit
from stratakv.policy.prefetch_pace import WaitComplete
from stratakv.policy.write import WriteThrough
from stratakv.spec.budget import FILLING_PAGES
from stratakv.spec.groups import ANCHOR, CacheGroup, CacheSpec, Home
from stratakv.spec.sharding import Sharding
from stratakv.testing.fleet.adversary import FaultRates
from stratakv.testing.fleet.loss import POINTS, Loss, Point
from stratakv.testing.fleet.scenario import (
    ADAPTERS,
    LONGEST,
    PAGE,
    OneStore,
    OperatorEvent,
    Plan,
    fault_rates_of,
    operator_events,
    plain_plan,
    prompt_of,
    skew_of,
)

SHARED: Final = 0.3
LOST: Final = 0.14
RESTARTED: Final = 0.12
RESTARTED_LOST: Final = 0.6
ADAPTED: Final = 0.12
OBSERVED: Final = 0.15
NO_HOST: Final = 0.03
NO_REUSE: Final = 0.02
TWO_LANES: Final = 0.3
AHEAD: Final = 0.3
SPILLED: Final = 0.2
CALM: Final = 0.6
"""How many runs have what; ``RESTARTED_LOST``: of those that a rank leaves; ``CALM``: of those that
come after another, so that much of what that one has stored is found."""
MOST_RANKS: Final = 8
COPIES_FAIL: Final = 0.1
"""At most, where rows are read on the host: a request whose copies fail for long ends for it."""


def plan_of(seed: int) -> Plan:
    plan, draw = plain_plan(seed), Random(f"{seed} and more")
    plan = _with_less(plan, draw)
    offloads = Random(f"{seed} offload")
    if offloads.random() < SPILLED and plan.stores and plan.spec.groups[ANCHOR].buffers:
        plan = spilling(plan, offloads)
    if draw.random() < SHARED and plan.stores:
        plan = shared(plan, draw)
    if draw.random() < ADAPTED:
        plan = adapted(plan, draw)
    plan = replace(
        plan,
        observed=draw.random() < OBSERVED,
        io_lanes=2 if draw.random() < TWO_LANES else 1,
        loss=loss_of(draw, plan.ranks) if draw.random() < LOST else None,
    )
    plan = ahead(plan, Random(f"{seed} ahead"))
    if plan.buffer_rows:
        plan = retracting(plan, offloads)
    chance = RESTARTED if plan.loss is None else RESTARTED_LOST
    return restarted(plan, draw) if plan.stores and draw.random() < chance else plan


def ahead(plan: Plan, draw: Random) -> Plan:
    """Perhaps on devices that run ahead, each as fast as it likes."""
    if draw.random() >= AHEAD:
        return plan
    return replace(plan, steps_at_once=2, device_pace=draw.choice((0.05, 0.5, 1.0)))


def _with_less(plan: Plan, draw: Random) -> Plan:
    """Perhaps without a host tier, or without any reuse, which both have no storage either."""
    luck = draw.random()
    if luck >= NO_HOST + NO_REUSE:
        return plan
    return replace(plan, host=(0,) * len(plan.host), reuse=luck < NO_HOST)


# -- rows on the host ----------------------------------------------------------------------------


def spilling(plan: Plan, draw: Random) -> Plan:
    """With one more group, whose home is the host, and a device for one request that is spilled, or
    a few."""
    groups = plan.spec.groups
    selected = replace(
        groups[ANCHOR],
        id=GroupId(len(groups)),
        name="selected",
        home=Home.HOST,
        buffers=(replace(groups[ANCHOR].buffers[0], layers=(LayerId(len(groups)),)),),
    )
    buffer = draw.choice((1, 2, 3))
    longest = -(-LONGEST // PAGE)
    least = buffer + -(-plan.chunk_tokens // PAGE) + FILLING_PAGES
    return replace(
        plan,
        spec=replace(plan.spec, groups=(*groups, selected)),
        device=(*plan.device, least + draw.randrange(draw.choice((1, 3, 8)))),
        host=(*plan.host, longest + draw.randrange(draw.choice((2, 12, 40)))),
        write=WriteThrough(),
        fault_rates=tuple(
            replace(of, backup_fails=min(of.backup_fails, COPIES_FAIL)) for of in plan.fault_rates
        ),
        buffer_rows=buffer * PAGE,
    )


def retracting(plan: Plan, draw: Random) -> Plan:
    """Perhaps with retractions from outside; a device that runs ahead has its own."""
    steps = draw.sample(range(4, 90), draw.choice((0, 4, 12)))
    return replace(plan, retractions=frozenset(steps if plan.steps_at_once == 1 else ()))


# -- one store -----------------------------------------------------------------------------------


def shared(plan: Plan, draw: Random) -> Plan:
    """All ranks over one store. As a rule some groups are split by heads; ``cut`` may be finer than
    the ranks need it."""
    most = plan.ranks * draw.choice((1, 2)) if plan.ranks > 2 else draw.choice((2, 4, 8))
    split = draw.random() < 0.75
    heads = tuple(_heads(group, most, draw) for group in plan.spec.groups)
    cut = draw.choice((most, plan.ranks)) if split else draw.choice((1, 2, most))
    whole = with_heads(plan.spec, heads)
    sharding = Sharding(whole=whole, ranks=plan.ranks, heads=heads, split=split)
    plan = replace(plan, spec=whole, one_store=OneStore(sharding=sharding, cut=cut))
    return replace(plan, fault_rates=_over_one(plan.fault_rates, draw))


def _heads(group: CacheGroup, most: int, draw: Random) -> int:
    """1: every rank has the same of this group, as it has of a latent or a state."""
    return 1 if group.stateful or not group.buffers or draw.random() < 0.3 else most


def with_heads(spec: CacheSpec, heads: tuple[int, ...]) -> CacheSpec:
    groups = tuple(
        group
        if count == 1
        else replace(group, buffers=(replace(group.buffers[0], row_shape=(count,)),))
        for group, count in zip(spec.groups, heads, strict=True)
    )
    return replace(spec, groups=groups)


def _over_one(fault_rates: tuple[FaultRates, ...], draw: Random) -> tuple[FaultRates, ...]:
    """A page is several objects now, each of which may be what is missing; and what one rank has
    lost, all have lost."""
    loser = draw.randrange(len(fault_rates))
    return tuple(
        replace(
            of,
            loses=of.loses / 2 if rank == loser else 0.0,
            forgets=of.forgets if rank == loser else 0.0,
            **{name: value / 3 for name, value in _chances(of).items()},
        )
        for rank, of in enumerate(fault_rates)
    )


def _chances(of: FaultRates) -> Mapping[str, float]:
    """Of what may go wrong with every single object."""
    return {
        "read_misses": of.read_misses,
        "read_fails": of.read_fails,
        "read_corrupt": of.read_corrupt,
        "write_refused": of.write_refused,
        "write_fails": of.write_fails,
    }


# -- the end of a rank, and the next beginning ---------------------------------------------------


def loss_of(draw: Random, ranks: int) -> Loss:
    rank = draw.randrange(ranks)
    others = [other for other in range(ranks) if other != rank]
    point, early, late = draw.choice(POINTS), draw.randrange(1, 12), draw.randrange(8, 30)
    return Loss(
        rank=rank,
        step=early if point is Point.WRITE else draw.choice((early, late)),
        point=point,
        objects=draw.randrange(8),
        deaf=frozenset(draw.sample(others, draw.randrange(len(others) + 1))),
    )


def restarted(plan: Plan, draw: Random) -> Plan:
    """Who comes back finds the same stores; with one for all, there may be another number of
    ranks."""
    ranks = plan.ranks
    if plan.one_store is not None and draw.random() < 0.6:
        ranks = draw.choice(_numbers(plan.one_store))
    one_store = None if plan.one_store is None else _among(plan.one_store, ranks)
    fault_rates, prefetch = tuple(fault_rates_of(draw, ranks)), plan.prefetch
    if draw.random() < CALM:
        fault_rates = tuple(FaultRates(pace=of.pace) for of in fault_rates)
        prefetch = replace(prefetch, threshold_tokens=1, stop=WaitComplete())
    then = replace(
        plan,
        seed=plan.seed + (1 << 40),
        ranks=ranks,
        one_store=one_store,
        fault_rates=fault_rates if one_store is None else _over_one(fault_rates, draw),
        prefetch=prefetch,
        skew=skew_of(draw, ranks),
        events=tuple(_once_more(draw, plan)),
        loss=None,
    )
    return replace(plan, then=then)


def _numbers(store: OneStore) -> list[int]:
    """How many ranks may share what these have written."""
    sharding = store.sharding
    most = max(sharding.heads)
    return [
        ranks
        for ranks in range(1, MOST_RANKS + 1)
        if not sharding.split or (most % ranks == 0 and store.cut % ranks == 0)
    ]


def _among(store: OneStore, ranks: int) -> OneStore:
    sharding = replace(store.sharding, ranks=ranks, split=store.sharding.split and ranks > 1)
    return replace(store, sharding=sharding)


def _once_more(draw: Random, plan: Plan) -> Iterator[OperatorEvent]:
    """Some of the prompts of before, as they were or with more behind them."""
    asked = [of.command.prompt for of in plan.events if isinstance(of.command, Submit)]
    for names in range(draw.choice((2, 3, 4))):
        old = draw.choice(asked)
        new = prompt_of(draw, f"r{names}", old.tokens.tolist(), draw.choice((1, 1, 2, 6)))
        prompt = replace(new, salt=old.salt, adapter=old.adapter)
        yield OperatorEvent(after=draw.choice((0, 0, 1, 4)), command=Submit(prompt))
        yield from operator_events(draw, names + 1)


# -- adapters ------------------------------------------------------------------------------------


def adapted(plan: Plan, draw: Random) -> Plan:
    """Prompts under adapters, and some of them under several."""
    names = ("", *ADAPTERS)
    events = [
        replace(event, command=Submit(replace(event.command.prompt, adapter=draw.choice(names))))
        if isinstance(event.command, Submit)
        else event
        for event in plan.events
    ]
    return replace(plan, events=tuple(events))

"""What one run of a pair is, an engine that computes prompts and one that decodes: drawn from its
seed, completely, before anything runs.

Owns the distributions of what is between the two: who receives a request and when, links that
break, deadlines, the network's pace. Of each side alone it is ``scenario``'s. Must not know how it
is run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from stratakv.core.ids import RequestId
from stratakv.disagg.deadlines import HandOffLimits
from stratakv.disagg.session import SessionLimits
from stratakv.engine.ranks.step_messages import AbortRequest, Command, Flush, Submit
from stratakv.engine.request import Prompt, TransferSession
from stratakv.spec.groups import ANCHOR, CacheSpec, Home
from stratakv.testing.fleet.network import NetworkPace
from stratakv.testing.fleet.scenario import (
    ADAPTERS,
    PAGE,
    OperatorEvent,
    Plan,
    drawn_spec,
    operator_calls,
    plan_over,
    prompt_of,
    tokens_of,
)
from stratakv.testing.fleet.variety import ahead, spilling
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.transport_faults import TransportFaults

PREFILL, DECODE = HandOffSide.PREFILL, HandOffSide.DECODE
ADDRESS: Final = "prefill"
"""Where requests say that their prompt is computed."""
RANKED: Final = 0.1
RETRACTED: Final = 0.5
HASTY: Final = 0.12
BROKEN: Final = 0.25
UNTIDY: Final = 0.25
ONE_STORE: Final = 0.4
ABORTED: Final = 0.2
LONELY: Final = 0.04
LOCAL: Final = 0.08
AGAIN: Final = 0.12
NO_HOST: Final = 0.1
NO_REUSE: Final = 0.2
ADAPTED: Final = 0.3
SPILLED: Final = 0.25
"""How many runs have several ranks a side, retractions from outside, deadlines that pass, links
that break, faults of a transport, and one store for both sides; how many requests are aborted,
known to one side alone, computed where they decode, and asked for once more under the name of their
session; how many sides have no host tier, and no reuse either;
how many runs have requests under adapters, and a group whose home, where requests decode, is the
host."""
PATIENT: Final = HandOffLimits(sessions=SessionLimits(1e6, 1e6, 1e6), answer_s=1e6, claim_s=1e6)


@dataclass(frozen=True, slots=True)
class BreakLink:
    """Of one rank of both sides. They may join again ``joins_in`` turns later."""

    rank: int
    joins_in: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEvent:
    """``at``: the turn of its round, a step of either side. ``side``: whose ``command`` it is; a
    link is both's."""

    at: int
    side: HandOffSide
    command: Command | BreakLink


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """``sides``: what each engine is. ``rounds``: of events; one begins when every request of the
    one before has ended. ``share``: how many of the turns are prefill's. ``untidy``: faults over
    the network, None: none. ``one_store``: whether what one side stores the other one may fetch.
    ``meets_at``: the turn from which the two may know each other."""

    seed: int
    sides: Mapping[HandOffSide, Plan]
    rounds: tuple[tuple[PairEvent, ...], ...]
    limits: HandOffLimits
    network: NetworkPace
    untidy: TransportFaults | None
    share: float
    one_store: bool
    meets_at: int

    @property
    def patient(self) -> bool:
        """Whether no deadline passes but where a session has been failed on purpose."""
        return self.limits is PATIENT


def pair_plan_of(seed: int) -> PairPlan:
    draw = Random(f"{seed} pair")
    spec, ranks = drawn_spec(draw), draw.choice((2, 2, 3)) if draw.random() < RANKED else 1
    rounds = tuple(_rounds(draw, ranks))
    under = Random(f"{seed} adapters")  # of its own: what else a seed draws stays as it was
    if under.random() < ADAPTED:
        rounds = _adapted(under, rounds)
    sides = {side: _side(draw, seed, ranks, spec, rounds, side) for side in HandOffSide}
    offloads = Random(f"{seed} offload")
    if offloads.random() < SPILLED and sides[DECODE].stores and spec.groups[ANCHOR].buffers:
        sides = _spilled(offloads, sides)
    hasty = draw.random() < HASTY
    lost = draw.choice((0.0, 0.1)) if hasty else 0.0
    untidy = TransportFaults(late=draw.randrange(4), delay=2, parts=3, lost=lost)
    return PairPlan(
        seed=seed,
        sides=sides,
        rounds=rounds,
        limits=_hasty(draw, seed) if hasty else PATIENT,
        network=NetworkPace(
            moves=draw.choice((0.1, 0.3, 0.7, 1.0)),
            ranges=draw.choice((1, 4, 64)),
            delivers=draw.choice((0.4, 0.8, 0.95)),
            fence_looks=draw.choice((0, 5, 20)),
        ),
        untidy=untidy if lost or draw.random() < UNTIDY else None,
        share=draw.choice((0.3, 0.5, 0.7)),
        one_store=draw.random() < ONE_STORE,
        meets_at=draw.choice((0, 0, 0, 0, 20)),
    )


def _hasty(draw: Random, seed: int) -> HandOffLimits:
    seconds = [draw.uniform(1.0, 12.0) for _ in range(3)]
    return HandOffLimits(
        sessions=SessionLimits(*seconds),
        answer_s=draw.uniform(0.5, 4.0),
        claim_s=Random(f"{seed} claim").uniform(0.5, 8.0),
    )


def _side(
    draw: Random,
    seed: int,
    ranks: int,
    spec: CacheSpec,
    rounds: tuple[tuple[PairEvent, ...], ...],
    side: HandOffSide,
) -> Plan:
    """What its engine is, and all that it is asked for."""
    plan = plan_over(draw, 2 * seed + (side is DECODE), ranks, spec)
    plan = replace(plan, step_s=0.3, skew=(1.0,) * ranks, check_steps=1)
    luck = draw.random()
    if luck < NO_HOST + NO_REUSE:  # what nobody else may use is free as soon as it is given back
        plan = replace(plan, host=(0,) * len(plan.host), reuse=luck < NO_HOST)
    plan = ahead(plan, draw)
    if plan.steps_at_once == 1 and draw.random() < RETRACTED:
        steps = draw.sample(range(4, 90), draw.choice((4, 12, 30)))
        plan = replace(plan, retractions=frozenset(steps))
    own = [event for some in rounds for event in some if event.side is side]
    events = [
        OperatorEvent(after=0, command=event.command)
        for event in own
        if not isinstance(event.command, BreakLink)
    ]
    return replace(plan, events=tuple(events))


def _spilled(draw: Random, sides: Mapping[HandOffSide, Plan]) -> dict[HandOffSide, Plan]:
    """With one more group on both sides, which prefill has on its device and decode at home on its
    host."""
    decode, prefill = spilling(sides[DECODE], draw), sides[PREFILL]
    selected = replace(decode.spec.groups[-1], home=Home.DEVICE)
    return {
        PREFILL: replace(
            prefill,
            spec=replace(prefill.spec, groups=(*prefill.spec.groups, selected)),
            device=(*prefill.device, prefill.device[ANCHOR]),
            host=(*prefill.host, prefill.host[ANCHOR]),
        ),
        DECODE: decode,
    }


def _rounds(draw: Random, ranks: int) -> Iterator[tuple[PairEvent, ...]]:
    """Rounds of requests over a few prompts that share heads. Between two of them a side may drop
    all it has, so that storage alone has it, or nobody."""
    heads = [tokens_of(draw, draw.randrange(3 * PAGE, 9 * PAGE)) for _ in range(2)]
    broken, names = draw.random() < BROKEN, 0
    for turn in range(draw.choice((1, 1, 2))):
        events: list[PairEvent] = []
        if turn:
            empty = draw.choice(([PREFILL], [DECODE], [PREFILL, DECODE]))
            events += [PairEvent(at=0, side=side, command=Flush()) for side in empty]
        for _ in range(draw.choice((2, 3, 4))):
            head = draw.choice(heads)
            head = head if draw.random() < 0.6 else head[: draw.randrange(1, len(head) + 1)]
            length = draw.choice((1, 2, 3, 8, 16))
            prompt = prompt_of(draw, f"r{names}", head, length)
            if len(prompt.tokens) > 2 * PAGE:
                heads.append(prompt.tokens.tolist())
            events += _one_request(draw, prompt, draw.randrange(24))
            events += _operator_events(draw)
            names += 1
        if broken:
            for _ in range(draw.choice((1, 1, 2))):
                cut = BreakLink(draw.randrange(ranks), draw.choice((0, 4, 30)))
                events.append(PairEvent(at=draw.randrange(2, 50), side=DECODE, command=cut))
        yield tuple(sorted(events, key=lambda event: event.at))


def _adapted(
    draw: Random, rounds: tuple[tuple[PairEvent, ...], ...]
) -> tuple[tuple[PairEvent, ...], ...]:
    """Requests under adapters or the model alone, each the same on both sides."""
    chosen: dict[str, str] = {}

    def under(event: PairEvent) -> PairEvent:
        match event.command:
            case Submit(prompt):
                name = prompt.id if prompt.session is None else prompt.session.name
                adapter = chosen.setdefault(name, draw.choice(("", *ADAPTERS)))
                return replace(event, command=Submit(replace(prompt, adapter=adapter)))
            case _:
                return event

    return tuple(tuple(map(under, some)) for some in rounds)


def _one_request(draw: Random, prompt: Prompt, at: int) -> Iterator[PairEvent]:
    """What clients do with it, on both sides."""
    if draw.random() < LOCAL:
        yield PairEvent(at=at, side=DECODE, command=Submit(prompt))
        return
    prompt = replace(prompt, session=TransferSession(prompt.id, ADDRESS))
    sides = [draw.choice((PREFILL, DECODE))] if draw.random() < LONELY else list(HandOffSide)
    for side in sides:
        later = at + draw.choice((0, 0, 1, 10))
        yield PairEvent(at=later, side=side, command=Submit(prompt))
        if draw.random() < ABORTED / 2 or len(sides) < 2:
            stops = later + draw.choice((1, 4, 8, 12, 16, 24))
            yield PairEvent(at=stops, side=side, command=AbortRequest(prompt.id))
            if draw.random() < 0.5:
                other = DECODE if side is PREFILL else PREFILL
                late = stops + draw.choice((0, 1, 5))
                yield PairEvent(at=late, side=other, command=AbortRequest(prompt.id))
    if draw.random() < AGAIN:
        again = replace(prompt, id=RequestId(f"{prompt.id} again"))
        at += draw.choice((2, 12, 24))
        for side in HandOffSide:
            once_more = PairEvent(at=at + draw.randrange(3), side=side, command=Submit(again))
            yield once_more


def _operator_events(draw: Random) -> Iterator[PairEvent]:
    if draw.random() < 0.06:
        at, side = draw.randrange(30), draw.choice((PREFILL, DECODE))
        for event in operator_calls(draw):
            at += event.after
            yield PairEvent(at=at, side=side, command=event.command)

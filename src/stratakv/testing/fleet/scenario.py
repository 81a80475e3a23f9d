"""What one simulated run is: drawn from its seed, completely, before anything runs.

Owns the distributions of a plain one: sizes, policies, fault_rates of each rank, and what clients
and operators do; ``variety`` makes it something else. Every rank has the same sizes, as in
production, where ranks take the smallest of each (``RankContext.all_reduce_min``) before there is a
cache. Must not know how it is run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

import numpy as np

from stratakv.cache.records import CacheUse
from stratakv.core.ids import GroupId, LayerId, RequestId
from stratakv.engine.attachment import StorageCall, Verb
from stratakv.engine.ranks.step_messages import AbortRequest, Command, Flush, Submit
from stratakv.engine.request import Prompt, SamplingParams
from stratakv.policy.prefetch_pace import (
    BestEffort,
    PrefetchPolicy,
    StopPolicy,
    Timeout,
    WaitComplete,
)
from stratakv.policy.write import WriteBack, WritePolicy, WriteThrough, WriteThroughSelective
from stratakv.spec.groups import ANCHOR, BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    Retention,
    peak_pages,
)
from stratakv.spec.sharding import Sharding
from stratakv.testing.fleet.adversary import FaultRates
from stratakv.testing.fleet.loss import Loss
from stratakv.testing.fleet.runner import VOCABULARY

PAGE: Final = 4
LONGEST: Final = 44
RULES: Final[Mapping[str, tuple[Retention, ...]]] = {
    "anchor": (),
    "window": (KeepWindow(7),),
    "chunk": (KeepChunk(10),),
    "state": (KeepBoundary(),),
    "three": (KeepWindow(6), KeepChunk(12), KeepBoundary()),
    "live": (KeepAll(), KeepWindow(8), KeepLive()),
    "states-only": (KeepBoundary(),),
}
"""By name: what is kept beside the anchor, which keeps all; the last one's has no bytes."""
ADAPTERS: Final[Mapping[str, bytes]] = {"a": b"A" * 32, "b": b"B" * 32}
"""Digests by name, of adapters that every rank has."""
LANES: Final = ("backup", "load", "storage")
WORST: Final[Mapping[str, float]] = {
    "backup_fails": 0.5,
    "call_fails": 0.1,
    "read_misses": 0.3,
    "read_fails": 0.3,
    "read_corrupt": 0.3,
    "contains_lies": 0.3,
    "write_refused": 0.5,
    "write_fails": 0.3,
    "forgets": 0.1,
}
"""Highest chances of what may go wrong."""


def spec_named(name: str) -> CacheSpec:
    groups = [_group(at, rule) for at, rule in enumerate((KeepAll(), *RULES[name]))]
    if name == "states-only":
        groups[0] = replace(groups[0], buffers=())
    return CacheSpec(page_tokens=PAGE, groups=tuple(groups))


def _group(at: int, rule: Retention) -> CacheGroup:
    bare = CacheGroup(id=GroupId(at), name=f"g{at}", retention=rule, buffers=())
    buffer = BufferSpec(
        name="tokens",
        layers=(LayerId(at),),
        rows_per_page=1 if bare.stateful else PAGE,
        row_shape=(2,) if bare.stateful else (1,),
        dtype="float32",
    )
    return replace(bare, buffers=(buffer,))


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorEvent:
    """``after``: steps since the one before; ``settled``: once every request has its answer,
    while what it has left behind may still be copied and stored."""

    after: int
    command: Command
    settled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStore:
    """What all ranks have together. ``cut``: slices of each group's heads, as
    ``--storage-shards``."""

    sharding: Sharding
    cut: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``spec``: the cache of all ranks together, each has ``rank_spec``. ``device``, ``host``:
    pages by group; no host page, no storage. ``step_s``: how much the time goes on at a step, by
    rank's own clock times its ``skew``. ``one_store``: None: each rank has one of its own, with
    whole pages. ``io_lanes``: 2: reads do not wait for writes. ``observed``: whether there are
    events of the cache. ``steps_at_once``: more than one on a device that runs ahead, and
    ``device_pace`` is how likely it is done with its oldest work at a look. ``then``: what comes
    after it on the same stores. ``check_steps``: how often each rank is checked from scratch.
    ``retractions``: before which steps the youngest request that computes is retracted.
    ``buffer_rows``: of a request that is spilled, where a group has its home on the host."""

    seed: int
    ranks: int
    spec: CacheSpec
    device: tuple[int, ...]
    host: tuple[int, ...]
    max_running: int
    chunk_tokens: int
    step_tokens: int
    reserve_tokens: int
    snapshot_pages: int
    load_back_threshold: int
    eviction: str
    write: WritePolicy
    prefetch: PrefetchPolicy
    queue_pages: int
    batch_pages: int
    store_objects: int
    fault_rates: tuple[FaultRates, ...]
    step_s: float
    skew: tuple[float, ...]
    events: tuple[OperatorEvent, ...]
    reuse: bool = True
    one_store: OneStore | None = None
    io_lanes: int = 1
    observed: bool = False
    steps_at_once: int = 1
    device_pace: float = 0.5
    loss: Loss | None = None
    then: "Plan | None" = None
    check_steps: int = 16
    retractions: frozenset[int] = frozenset()
    buffer_rows: int = 0

    @property
    def rank_spec(self) -> CacheSpec:
        return self.spec if self.one_store is None else self.one_store.sharding.spec

    @property
    def stores(self) -> bool:
        """Whether there is storage."""
        return self.reuse and self.host[ANCHOR] > 0


def plain_plan(seed: int) -> Plan:
    """Ranks with stores of their own, which all live to the end."""
    draw = Random(seed)
    ranks = draw.choice((2,) * 10 + (3,) * 5 + (4, 4, 5, 6, 7, 8))
    return plan_over(draw, seed, ranks, drawn_spec(draw))


def drawn_spec(draw: Random) -> CacheSpec:
    return spec_named(draw.choice((*RULES, "three", "live")))


def plan_over(draw: Random, seed: int, ranks: int, spec: CacheSpec) -> Plan:
    """All else of such a plan."""
    chunk = draw.choice((5, 8, 16))
    tight = draw.random() < 0.25  # then requests push each other out, and say more
    spare, spare_host = (2, 8) if tight else (draw.choice((8, 24)), 40)
    least = [peak_pages(group.retention, LONGEST, chunk, PAGE) for group in spec.groups]
    running = draw.choice((2, 3, 4, 4))
    together = [1 if group.keeps_all else running for group in spec.groups]  # peaks are booked
    device = tuple(
        pages * times + draw.randrange(spare) for pages, times in zip(least, together, strict=True)
    )
    host = tuple(pages + draw.randrange(spare_host) for pages in least)
    return Plan(
        seed=seed,
        ranks=ranks,
        spec=spec,
        device=device,
        host=host,
        max_running=running,
        chunk_tokens=chunk,
        step_tokens=draw.choice((12, 24)),
        reserve_tokens=draw.choice((0, 0, 0) if tight else (0, 4, 16)),
        snapshot_pages=draw.choice((1, 2, 4)),
        load_back_threshold=draw.choice((0, PAGE, 2 * PAGE)),
        eviction=draw.choice(("lru", "lru", "lfu", "slru", "s3-fifo", "priority")),
        write=draw.choice((WriteThrough(),) * 6 + (WriteThroughSelective(2), WriteBack(0.3))),
        prefetch=_prefetch(draw),
        queue_pages=draw.choice((12, 40, *(400,) * 6)),
        batch_pages=draw.choice((2, 4, 64)),
        store_objects=draw.choice((40, *(10_000,) * 5)),
        fault_rates=tuple(fault_rates_of(draw, ranks)),
        step_s=draw.choice((0.01, 0.05, 0.3, 0.3, 2.0)),
        skew=skew_of(draw, ranks),
        events=tuple(_crowd(draw) if tight else _rounds(draw)),
    )


def _prefetch(draw: Random) -> PrefetchPolicy:
    stop: StopPolicy = draw.choice(
        (BestEffort(), *(WaitComplete(),) * 5, Timeout(base_s=0.5), Timeout(base_s=5.0))
    )
    return PrefetchPolicy(
        threshold_tokens=draw.choice((1, PAGE, PAGE, 3 * PAGE)),
        budget_tokens=draw.choice((LONGEST, 4 * LONGEST)),
        stop=stop,
        retry_steps=draw.choice((1, 4)),
        retry_attempts=draw.choice((1, 4)),
    )


def skew_of(draw: Random, ranks: int) -> tuple[float, ...]:
    return tuple(draw.uniform(0.2, 3.0) for _ in range(ranks))


def fault_rates_of(draw: Random, ranks: int) -> Iterator[FaultRates]:
    """One or two things go wrong in a run, and on some ranks only, so that most of it goes on."""
    wrong = draw.sample(sorted(WORST), draw.choice((0, 0, 1, 1, 2)))
    loses = draw.choice((0.0, 0.0, 0.0, 0.1, 0.3))
    for _ in range(ranks):
        most = {name: WORST[name] for name in wrong if draw.random() < 0.6}
        yield FaultRates(
            pace={lane: draw.choice((0.3, 0.6, 0.95)) for lane in LANES},
            stalls=draw.choice((0, 0, 0, 20, 80)),
            loses=draw.choice((0.0, loses, loses)),
            **{name: draw.random() * chance for name, chance in most.items()},
        )


def _rounds(draw: Random) -> Iterator[OperatorEvent]:
    """Rounds of short requests over a few prompts that share heads; between two of them all is
    dropped, so that storage alone has it."""
    heads = [
        tokens_of(draw, draw.randrange(5 * PAGE, 9 * PAGE)) for _ in range(draw.choice((1, 2)))
    ]
    names = 0
    for turn in range(draw.choice((2, 2, 2, 2, 3))):
        for _ in range(draw.choice((2, 3) if turn else (2, 2, 3, 4))):
            head = draw.choice(heads[-4:] if turn else heads)  # what was asked before, later on
            if draw.random() < (0.1 if turn else 0.4):
                head = head[: draw.randrange(1, len(head) + 1)]
            prompt = prompt_of(draw, f"r{names}", head, draw.choice((1, 1, 2, 3)))
            if len(prompt.tokens) > 4 * PAGE:
                heads.append(prompt.tokens.tolist())
            names += 1
            yield OperatorEvent(after=draw.choice((0, 0, 1, 2)), command=Submit(prompt))
            yield from operator_events(draw, names)
        if turn == 0 or draw.random() < 0.5:
            yield OperatorEvent(after=draw.randrange(3), command=Flush(), settled=True)


def _crowd(draw: Random) -> Iterator[OperatorEvent]:
    """More requests at once than there is room for, each with a prompt of its own and much to
    say."""
    heads: list[list[int]] = []
    for names in range(draw.randrange(4, 7)):
        fresh = not heads or draw.random() < 0.6
        head = tokens_of(draw, draw.randrange(1, 4 * PAGE)) if fresh else draw.choice(heads)
        heads.append(head)
        prompt = prompt_of(draw, f"r{names}", head, draw.choice((4, 12, 20)))
        yield OperatorEvent(after=draw.choice((0, 0, 0, 2)), command=Submit(prompt))
        yield from operator_events(draw, names + 1)


def operator_events(draw: Random, names: int) -> Iterator[OperatorEvent]:
    """``names``: of requests so far."""
    if draw.random() < 0.12:
        victim = RequestId(f"r{draw.randrange(names)}")
        yield OperatorEvent(after=draw.choice((0, 1, 2, 6)), command=AbortRequest(victim))
    if draw.random() < 0.06:
        yield from operator_calls(draw)


def operator_calls(draw: Random) -> list[OperatorEvent]:
    match draw.randrange(4):
        case 0:
            return [OperatorEvent(after=0, command=Flush())]
        case 1:
            return [OperatorEvent(after=1, command=StorageCall(Verb.CLEAR))]
        case 2:
            return [OperatorEvent(after=1, command=_detach(draw.random() < 0.5))]
        case _:
            return [
                OperatorEvent(after=1, command=_detach(draw.random() < 0.3)),
                OperatorEvent(after=draw.randrange(4), command=StorageCall(Verb.RESUME)),
            ]


def _detach(force: bool) -> StorageCall:  # noqa: FBT001 - a lot
    return StorageCall(Verb.DETACH, force=force)


def prompt_of(draw: Random, name: str, head: list[int], length: int) -> Prompt:
    """``head``, and some tokens of its own; at times none."""
    own = draw.choice((0, 0, 1, draw.randrange(12)))
    tokens = (head + tokens_of(draw, own))[: LONGEST - 2]
    return Prompt(
        id=RequestId(name),
        tokens=np.array(tokens, np.int32),
        sampling=SamplingParams(max_tokens=min(length, LONGEST - len(tokens)), temperature=0.0),
        salt=draw.choice(("",) * 19 + ("b",)),
        priority=draw.choice((0, 0, 1, 5)),
        use=draw.choice((CacheUse.ALL,) * 17 + (CacheUse.READ, CacheUse.STORE, CacheUse.NOTHING)),
    )


def tokens_of(draw: Random, count: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(count)]

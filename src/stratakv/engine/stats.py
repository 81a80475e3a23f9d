"""What an engine reports to whoever watches it: its counts, and the state of each request.

Owns the records; must not count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from stratakv.cache.kv_cache import KVCache
from stratakv.cache.retraction import RetractedState
from stratakv.core.counts import Counts
from stratakv.core.ids import RequestId, TokenIds
from stratakv.engine.backlog import Backlog
from stratakv.engine.request import Failure, Phase, Prompt, Request
from stratakv.engine.rows import Rows
from stratakv.engine.running import Running
from stratakv.engine.step_times import StepTimes
from stratakv.tiers.statistics import PageAgeStats, PoolStats, StorageStats
from stratakv.transfer.copy_plan import Direction

LIVE: Final = tuple(phase for phase in Phase if phase not in {Phase.FINISHED, Phase.ABORTED})
"""Phases of a request that has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """``waiting`` counts the ``retracted`` requests too. ``cached_*_tokens`` count what admitted
    prompts did not have to compute; ``known_tokens`` what the cache knew of them, on any tier, and
    ``lost_tokens`` what of that they had to compute all the same, by tier and reason. A request
    counts among these when what storage does for it has ended. ``failures``: requests that ended
    with an error of their own, by cause. ``phases``: requests that have not ended, by phase.
    ``step_s``: seconds of steps, by part. ``copies``: plans between device and host that have not
    ended, by direction. ``ages``: None where they are not measured."""

    waiting: int
    retracted: int
    running: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    cached_device_tokens: int
    cached_host_tokens: int
    cached_storage_tokens: int
    known_tokens: int
    lost_tokens: Mapping[tuple[str, str], int]
    pages: tuple[PoolStats, ...]
    counters: Mapping[str, int]
    failures: Mapping[str, int]
    phases: Mapping[str, int]
    step_s: Mapping[str, float]
    copies: Mapping[Direction, int]
    ages: PageAgeStats | None
    storage: StorageStats | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestStatus:
    """Where one request is that has not ended. ``row``: its place in the block table, NONE of one
    that does not run; ``serial`` counts submissions. ``known``: prompt and output so far, of which
    ``computed`` have their KV; ``in_flight``: launched steps that compute more. ``retracted``: what
    the cache keeps for it while it is retracted."""

    prompt: Prompt
    phase: Phase
    row: int
    serial: int
    known: TokenIds
    computed: int
    in_flight: int
    retracted: RetractedState | None

    @property
    def id(self) -> RequestId:
        return self.prompt.id

    def __str__(self) -> str:
        at = f"row {self.row}, {self.computed} of {len(self.known)} tokens computed"
        return f"request {self.id}: {self.phase.name}, {at}"


@dataclass(slots=True)
class Totals(Counts):
    """``times``: of what is counted, where steps spend theirs."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0
    cached_storage_tokens: int = 0
    failures: dict[Failure, int] = field(default_factory=lambda: dict.fromkeys(Failure, 0))
    times: StepTimes = field(default_factory=StepTimes)


def stats_of(
    totals: Totals,
    backlog: Backlog,
    running: Running,
    cache: KVCache,
    storage: StorageStats | None,
) -> EngineStats:
    losses = cache.admission.losses
    return EngineStats(
        waiting=len(backlog),
        retracted=backlog.retracted,
        running=len(running),
        steps=totals.steps,
        prompt_tokens=totals.prompt_tokens,
        output_tokens=totals.output_tokens,
        cached_device_tokens=totals.cached_device_tokens,
        cached_host_tokens=totals.cached_host_tokens,
        cached_storage_tokens=totals.cached_storage_tokens,
        known_tokens=losses.known,
        lost_tokens=losses.by_tier(),
        pages=cache.tiers.pools.stats(),
        counters=cache.tiers.pools.counters.snapshot(),
        failures={failure.value: count for failure, count in totals.failures.items()},
        phases=_phases(backlog, running),
        step_s=totals.times.sums_s(),
        copies=cache.tiers.copies.flights.under_way_by_direction(),
        ages=cache.tiers.ages(),
        storage=storage,
    )


def _phases(backlog: Backlog, running: Running) -> dict[str, int]:
    found = dict.fromkeys((phase.name.lower() for phase in LIVE), 0)
    found["waiting"] = len(backlog) - backlog.retracted
    found["retracted"] = backlog.retracted
    for request in running.by_row.values():
        found[request.phase.name.lower()] += 1
    return found


def status_of(request: Request, rows: Rows) -> RequestStatus:
    row = request.row
    runs = row >= 0
    return RequestStatus(
        prompt=request.prompt,
        phase=request.phase,
        row=row,
        serial=request.serial,
        known=(rows.known_tokens(row) if runs else request.known).copy(),
        computed=rows.computed.item(row) if runs else 0,
        in_flight=rows.in_flight.item(row) if runs else 0,
        retracted=request.retracted,
    )

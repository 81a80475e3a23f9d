"""The engine's own figures, as Prometheus' families, at scrape time.

Owns which figure is which metric: they count up in the engine, nothing is counted here.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final, TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stratakv.disagg.statistics import SessionStats
from stratakv.engine.huggingface.page_selection import Recall
from stratakv.engine.stats import EngineStats
from stratakv.serve.metric_families import BY_NAME, PREFIX
from stratakv.tiers.statistics import AGE_BOUNDS_S, AgeCounts, PageAgeStats, PoolStats, StorageStats

Labelled: TypeAlias = Mapping[tuple[str, ...], float]
Plain: TypeAlias = Mapping[str, float]
CACHE_COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "backup_pages": ("copied_pages", ("backup",)),
    "load_pages": ("copied_pages", ("load",)),
    "backup_bytes": ("copied_bytes", ("backup",)),
    "load_bytes": ("copied_bytes", ("load",)),
    "backup_failed_pages": ("unsaved_pages", ("failed",)),
    "dropped_backup_pages": ("unsaved_pages", ("no_room",)),
    "evicted_device_pages": ("evicted_pages", ("device",)),
    "evicted_host_pages": ("evicted_pages", ("host",)),
    "dropped_dirty_pages": ("dropped_pages", ("dirty",)),
    "dropped_cold_pages": ("dropped_pages", ("cold",)),
}
"""Counters of the tiers that are one metric with others: its name and label."""


class EngineCollector(Collector):
    """Shows what it was given last."""

    def __init__(self) -> None:
        self._stats: EngineStats | None = None
        self._sessions: SessionStats | None = None
        self._recall: Recall | None = None

    def watch(self, recall: Recall) -> None:
        """Show it too."""
        self._recall = recall

    def show(self, stats: EngineStats | None, sessions: SessionStats | None) -> None:
        self._stats, self._sessions = stats, sessions

    def collect(self) -> Iterator[Metric]:
        if self._stats is not None:
            yield from _of_engine(self._stats)
            yield from _of_pages(self._stats.pages)
            if self._stats.ages is not None:
                yield from _of_ages(self._stats.ages)
            yield from _of_cache(self._stats.counters)
            if self._stats.storage is not None:
                yield from _of_storage(self._stats.storage)
        if self._sessions is not None:
            yield from _of_sessions(self._sessions)
        if self._recall is not None:
            yield _family("page_selection_queries", {(): self._recall.queries})
            yield _family("page_selection_recall", {(): self._recall.weight})


def _family(name: str, values: Labelled) -> Metric:
    """The metric ``name`` with a value for each of its labels' values."""
    about = BY_NAME[name]
    made = CounterMetricFamily if about.kind == "counter" else GaugeMetricFamily
    family = made(f"{PREFIX}{name}", about.help, labels=about.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _by(values: Plain) -> Labelled:
    return {(name,): value for name, value in values.items()}


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    for name, value in (
        ("requests_waiting", stats.waiting),
        ("requests_retracted", stats.retracted),
        ("requests_running", stats.running),
        ("engine_steps", stats.steps),
        ("known_tokens", stats.known_tokens),
    ):
        yield _family(name, {(): value})
    copies = {direction.value: count for direction, count in stats.copies.items()}
    for name, values in (
        ("requests_by_phase", stats.phases),
        ("step_seconds", stats.step_s),
        ("requests_failed", stats.failures),
        ("cache_copies_in_flight", copies),
    ):
        yield _family(name, _by(values))
    yield _family("lost_tokens", dict(stats.lost_tokens))


def _of_pages(pools: Iterable[PoolStats]) -> Iterator[Metric]:
    values: dict[tuple[str, ...], float] = {}
    for pool in pools:
        at = pool.group, pool.tier
        values[*at, "free"], values[*at, "evictable"] = pool.free, pool.evictable
        values[*at, "in_use"] = pool.total - pool.free - pool.evictable
    yield _family("pool_pages", values)


def _of_ages(ages: PageAgeStats) -> Iterator[Metric]:
    for name, found in (
        ("page_lifetime_seconds", ages.lifetime),
        ("page_idle_before_evict_seconds", ages.idle_before_evict),
        ("page_reuse_gap_seconds", ages.reuse_gap),
    ):
        about = BY_NAME[name]
        family = HistogramMetricFamily(f"{PREFIX}{name}", about.help, labels=about.labels)
        for one in found:
            labels = (one.group, one.tier) if one.tier else (one.group,)
            family.add_metric(labels, _buckets(one), one.sum_s)
        yield family


def _buckets(ages: AgeCounts) -> list[tuple[str, float]]:
    bounds = [*map(str, AGE_BOUNDS_S), "+Inf"]
    return list(zip(bounds, accumulate(ages.counts), strict=True))


def _of_cache(counters: Mapping[str, int]) -> Iterator[Metric]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for name, value in counters.items():
        metric, labels = CACHE_COUNTERS.get(name, (name, ()))
        found.setdefault(metric, {})[labels] = value
    for metric, values in found.items():
        yield _family(f"cache_{metric}", values)


def _of_storage(stats: StorageStats) -> Iterator[Metric]:
    off = {"reading": float(stats.reading_off), "writing": float(stats.writing_off)}
    for name, values in (
        ("storage_pages", stats.pages),
        ("storage_tokens", stats.tokens),
        ("storage_lost_tokens", stats.lost_tokens),
        ("storage_abandoned_prefetches", stats.abandoned),
        ("storage_off", off),
    ):
        yield _family(name, _by(values))


def _of_sessions(stats: SessionStats) -> Iterator[Metric]:
    states = {state.name.lower(): count for state, count in stats.states.items()}
    yield _family("transfer_sessions", _by(states))
    yield _family("transfer_sessions_succeeded", {(): stats.succeeded})
    causes = {cause.value: count for cause, count in stats.failed.items()}
    yield _family("transfer_sessions_failed", _by(causes))
    links = {state.value: count for state, count in stats.links.items()}
    yield _family("transfer_peers", _by(links))
    if stats.leases is not None:
        leased, quarantined = stats.leases.leased, stats.leases.quarantined
        pages = {"leased": sum(leased.values()), "quarantined": sum(quarantined.values())}
        yield _family("transfer_pages", _by(pages))

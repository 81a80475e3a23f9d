"""Prometheus metrics: what the server saw, and the engine's own figures at scrape time.

Owns names and labels. Names carry units, counters end in ``_total``; no label ever holds anything
a client chose (request ids, salts, unknown paths).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stratakv.core.ids import GroupId
from stratakv.disagg.statistics import SessionStats
from stratakv.engine.request import CachedTokens
from stratakv.engine.stats import EngineStats
from stratakv.tiers.statistics import StorageStats

FIRST_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WHOLE_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


TIERS: Final = ("device", "host", "storage")


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """``prompt``: of requests whose answers have begun; ``by_tier``: those of them that were not
    computed; ``generated``: of answers, so far."""

    prompt: int = 0
    generated: int = 0
    by_tier: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))

    def __sub__(self, earlier: "TokenCounts") -> "TokenCounts":
        return TokenCounts(
            self.prompt - earlier.prompt,
            self.generated - earlier.generated,
            {tier: count - earlier.by_tier[tier] for tier, count in self.by_tier.items()},
        )


class ServerMetrics:
    """One server's registry. ``groups``: names of the cache groups that a prompt can hit."""

    def __init__(self, groups: Mapping[GroupId, str]) -> None:
        self.registry: Final = CollectorRegistry()
        self._groups = dict(groups)
        self._engine = _EngineCollector()
        self.registry.register(self._engine)
        self._responses = self._counter("http_responses", "HTTP responses", "path", "status")
        self._finished = self._counter("requests", "Answered requests", "finish_reason")
        self._aborted = self._counter("requests_aborted", "Requests whose client or server left")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._generated = self._counter("generated_tokens", "Tokens made by the engine")
        self._cached = self._counter("cached_prompt_tokens", "Prompt tokens not computed", "tier")
        self._by_group = self._counter(
            "cached_group_tokens", "Prompt tokens whose pages a group had", "group", "tier"
        )
        self._lost_events = self._counter(
            "kv_event_batches_lost", "Batches of KV events that no subscriber can get"
        )
        self.first_token_s: Final = self._histogram(
            "time_to_first_token_seconds", "From request to first token", FIRST_S
        )
        self.between_tokens_s: Final = self._histogram(
            "inter_token_latency_seconds", "Between tokens of a request", BETWEEN_S
        )
        self.whole_s: Final = self._histogram(
            "e2e_request_latency_seconds", "From request to the end of its answer", WHOLE_S
        )

    def responded(self, path: str, status: int) -> None:
        """``path`` is a route, never what a client sent."""
        self._responses.labels(path, str(status)).inc()

    def prompted(self, tokens: int, cached: CachedTokens | None) -> None:
        """The first token of an answer to a prompt of ``tokens`` tokens came."""
        self._prompt.inc(tokens)
        if cached is None:
            return
        self._cached.labels("device").inc(cached.device)
        self._cached.labels("host").inc(cached.host)
        self._cached.labels("storage").inc(cached.storage)
        for i, group in self._groups.items():
            self._by_group.labels(group, "device").inc(cached.groups_device[i])
            self._by_group.labels(group, "host").inc(cached.groups_host[i])
            self._by_group.labels(group, "storage").inc(cached.groups_storage[i])

    def finished(self, reason: str, generated: int) -> None:
        self._finished.labels(reason).inc()
        self._generated.inc(generated)

    def aborted(self, generated: int) -> None:
        self._aborted.inc()
        self._generated.inc(generated)

    def tokens(self) -> TokenCounts:
        """So far, those of answers that still go on too."""
        first, between = (
            self._sample(f"{name}_seconds_count")
            for name in ("time_to_first_token", "inter_token_latency")
        )
        tiers = {tier: self._sample("cached_prompt_tokens_total", tier=tier) for tier in TIERS}
        return TokenCounts(self._sample("prompt_tokens_total"), first + between, tiers)

    def _sample(self, name: str, **labels: str) -> int:
        return int(self.registry.get_sample_value(f"stratakv_{name}", labels) or 0)

    def lost_kv_events(self) -> None:
        """A batch found its queue full."""
        self._lost_events.inc()

    def render(self, stats: EngineStats | None, sessions: SessionStats | None = None) -> bytes:
        """The text format; without the engine's figures if it cannot give them. ``sessions``: of a
        server that hands requests over."""
        self._engine.show(stats, sessions)
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"stratakv_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"stratakv_{name}", text, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """Shows the engine's counters as they are: they count up there."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None
        self.sessions: SessionStats | None = None

    def show(self, stats: EngineStats | None, sessions: SessionStats | None) -> None:
        self.stats, self.sessions = stats, sessions

    def collect(self) -> Iterator[Metric]:
        if self.stats is not None:
            yield from _of_engine(self.stats)
            if self.stats.storage is not None:
                yield from _of_storage(self.stats.storage)
        if self.sessions is not None:
            yield from _of_sessions(self.sessions)


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    for name, value in (
        ("waiting", stats.waiting),
        ("retracted", stats.retracted),
        ("running", stats.running),
    ):
        yield GaugeMetricFamily(f"stratakv_requests_{name}", f"Requests {name}", value)
    yield CounterMetricFamily("stratakv_engine_steps", "Forward passes", stats.steps)
    pages = GaugeMetricFamily(
        "stratakv_pool_pages",
        "Pages that are free, cached and evictable, or in use; they add up to the pool",
        labels=("group", "tier", "state"),
    )
    for pool in stats.pages:
        in_use = pool.total - pool.free - pool.evictable
        for state, value in (
            ("free", pool.free),
            ("evictable", pool.evictable),
            ("in_use", in_use),
        ):
            pages.add_metric((pool.group, pool.tier, state), value)
    yield pages
    yield CounterMetricFamily(
        "stratakv_known_tokens",
        "Prompt tokens that the cache knew, on any tier",
        stats.known_tokens,
    )
    lost = CounterMetricFamily(
        "stratakv_lost_tokens",
        "Known tokens that were computed all the same",
        labels=("tier", "reason"),
    )
    for labels, tokens in stats.lost_tokens.items():
        lost.add_metric(labels, tokens)
    yield lost
    failed = CounterMetricFamily(
        "stratakv_requests_failed",
        "Requests that ended with an error of their own, while the others went on",
        labels=("cause",),
    )
    for cause, count in stats.failures.items():
        failed.add_metric((cause,), count)
    yield failed
    for name, value in stats.counters.items():
        yield CounterMetricFamily(f"stratakv_cache_{name}", f"Engine counter {name}", value)


def _of_storage(stats: StorageStats) -> Iterator[Metric]:
    for name, text, label, counts in (
        ("pages", "Pages between host and storage", "event", stats.pages),
        ("tokens", "Prompt tokens that storage was asked for", "event", stats.tokens),
        ("lost_tokens", "Tokens found and not given to the request", "reason", stats.lost_tokens),
        ("abandoned_prefetches", "Fetches that brought nothing", "reason", stats.abandoned),
    ):
        family = CounterMetricFamily(f"stratakv_storage_{name}", text, labels=(label,))
        for value, count in counts.items():
            family.add_metric((value,), count)
        yield family
    off = GaugeMetricFamily(
        "stratakv_storage_off", "1: it failed lately and is left alone", labels=("direction",)
    )
    off.add_metric(("reading",), float(stats.reading_off))
    off.add_metric(("writing",), float(stats.writing_off))
    yield off


def _of_sessions(stats: SessionStats) -> Iterator[Metric]:
    now = GaugeMetricFamily(
        "stratakv_transfer_sessions", "Requests between two servers", labels=("state",)
    )
    for state, count in stats.states.items():
        now.add_metric((state.name.lower(),), count)
    yield now
    yield CounterMetricFamily(
        "stratakv_transfer_sessions_succeeded", "Requests handed over", stats.succeeded
    )
    failed = CounterMetricFamily(
        "stratakv_transfer_sessions_failed", "Requests not handed over", labels=("cause",)
    )
    for cause, count in stats.failed.items():
        failed.add_metric((cause.value,), count)
    yield failed
    if stats.leases is None:
        return
    pages = GaugeMetricFamily(
        "stratakv_transfer_pages",
        "Pages that a peer may still write; in quarantine: also after its deadline",
        labels=("state",),
    )
    pages.add_metric(("leased",), sum(stats.leases.leased.values()))
    pages.add_metric(("quarantined",), sum(stats.leases.quarantined.values()))
    yield pages

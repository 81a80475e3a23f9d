"""Prometheus metrics: what the server saw, and the engine's own figures at scrape time.

Owns what is counted here; names and texts are ``metric_families``', the engine's figures
``engine_metrics``'. Every sample has the model's name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stratakv.core.ids import GroupId
from stratakv.disagg.statistics import SessionStats
from stratakv.engine.huggingface.page_selection import Recall
from stratakv.engine.request import CachedTokens
from stratakv.engine.stats import EngineStats
from stratakv.serve.engine_metrics import EngineCollector
from stratakv.serve.metric_families import BY_NAME, MODEL, PREFIX

FIRST_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WHOLE_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
FOLDED: Final = 256
"""Durations that wait to be counted, at most."""
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


class Durations:
    """A histogram of seconds. They wait to be counted: many at a time cost a fifth of what each one
    does between two tokens. For the event loop's thread, which renders too."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._waiting: list[float] = []

    def observe(self, seconds: float) -> None:
        self._waiting.append(seconds)
        if len(self._waiting) >= FOLDED:
            self.fold()

    def fold(self) -> None:
        """Count what waits, before the histogram is read."""
        for seconds in self._waiting:
            self._histogram.observe(seconds)
        self._waiting.clear()


class ServerMetrics:
    """One server's registry. ``groups``: names of the cache groups that a prompt can hit.
    ``model``: as clients call it."""

    def __init__(self, groups: Mapping[GroupId, str], model: str) -> None:
        self.model: Final = model
        self._registry = CollectorRegistry()
        self._groups = dict(groups)
        self._engine = EngineCollector()
        self._registry.register(self._engine)
        self._shown = _Named(self._registry, model)
        self._responses = self._counter("http_responses")
        self._finished = self._counter("requests")
        self._aborted = self._counter("requests_aborted")
        self._prompt = self._counter("prompt_tokens")
        self._generated = self._counter("generated_tokens")
        self._cached = self._counter("cached_prompt_tokens")
        self._by_group = self._counter("cached_group_tokens")
        self._lost_events = self._counter("kv_event_batches_lost")
        self.first_token_s: Final = self._durations("time_to_first_token_seconds", FIRST_S)
        self.between_tokens_s: Final = self._durations("inter_token_latency_seconds", BETWEEN_S)
        self.whole_s: Final = self._durations("e2e_request_latency_seconds", WHOLE_S)

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
        self._fold()
        first, between = (
            self._sample(f"{name}_seconds_count")
            for name in ("time_to_first_token", "inter_token_latency")
        )
        tiers = {tier: self._sample("cached_prompt_tokens_total", tier=tier) for tier in TIERS}
        return TokenCounts(self._sample("prompt_tokens_total"), first + between, tiers)

    def _sample(self, name: str, **labels: str) -> int:
        return int(self._registry.get_sample_value(f"{PREFIX}{name}", labels) or 0)

    def lost_kv_events(self) -> None:
        """A batch found its queue full."""
        self._lost_events.inc()

    def watch(self, recall: Recall) -> None:
        """Of a model whose queries see selected pages."""
        self._engine.watch(recall)

    def render(self, stats: EngineStats | None, sessions: SessionStats | None = None) -> bytes:
        """The text format; without the engine's figures if it cannot give them. ``sessions``: of a
        server that hands requests over."""
        self._fold()
        self._engine.show(stats, sessions)
        return generate_latest(self._shown)

    def _counter(self, name: str) -> Counter:
        about = BY_NAME[name]
        return Counter(f"{PREFIX}{name}", about.help, about.labels, registry=self._registry)

    def _durations(self, name: str, buckets: tuple[float, ...]) -> Durations:
        about = BY_NAME[name]
        return Durations(
            Histogram(f"{PREFIX}{name}", about.help, buckets=buckets, registry=self._registry)
        )

    def _fold(self) -> None:
        for durations in (self.first_token_s, self.between_tokens_s, self.whole_s):
            durations.fold()


class _Named(Collector):
    """What a registry has, with the label of the model."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry, self._model = registry, model

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            named = Metric(family.name, family.documentation, family.type, family.unit)
            for one in family.samples:
                labels = {MODEL: self._model, **one.labels}
                named.add_sample(one.name, labels, one.value, one.timestamp, one.exemplar)
            yield named

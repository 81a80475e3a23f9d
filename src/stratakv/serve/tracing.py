"""Spans of client requests for OpenTelemetry, as vLLM names them.

Owns what a span says and how it is sent: one span for each client request, sent by the SDK's thread
in batches over OTLP. Nothing of it runs on a step. Must not decide anything about a request.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from stratakv.core.clock import Clock
from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SPAN: Final = "llm_request"
FLUSH_S: Final = 2.0
"""What spans get to be sent when the server ends."""
TRACE_HEADERS: Final = ("traceparent", "tracestate")
ABORTED: Final = "abort"
"""Why a choice ended that was cut off: by its client, or by an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpan:
    """One client request that has ended. ``caller``: headers with its caller's trace, if any.
    Seconds are the server's monotonic clock's; ``first_s`` None: no token came. ``cached``: prompt
    tokens by the tier they came from. ``finish``: reasons of its choices, ``ABORTED`` of those
    that were cut off. ``max_tokens`` None: the request named none."""

    caller: Mapping[str, str]
    id: str
    model: str
    start_s: float
    first_s: float | None
    end_s: float
    prompt_tokens: int
    generated_tokens: int
    cached: Mapping[str, int]
    finish: Sequence[str]
    n: int
    max_tokens: int | None
    temperature: float
    top_p: float


class SpanExporter(Protocol):
    """Where spans of requests go. For the event loop's thread alone."""

    def export(self, span: RequestSpan) -> None: ...

    def close(self) -> None:
        """Sends what waits, for a bounded time."""
        ...


class NoSpans:
    """Of a server without ``--otlp-traces-endpoint``."""

    def export(self, span: RequestSpan) -> None:
        del span

    def close(self) -> None:
        pass


class OtlpSpans:
    """``now``: the clock of a span's seconds; ``wall``: seconds since 1970."""

    def __init__(self, provider: "TracerProvider", now: Clock, wall: Clock) -> None:
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - optional
            TraceContextTextMapPropagator,
        )

        self._provider = provider
        self._tracer = provider.get_tracer("stratakv")
        self._callers = TraceContextTextMapPropagator()
        self._now, self._wall = now, wall

    def export(self, span: RequestSpan) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415 - optional

        offset_s = self._wall.now_s() - self._now.now_s()
        made = self._tracer.start_span(
            SPAN,
            context=self._callers.extract(span.caller),
            kind=SpanKind.SERVER,
            start_time=_ns(span.start_s + offset_s),
            attributes=attributes(span),
        )
        if span.first_s is not None:
            made.add_event("first token", timestamp=_ns(span.first_s + offset_s))
        if ABORTED in span.finish:
            made.set_status(Status(StatusCode.ERROR, "aborted"))
        made.end(_ns(span.end_s + offset_s))

    def close(self) -> None:
        # The SDK's own bounds are of one batch each, and a collector may hang with several.
        last = threading.Thread(target=self._provider.shutdown, name="stratakv-spans", daemon=True)
        last.start()
        last.join(FLUSH_S)


def attributes(span: RequestSpan) -> Mapping[str, str | int | float | Sequence[str]]:
    """By the names of OpenTelemetry's conventions for generative AI, and those vLLM adds."""
    found: dict[str, str | int | float | Sequence[str]] = {
        "gen_ai.response.model": span.model,
        "gen_ai.request.id": span.id,
        "gen_ai.request.n": span.n,
        "gen_ai.request.temperature": span.temperature,
        "gen_ai.request.top_p": span.top_p,
        "gen_ai.usage.prompt_tokens": span.prompt_tokens,
        "gen_ai.usage.completion_tokens": span.generated_tokens,
        "gen_ai.response.finish_reasons": tuple(span.finish),
        "gen_ai.latency.e2e": span.end_s - span.start_s,
    }
    if span.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = span.max_tokens
    if span.first_s is not None:
        found["gen_ai.latency.time_to_first_token"] = span.first_s - span.start_s
    return found | {f"stratakv.cached_tokens.{tier}": n for tier, n in span.cached.items()}


def open_spans(server: ServerConfig, now: Clock, wall: Clock) -> SpanExporter:
    """ConfigError where spans are wanted and their library is missing."""
    url = server.otlp_traces_endpoint
    if url is None:
        return NoSpans()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - only who traces needs it
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint {url}: {error.name or 'its library'} cannot be imported; "
            "allowed after: pip install 'stratakv[otel]'"
        ) from error
    resource = Resource.create({"service.name": "stratakv"})  # OTEL_SERVICE_NAME goes first
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return OtlpSpans(provider, now, wall)


def traced(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Of a request's ``headers``, those with its caller's trace."""
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)

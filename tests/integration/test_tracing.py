"""Spans of requests, as a collector receives them: protobuf over HTTP, read by its own library."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from stratakv.core.clock import WallClock
from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.serve.tokenizer import Tokenizer
from stratakv.serve.tracing import NoSpans, OtlpSpans, open_spans
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.fixtures.servers import free_port
from tests.serving import EchoEngine, make_service, running, train_tokenizer

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"prompt": "hello", "max_tokens": 5, "temperature": 0}


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.spans = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += [(resource.resource, span) for span in scope.spans]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(PATIENCE_S)


@contextmanager
def traced(tokenizer, url):
    engine = EchoEngine()
    service = make_service(tokenizer, engine)
    spans = open_spans(ServerConfig(otlp_traces_endpoint=url), service.clock, WallClock())
    with closing(spans), running(replace(service, spans=spans), engine) as live:
        yield live


def values(span):
    """By name, as Python's."""
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        several = kind == "array_value"
        found[each.key] = [one.string_value for one in value.values] if several else value
    return found


def test_a_request_is_one_span_of_its_callers_trace(tokenizer, collector):
    begun_s = WallClock().now_s()
    with traced(tokenizer, collector.url) as live:
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        answer = httpx.post(f"{live.url}/v1/completions", json=BODY, headers=headers)
        usage = answer.json()["usage"]
    [(resource, span)] = collector.spans
    assert values(resource)["service.name"] == "stratakv"
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
        "llm_request", TRACE, CALLER,
    )  # fmt: skip
    assert begun_s <= span.start_time_unix_nano / 1e9 <= span.end_time_unix_nano / 1e9
    assert span.end_time_unix_nano / 1e9 <= WallClock().now_s()
    [first] = span.events
    assert span.start_time_unix_nano <= first.time_unix_nano <= span.end_time_unix_nano
    found = values(span)
    assert 0 < found.pop("gen_ai.latency.time_to_first_token") <= found.pop("gen_ai.latency.e2e")
    assert found.pop("gen_ai.request.id").startswith(answer.json()["id"])
    assert found == {
        "gen_ai.response.model": "echo",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.response.finish_reasons": ["length"],
        "stratakv.cached_tokens.device": usage["prompt_tokens_details"]["cached_tokens"],
        "stratakv.cached_tokens.host": 0,
        "stratakv.cached_tokens.storage": 0,
    }


def test_choices_and_streams_are_one_span_and_a_refusal_is_none(tokenizer, collector):
    with traced(tokenizer, collector.url) as live:
        asked = {**BODY, "n": 3, "stream": True}
        assert httpx.post(f"{live.url}/v1/completions", json=asked).status_code == 200
        wrong = {**BODY, "temperature": -1}
        assert httpx.post(f"{live.url}/v1/completions", json=wrong).status_code == 400
        assert httpx.get(f"{live.url}/health").status_code == 200
    [(_, span)] = collector.spans
    assert not span.parent_span_id
    found = values(span)
    assert found["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert found["gen_ai.usage.completion_tokens"] == 15


def test_a_client_that_leaves_is_an_error(tokenizer, collector):
    with traced(tokenizer, collector.url) as live:
        live.engine.gate.clear()
        with (
            httpx.Client(base_url=live.url) as client,
            client.stream("POST", "/v1/completions", json={**BODY, "stream": True}),
        ):
            pass
        wait_until(lambda: live.service.driver.open_requests == 0, "the end of the request")
        live.engine.gate.set()
    [(_, span)] = collector.spans
    assert values(span)["gen_ai.response.finish_reasons"] == ["abort"]
    assert span.status.code == span.status.STATUS_CODE_ERROR


def test_a_collector_that_is_away_is_no_concern_of_a_request(tokenizer):
    with traced(tokenizer, f"http://127.0.0.1:{free_port()}/v1/traces") as live:
        for _ in range(3):
            answer = httpx.post(f"{live.url}/v1/completions", json=BODY)
            assert answer.json()["usage"]["completion_tokens"] == 5


def test_spans_that_cannot_be_sent_hold_up_no_end():
    released = threading.Event()

    class Hanging:
        def get_tracer(self, name):
            return name

        def shutdown(self):
            assert released.wait(PATIENCE_S)

    spans = OtlpSpans(Hanging(), WallClock(), WallClock())
    ending = threading.Thread(target=spans.close)
    ending.start()
    ending.join(PATIENCE_S)
    ended = not ending.is_alive()
    released.set()
    assert ended


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://a:1", "http://", "", "http://a:0"])
def test_what_is_no_collectors_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"^--otlp-traces-endpoint.*allowed is"):
        ServerConfig(otlp_traces_endpoint=url)


def test_without_the_flag_nothing_is_sent():
    assert isinstance(open_spans(ServerConfig(), WallClock(), WallClock()), NoSpans)

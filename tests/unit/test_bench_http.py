"""The waits that ``bench http`` reports are those of a running server."""

from stratakv.bench.http import attacks, measure
from stratakv.serve.tokenizer import Tokenizer
from tests.serving import EchoEngine, make_service, running, train_tokenizer


def test_every_attack_is_answered_and_waits_are_measured(tmp_path):
    engine = EchoEngine()
    service = make_service(Tokenizer(train_tokenizer(tmp_path)), engine, body_bytes=1 << 20)
    with running(service, engine) as live:
        host, _, port = live.url.removeprefix("http://").rpartition(":")
        waits = measure(host, int(port), attacks(1 << 18), 1)
    assert [wait.status for wait in waits] == [200] + [400] * 6
    assert all(min(wait.health_ms, wait.prompt_ms, wait.answered_ms) > 0 for wait in waits)

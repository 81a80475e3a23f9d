"""A whole server with ``--kv-events``: a router follows it from the wire alone."""

import sys
import threading
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

from stratakv.cli import main
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.core.page_keys import Namespace, page_keys
from stratakv.serve import wiring
from stratakv.serve.kv_wire import hashes_of
from stratakv.serve.server import Server, bound_socket
from stratakv.serve.wiring import build_service
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.tiers.events import tenant_of
from tests.kv_subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber
from tests.replica import Replica, readable

PAGE = 16
CONFIG = EngineConfig(
    page_tokens=PAGE, dtype="float32", device_memory="1MiB", host_memory="1MiB", max_model_len=256,
    max_running=4, step_tokens=64, chunk_tokens=32, reserve_tokens=16, load_back_threshold=0,
)  # fmt: skip


@contextmanager
def serving(directory, endpoints):
    listen, replay = endpoints
    settings = ServerConfig(kv_events=listen, kv_events_replay=replay, kv_events_topic="kv@a@b")
    service, parts = build_service(directory, CONFIG, settings)
    listener = bound_socket("127.0.0.1", 0)
    listener.listen(16)
    server = Server(service, drain_s=PATIENCE_S)
    service.driver.start()
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", parts
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert service.driver.stop(PATIENCE_S)
        parts.close()


def ask(url, prompt, salt=""):
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    salted = body | ({"cache_salt": salt} if salt else {})
    answer = httpx.post(f"{url}/v1/completions", json=salted, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text


def replayed(subscriber):
    """A replica of what the server said from its first batch on."""
    subscriber.ask_again(0)
    assert not subscriber.missing()
    replica = Replica()
    for number in sorted(subscriber.batches):
        for event in subscriber.batches[number].events:
            match event:
                case BlockStored():
                    replica.store(event.medium, event.group_idx, event.block_hashes)
                case BlockRemoved():
                    replica.remove(event.medium, event.group_idx, event.block_hashes)
                case AllBlocksCleared():
                    replica.clear()
    return replica.known()


def hash_of(key):
    return hashes_of([key])[0]


def test_a_router_that_joins_late_knows_what_two_tenants_have_cached(directory, tmp_path):
    endpoints = (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    prompt = [(7 * i + 3) % 400 for i in range(70)]
    with serving(directory, endpoints) as (url, parts):
        ask(url, prompt)
        ask(url, prompt, salt="tenant")
        with Subscriber(*endpoints, topic="kv@a") as subscriber:
            ask(url, prompt[::-1])
            tree = parts.cache.tiers.tree
            wait_until(lambda: not parts.engine.has_work())
            wait_until(lambda: replayed(subscriber) == readable(tree, hash_of))
            stored = [
                event
                for batch in subscriber.batches.values()
                for event in batch.events
                if isinstance(event, BlockStored)
            ]
            assert {event.medium for event in stored} == {"GPU", "CPU"}
            assert {event.group_idx for event in stored} == {0, 1}
            by_tenant = {
                salt: {
                    number
                    for event in stored
                    if (event.extra_keys or [("",)])[0][0] == tenant_of(salt)
                    for number in event.block_hashes
                }
                for salt in ("", "tenant")
            }
            base = Namespace(model=parts.model.fingerprint, spec_digest=parts.spec.digest)
            for salt, found in by_tenant.items():
                full = np.array(prompt, np.int32)
                keys = page_keys(full, base.salted(salt), PAGE)
                assert set(hashes_of(keys)) <= found
            assert by_tenant[""].isdisjoint(by_tenant["tenant"])
            assert httpx.post(f"{url}/flush_cache", timeout=PATIENCE_S).status_code == 200
            wait_until(lambda: replayed(subscriber) == {})
            last = subscriber.batches[max(subscriber.batches)]
            assert last.events == [AllBlocksCleared()]


@pytest.fixture
def no_weights(monkeypatch):
    def read(*_arguments):
        raise AssertionError("weights were read")

    monkeypatch.setattr(wiring, "load_model", read)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kv-events here", "--kv-events here: allowed are tcp://*:PORT, tcp://HOST:PORT and"),
        ("--kv-events tcp://*", "--kv-events tcp://*: allowed are"),
        ("--kv-events tcp://a:b:1", "--kv-events tcp://a:b:1: allowed are"),
        ("--kv-events udp://*:1", "--kv-events udp://*:1: allowed are"),
        ("--kv-events tcp://*:99999", "--kv-events tcp://*:99999: allowed are"),
        ("--kv-events tcp://*:0", "--kv-events tcp://*:0: allowed are"),
        ("--kv-events ipc:///no/such/place", "--kv-events ipc:///no/such/place cannot be bound: "),
        (
            "--kv-events tcp://127.0.0.1:1 --kv-events-replay tcp://no.such.host:5",
            "--kv-events-replay tcp://no.such.host:5 cannot be bound: ",
        ),
        ("--kv-events-replay tcp://*:5558", "--kv-events-replay: allowed with --kv-events"),
        ("--kv-events-topic kv", "--kv-events-topic: allowed with --kv-events"),
        (
            "--kv-events tcp://*:5557 --cache off",
            "--kv-events: with --cache off nothing is cached; allowed are the others",
        ),
    ],
)
def test_events_that_cannot_be_are_refused_before_weights(
    directory, no_weights, flags, message, capsys
):
    assert main(["serve", str(directory), "--port", "0", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"stratakv: {message}")


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_a_library_that_is_missing_is_named_with_its_extra(
    directory, no_weights, monkeypatch, missing
):
    for name in ("stratakv.serve.kv_events", "stratakv.serve.kv_wire"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf"{missing} cannot be imported.*stratakv\[events\]"):
        build_service(directory, CONFIG, ServerConfig(kv_events="tcp://127.0.0.1:5557"))


def test_a_start_that_fails_gives_its_endpoints_back(directory, monkeypatch):
    def fails(*_arguments, **_options):
        raise ConfigError("the weights are gone")

    monkeypatch.setattr(wiring, "load_model", fails)
    with bound_socket("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    endpoint = f"tcp://*:{port}"
    for _ in range(2):
        with pytest.raises(ConfigError, match="the weights are gone"):
            build_service(directory, CONFIG, ServerConfig(kv_events=endpoint))

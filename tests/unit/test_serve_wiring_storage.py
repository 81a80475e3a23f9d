"""From ``--storage`` to an open worker, and from ``--prefetch-*`` to a policy."""

import threading

import pytest

from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError, StorageError
from stratakv.core.ids import GroupId, PageKey
from stratakv.policy.prefetch_pace import BestEffort, Timeout, WaitComplete
from stratakv.serve import wiring_storage
from stratakv.serve.wiring_storage import (
    check_storage,
    open_at_start,
    open_store,
    prefetch_policy_of,
)
from stratakv.spec.derive import spec_of
from stratakv.storage.backend import ObjectKey, ReadStatus
from stratakv.storage.io_jobs import Fetch, Kind, Store
from stratakv.storage.memory import MemoryBackend
from tests.fixtures.servers import free_port
from tests.fixtures.tiny_configs import tiny_config
from tests.serving import wait_until

SPEC = spec_of(tiny_config("gemma3").to_dict(), page_tokens=16, dtype="float32")
HOST = tuple(40 for _ in SPEC.groups)
KEYS = [
    ObjectKey(PageKey(bytes([name]) * 32), GroupId(group))
    for name in (1, 2)
    for group in range(len(SPEC.groups))
]


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    wait_until(lambda: not storage_threads())


def opened(url, host=HOST):
    return open_store(url, SPEC, host)


def done(worker, kind, job):
    assert worker.submit(job) is not None
    wait_until(lambda: worker.ready(kind) == 1)
    return worker.take(kind, 1)[0]


def pages(fill):
    return [memoryview(bytearray([fill]) * SPEC.groups[key.group].page_bytes) for key in KEYS]


def storage_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("stratakv-storage")]


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_page_that_was_written_is_read_back(scheme, tmp_path):
    url = "memory://" if scheme == "memory" else f"file://{tmp_path}/store?quota=64MiB"
    store = opened(url)
    done(store.worker, Kind.STORE, Store(KEYS, pages(7)))
    into = pages(0)
    found = done(store.worker, Kind.FETCH, Fetch(KEYS, into))
    assert found.statuses == [ReadStatus.HIT] * len(KEYS)
    assert into == pages(7)
    assert store.worker.close(10)


def test_a_file_store_reads_and_writes_with_clients_of_their_own(tmp_path):
    store = opened(f"file://{tmp_path}/store?quota=64MiB")
    assert storage_threads() == ["stratakv-storage-read", "stratakv-storage-write"]
    done(store.worker, Kind.STORE, Store(KEYS, pages(7)))
    done(store.worker, Kind.FETCH, Fetch(KEYS, pages(0)))
    figures = store.figures()
    assert (figures["pages"], figures["quota_bytes"]) == (len(KEYS), 64 << 20)
    counts = figures["counters"]
    assert (counts["stored"], counts["hits"]) == (len(KEYS), len(KEYS))  # of either client
    assert store.worker.close(10)


def test_memory_is_one_store_and_not_two():
    store = opened("memory://")
    assert storage_threads() == ["stratakv-storage"]
    assert store.figures() == {}
    assert store.worker.close(10)


def test_a_password_does_not_show(monkeypatch):
    monkeypatch.setattr(wiring_storage, "open_storage", lambda url, form: MemoryBackend(form))
    store = opened("redis://user:secret@host:6379/0")
    assert store.shown == "redis://user:***@host:6379/0"
    assert store.worker.close(10)


def test_what_is_queued_pins_at_most_half_of_a_large_host(monkeypatch):
    limits = []
    keep = wiring_storage.IoLimits
    monkeypatch.setattr(
        wiring_storage, "IoLimits", lambda **given: limits.append(given) or keep(**given)
    )
    for host in (HOST, (1000, 1000), (100_000, 0)):
        assert opened("memory://", host).worker.close(10)
    assert [given["queue_pages"] for given in limits] == [64, 1000, 8192]


@pytest.mark.parametrize(
    ("url", "host", "says"),
    [
        ("ftp://host/x", HOST, "--storage ftp://host/x: allowed are memory://, file://"),
        ("file://relative", HOST, "--storage file://relative: allowed is file:///DIRECTORY"),
        ("memory://", (0, 0), "--storage memory://: there is no host page for what it would give"),
    ],
)
def test_a_url_that_is_refused(url, host, says):
    config = EngineConfig(storage=url)
    for call in (
        lambda: opened(url, host),
        lambda: check_storage(config, host),
        lambda: open_at_start(config, SPEC, host),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert str(error.value).startswith(says)
    assert not storage_threads()


def test_a_check_opens_nothing(tmp_path):
    check_storage(EngineConfig(storage=f"file://{tmp_path}/store"), HOST)
    check_storage(EngineConfig(), HOST)
    assert not (tmp_path / "store").exists()
    assert open_at_start(EngineConfig(), SPEC, HOST) is None


def test_a_store_that_does_not_answer_is_the_operators_at_start_only():
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    with pytest.raises(StorageError):
        opened(url)
    with pytest.raises(ConfigError, match=r"--storage redis://:\*\*\*@127.0.0.1:\d+/0: ") as error:
        open_at_start(EngineConfig(storage=url), SPEC, HOST)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("failure", [StorageError("down"), ValueError("a strange store")])
def test_the_first_client_is_closed_when_the_second_fails(monkeypatch, tmp_path, failure):
    made = []

    class Backend(MemoryBackend):
        closed = False

        def close(self):
            self.closed = True

    def open_once(_url, form):
        if made:
            raise failure
        made.append(Backend(form))
        return made[0]

    monkeypatch.setattr(wiring_storage, "open_storage", open_once)
    with pytest.raises(StorageError):
        opened(f"file://{tmp_path}")
    assert made[0].closed
    assert not storage_threads()


def test_the_prefetch_policy_of_the_flags():
    usual = prefetch_policy_of(EngineConfig(), SPEC, HOST)
    assert usual.threshold_tokens == 256
    assert usual.budget_tokens == 20 * 16
    assert usual.stop == Timeout()
    given = EngineConfig(
        prefetch_share=0.25, prefetch_threshold=48, prefetch_timeout=60.0,
        prefetch_timeout_per_1k=3.0,
    )  # fmt: skip
    found = prefetch_policy_of(given, SPEC, HOST)
    assert (found.threshold_tokens, found.budget_tokens) == (48, 10 * 16)
    assert found.stop == Timeout(base_s=60.0, per_1k_tokens_s=3.0, most_s=60.0)
    for name, stop in (("best-effort", BestEffort()), ("wait-complete", WaitComplete())):
        config = EngineConfig(prefetch_policy=name)
        assert prefetch_policy_of(config, SPEC, HOST).stop == stop

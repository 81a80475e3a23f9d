"""From ``--storage`` to an open worker, and from ``--prefetch-*`` to a policy."""

from contextlib import closing
from dataclasses import replace

import pytest

from stratakv.assembly import stores
from stratakv.assembly.engine_plan import prefetch_policy_of
from stratakv.assembly.rank_context import ObjectSharding
from stratakv.assembly.stores import (
    Trust,
    check_storage,
    check_url,
    open_store,
    reach_at_start,
    trust_while_it_runs,
)
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError, StorageError
from stratakv.core.ids import GroupId, PageKey
from stratakv.policy.prefetch_pace import BestEffort, Timeout, WaitComplete
from stratakv.serve import wiring
from stratakv.spec.derive import spec_of
from stratakv.spec.sharding import default_cut, sharding_of
from stratakv.storage import ends
from stratakv.storage.backend import Everything, ObjectKey, ReadStatus, StoreFormat
from stratakv.storage.file.fsck import fsck
from stratakv.storage.io_jobs import Fetch, Kind, Remove, Store, Touch
from stratakv.storage.memory import MemoryBackend
from stratakv.storage.registry import open_storage
from stratakv.storage.sealed import sealed_form
from stratakv.storage.store_key import StoreKey
from stratakv.storage.urls import parse_storage_url
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.fixtures.models import tiny_model
from tests.fixtures.servers import free_port
from tests.fixtures.tiny_configs import tiny_config
from tests.serving import train_tokenizer
from tests.storage_threads import StorageThreads

CONFIG = tiny_config("gemma3").to_dict() | {"num_attention_heads": 8, "num_key_value_heads": 8}
SPEC = spec_of(CONFIG, page_tokens=16, dtype="float32")
NO_TRUST = Trust()
HOST = tuple(40 for _ in SPEC.groups)
KEYS = [
    ObjectKey(PageKey(bytes([name]) * 32), GroupId(group))
    for name in (1, 2)
    for group in range(len(SPEC.groups))
]


@pytest.fixture(autouse=True)
def threads():
    """None of them stays."""
    found = StorageThreads()
    yield found
    wait_until(lambda: not found.names, "the end of a store's threads")


def opened(url, host=HOST):
    return open_store(url, SPEC, host)


def done(worker, kind, job):
    assert worker.submit(job) is not None
    wait_until(lambda: worker.ready(kind) == 1)
    return worker.take(kind, 1)[0]


def pages(fill):
    return [memoryview(bytearray([fill]) * SPEC.groups[key.group].page_bytes) for key in KEYS]


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_page_that_was_written_is_read_back(scheme, tmp_path):
    url = "memory://" if scheme == "memory" else f"file://{tmp_path}/store?quota=64MiB"
    store = opened(url)
    done(store.worker, Kind.STORE, Store(KEYS, pages(7)))
    into = pages(0)
    found = done(store.worker, Kind.FETCH, Fetch(KEYS, into))
    assert found.statuses == [ReadStatus.HIT] * len(KEYS)
    assert into == pages(7)
    assert store.worker.close(PATIENCE_S)


def test_a_file_store_reads_and_writes_with_clients_of_their_own(tmp_path, threads):
    store = opened(f"file://{tmp_path}/store?quota=64MiB")
    assert threads.names == ["stratakv-storage-read", "stratakv-storage-write"]
    done(store.worker, Kind.STORE, Store(KEYS, pages(7)))
    done(store.worker, Kind.FETCH, Fetch(KEYS, pages(0)))
    figures = store.figures()
    assert (figures["pages"], figures["quota_bytes"]) == (len(KEYS), 64 << 20)
    counts = figures["counters"]
    assert (counts["stored"], counts["hits"]) == (len(KEYS), len(KEYS))  # of either client
    assert store.worker.close(PATIENCE_S)


def test_memory_is_one_store_and_not_two(threads):
    store = opened("memory://")
    assert threads.names == ["stratakv-storage"]
    assert store.figures() == {}
    assert store.worker.close(PATIENCE_S)


def test_a_password_does_not_show(monkeypatch):
    monkeypatch.setattr(ends, "open_storage", lambda url, form: MemoryBackend(form))
    store = opened("redis://user:secret@host:6379/0")
    assert store.shown == "redis://user:***@host:6379/0"
    assert store.worker.close(PATIENCE_S)


def test_what_is_queued_pins_at_most_half_of_a_large_host(monkeypatch):
    limits = []
    keep = stores.IoLimits
    monkeypatch.setattr(stores, "IoLimits", lambda **given: limits.append(given) or keep(**given))
    for host in (HOST, (1000, 1000), (100_000, 0)):
        assert opened("memory://", host).worker.close(PATIENCE_S)
    assert [given["queue_pages"] for given in limits] == [64, 1000, 8192]


@pytest.mark.parametrize(
    ("url", "host", "message"),
    [
        ("ftp://host/x", HOST, "--storage ftp://host/x: allowed are memory://, file://"),
        ("file://relative", HOST, "--storage file://relative: allowed is file:///DIRECTORY"),
        ("memory://", (0, 0), "--storage memory://: there is no host page for what it would give"),
    ],
)
def test_a_url_that_is_refused(url, host, message, threads):
    config = EngineConfig(storage=url)
    for call in (
        lambda: opened(url, host),
        lambda: check_storage(config, host),
        lambda: reach_at_start(config, SPEC, host),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert str(error.value).startswith(message)
    assert not threads.names


def test_a_check_opens_nothing(tmp_path, threads):
    check_storage(EngineConfig(storage=f"file://{tmp_path}/store"), HOST)
    check_storage(EngineConfig(), HOST)
    assert not (tmp_path / "store").exists()
    assert reach_at_start(EngineConfig(), SPEC, HOST) is None


def test_a_store_that_does_not_answer_is_the_operators_at_start_only():
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    with pytest.raises(StorageError):
        opened(url)
    with pytest.raises(ConfigError, match=r"--storage redis://:\*\*\*@127.0.0.1:\d+/0: ") as error:
        reach_at_start(EngineConfig(storage=url), SPEC, HOST)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("failure", [StorageError("down"), ValueError("a strange store")])
def test_the_first_client_is_closed_when_the_second_fails(monkeypatch, tmp_path, threads, failure):
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

    monkeypatch.setattr(ends, "open_storage", open_once)
    with pytest.raises(StorageError):
        opened(f"file://{tmp_path}")
    assert made[0].closed
    assert not threads.names


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


# -- pages that are sealed with a key --------------------------------------------------------------

ONE, TWO = StoreKey(b"1" * 32), StoreKey(b"2" * 32)


def filled(url, key, sharing=None):
    """Store all pages at ``url`` under a key, or under none."""
    store = open_store(url, SPEC, HOST, sharing, Trust(key=key))
    done(store.worker, Kind.STORE, Store(KEYS, pages(7)))
    assert store.worker.close(PATIENCE_S)


def read_all(url, key):
    """How all pages come back, and what the store says of its seals."""
    store = open_store(url, SPEC, HOST, None, Trust(key=key))
    into = pages(0)
    statuses = done(store.worker, Kind.FETCH, Fetch(KEYS, into)).statuses
    hits = [page for page, status in zip(into, statuses, strict=True) if status is ReadStatus.HIT]
    assert hits == (pages(7) if hits else [])
    figures = store.figures()
    assert store.worker.close(PATIENCE_S)
    return set(statuses), figures.get("seal")


@pytest.mark.parametrize("writer", [None, ONE, TWO])
@pytest.mark.parametrize("reader", [None, ONE, TWO])
def test_a_page_is_found_under_the_key_that_it_was_stored_with(url, writer, reader):
    filled(url, writer)
    status, seal = read_all(url, reader)
    assert status == {ReadStatus.HIT if reader is writer else ReadStatus.MISS}
    assert seal == (None if reader is None else {"key": reader.id.hex(), "forged": 0})
    filled(url, reader)
    assert read_all(url, reader)[0] == read_all(url, writer)[0] == {ReadStatus.HIT}


def test_a_forged_page_is_counted_by_either_end(url):
    inner = sealed_form(StoreFormat.of(SPEC), ONE)
    with closing(open_storage(parse_storage_url(url), inner)) as them:
        them.write(KEYS, [memoryview(bytes(inner.page_bytes[key.group])) for key in KEYS])
    assert read_all(url, ONE) == ({ReadStatus.CORRUPT}, {"key": ONE.id.hex(), "forged": len(KEYS)})
    assert read_all(url, ONE) == ({ReadStatus.MISS}, {"key": ONE.id.hex(), "forged": 0})


def test_slices_and_the_mark_of_a_cut_are_sealed_too(url):
    use(url, cut=1)
    for _ in range(2):  # those under no key are nobody's business
        store = shared(url, cut=8, trust=Trust(key=ONE))
        assert done(store.worker, Kind.FETCH, Fetch(KEYS, pages(0))).statuses[0] is ReadStatus.MISS
        done(store.worker, Kind.TOUCH, Touch(KEYS[:1]))
        assert store.worker.close(PATIENCE_S)
    with pytest.raises(ConfigError, match="allowed is --storage-shards 8"):
        shared(url, cut=4, trust=Trust(key=ONE))


def test_a_key_is_read_once_the_flags_are_checked(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    config = EngineConfig(storage_key_file=str(path))
    check_storage(config, HOST)
    assert trust_while_it_runs(config).key.id == StoreKey(b"k" * 32).id
    path.chmod(0o644)
    for call in (
        check_storage,
        lambda c, h: reach_at_start(replace(c, storage="memory://"), SPEC, h),
    ):
        with pytest.raises(ConfigError, match=r"^--storage-key-file .*/key: others may have it"):
            call(config, HOST)


# -- pages that are cut otherwise ------------------------------------------------------------------


def shared(url, ranks=1, rank=0, cut=None, model=b"a model", config=CONFIG, trust=NO_TRUST):
    spec = spec_of(config, page_tokens=16, dtype="float32")
    sharding = sharding_of(config, spec, ranks)
    sharing = ObjectSharding(sharding, rank, cut or default_cut(ranks), model)
    return open_store(url, sharding.spec, HOST, sharing, trust)


def use(*args, **kwargs):
    """Open a store, find a page in it, and close it."""
    store = shared(*args, **kwargs)
    done(store.worker, Kind.TOUCH, Touch(KEYS[:1]))
    assert store.worker.close(PATIENCE_S)


def refused(*args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        shared(*args, **kwargs)
    return str(caught.value)


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store?quota=64MiB"


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (4, 3)])
def test_ranks_refuse_a_store_of_whole_pages(url, ranks, rank):
    use(url)
    found = refused(url, ranks, rank)
    assert found == (
        f"--storage {url}: pages of this model are there in slices of --storage-shards 1, which a "
        f"server with --storage-shards 8 would never find, and no number of shards with --tp "
        f"{ranks} would; allowed is another directory, database or prefix, or this one once it is "
        "cleared, by a server with --storage-shards 1, and --storage-shards 8 for every server "
        "that shares it"
    )


def test_a_single_rank_reports_which_setting_reads_the_pages_of_several(url):
    use(url, 4)
    assert refused(url).endswith("would never find; allowed is --storage-shards 8")
    assert shared(url, cut=8).worker.close(PATIENCE_S)
    assert shared(url, cut=16).worker.close(PATIENCE_S)  # it has no more heads than 8
    for ranks in (1, 2, 4, 8):
        assert shared(url, ranks, ranks - 1, cut=8).worker.close(PATIENCE_S)


def test_the_refusal_of_ranks_names_a_cut_that_they_could_have(url):
    use(url, cut=4)
    assert refused(url, 2).endswith("allowed is --storage-shards 4")
    assert "no number of shards with --tp 8 would" in refused(url, 8)


def test_another_model_or_cache_is_nobodys_business(url):
    use(url, cut=1, model=b"one")
    use(url, cut=8, model=b"another")
    other = CONFIG | {"num_key_value_heads": 4}
    assert shared(url, cut=4, model=b"one", config=other).worker.close(PATIENCE_S)


def test_what_no_cut_divides_is_never_refused_and_never_marked(tmp_path, url):
    config = CONFIG | {"num_key_value_heads": 1}
    for ranks, cut in ((1, 1), (1, 8), (2, 8), (1, 1)):
        use(url, ranks, cut=cut, config=config)
    assert fsck(tmp_path / "store").pages == 0


def test_a_rank_that_follows_keeps_no_marks(tmp_path, url):
    use(url, 2, 1)
    assert fsck(tmp_path / "store").pages == 0
    use(url, 2, 0)
    assert fsck(tmp_path / "store").pages == 1


def test_a_store_that_was_opened_by_mistake_is_free_for_any_cut(url):
    for cut in (1, 8, 1):
        assert shared(url, cut=cut).worker.close(PATIENCE_S)


def test_a_store_that_was_cleared_is_free_for_any_cut(url):
    first = shared(url, cut=1)
    done(first.worker, Kind.STORE, Store(KEYS, pages(7)))
    assert "--storage-shards 1" in refused(url, cut=8)
    done(first.worker, Kind.REMOVE, Remove(Everything.EVERYTHING))
    assert first.worker.close(PATIENCE_S)
    second = shared(url, cut=8)
    assert "--storage-shards 8" in refused(url, cut=1)
    assert second.worker.close(PATIENCE_S)


def test_an_old_store_without_a_mark_is_anybodys(url):
    old = open_store(url, SPEC, HOST)
    done(old.worker, Kind.STORE, Store(KEYS, pages(7)))
    assert old.worker.close(PATIENCE_S)
    new = shared(url, cut=1)
    assert done(new.worker, Kind.FETCH, Fetch(KEYS, pages(0))).statuses[0] is ReadStatus.HIT
    assert new.worker.close(PATIENCE_S)


def test_a_refusal_leaves_nothing_open(url, monkeypatch):
    use(url)
    opened = []
    for module, name in ((ends, "open_storage"), (stores, "open_marks")):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, real=real: opened.append(real(*a)) or opened[-1]
        )
    refused(url, cut=8)
    assert len(opened) == 3
    for store in opened:
        with pytest.raises(StorageError):
            store.contains(KEYS)


@pytest.mark.parametrize("weights", [b"", b"\x08" + bytes(7) + b"no JSON.", b"\xff" * 9])
def test_weights_that_cannot_be_named_open_no_store(tmp_path, weights):
    path = train_tokenizer(tmp_path / "model")
    tiny_model("llama").save_pretrained(path)
    (path / "model.safetensors").write_bytes(weights)
    config = EngineConfig(
        storage=f"file://{tmp_path}/store", device_memory="3MiB", host_memory="4MiB"
    )
    with pytest.raises(ConfigError, match=r"MODEL .*/model: not a causal LM that loads: "):
        wiring.build_service(path, config, ServerConfig())
    assert not (tmp_path / "store").exists()


def test_one_backend_for_both_has_one_thread_for_slices_too(threads):
    store = shared("memory://", cut=8)
    assert threads.names == ["stratakv-storage"]
    assert store.worker.close(PATIENCE_S)


def test_memory_is_one_processs_own():
    check_url("memory://", 1, HOST)
    with pytest.raises(ConfigError, match=r"--storage memory://: it is one process's own, and --"):
        check_url("memory://", 2, HOST)

"""The tier as vLLM drives it, without vLLM: what another engine must never hit, and what goes on
when the store does not. The released vLLM runs in tests/connect."""

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from stratakv.connect import installed_code
from stratakv.connect.whole_settings import setting_fields
from stratakv.core.errors import ConfigError, StorageError
from stratakv.testing.patience import wait_until
from tests.fixtures import fake_vllm
from tests.fixtures.fake_vllm import (
    KVConnectorRole,
    LookupResult,
    ReqContext,
    TransferJob,
    configuration,
    make_offload_key,
    record,
    speculative,
)
from tests.unit.test_connect_installed_code import Package

pytestmark = pytest.mark.usefixtures("no_toolkit")
KEYS = [make_offload_key(bytes([at]) * 32, group) for at in range(3) for group in (0, 1)]


@pytest.fixture
def install(monkeypatch):
    """Other packages than there are, until the test ends."""

    def act(*packages):
        monkeypatch.setattr(installed_code, "distributions", lambda: packages)
        installed_code.installed_packages.cache_clear()

    yield act
    installed_code.installed_packages.cache_clear()


def checkpoint(path, seed=0, settings=None):
    path.mkdir()
    rng = np.random.default_rng(seed)
    save_file({"a": rng.standard_normal(8).astype(np.float32)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(settings or {"model_type": "llama"}))
    return path


def native_code(monkeypatch, directory, where):
    """A library or a compiler that is found by the variable that ``where`` begins with, beside what
    it was."""
    where, _, program = where.partition(" ")
    if program == "nvcc":
        monkeypatch.delenv("CUDA_HOME", raising=False)  # it would come first
    file = directory / "bin" / (program or "libm.so")
    file.parent.mkdir()
    file.write_text("one")
    file.chmod(0o755)
    first = file if where == "LD_PRELOAD" else file.parent
    monkeypatch.setenv(where, os.pathsep.join([str(first), os.environ.get(where, "")]))
    return file


@pytest.fixture
def model(tmp_path):
    return checkpoint(tmp_path / "model")


@pytest.fixture
def storage(tmp_path):
    return f"file://{tmp_path}/store?quota=16MiB"


class Manager:
    """vLLM's scheduler and its tiering manager, for one tier."""

    def __init__(self, adapter, model, storage, **changes):
        config, kv_cache = configuration(model, storage, **changes)
        self.connector = adapter.StrataConnector(config, KVConnectorRole.SCHEDULER, kv_cache)
        (self.tier,) = self.connector.tiers
        self.rows = self.connector.rows
        self.jobs = 0

    def end(self):
        self.tier.shutdown()

    def lookup(self, keys, request="r"):
        """Every step asks for every page, as vLLM does, until none is RETRY."""
        context, answers = ReqContext(request), []

        def known():
            answers[:] = [self.tier.lookup(key, context) for key in keys]
            self.tier.on_schedule_end(())
            return LookupResult.RETRY not in answers

        wait_until(known, "an answer to every page")
        return [answer is LookupResult.HIT for answer in answers]

    def job(self, keys, rows, *, loading):
        self.jobs += 1
        job = TransferJob(self.jobs, keys, np.array(rows, np.int32), loading, ReqContext("r"))
        (self.tier.submit_load if loading else self.tier.submit_store)(job)
        results = []
        wait_until(lambda: results.extend(self.tier.get_finished_jobs()) or results, "a job's end")
        (result,) = results
        assert result.job_id == self.jobs
        return result

    def store(self, keys, rows):
        return self.job(keys, rows, loading=False)

    def load(self, keys, rows):
        return self.job(keys, rows, loading=True)


@pytest.fixture
def managers(monkeypatch):
    """Makes managers, and ends those that stand."""
    adapter, made = fake_vllm.install(monkeypatch), []

    def make(*given, **changes):
        made.append(Manager(adapter, *given, **changes))
        return made[-1]

    yield make
    for one in made:
        with suppress(StorageError, ValueError):
            one.end()


def fill(manager):
    """Store six pages, each of a byte of its own."""
    manager.rows[:6] = np.arange(1, 7, dtype=np.int8)[:, None]
    assert manager.store(KEYS, range(6)).success


def test_another_life_loads_what_the_first_has_stored(managers, model, storage):
    first = managers(model, storage)
    fill(first)
    first.end()
    second = managers(model, storage)
    assert second.lookup(KEYS) == [True] * 6
    result = second.load(KEYS, range(10, 16))
    assert (result.success, result.transfer_bytes) == (True, 6 * 64)
    assert result.successful_keys == tuple(KEYS)
    assert (second.rows[10:16] == np.arange(1, 7)[:, None]).all()


def test_two_engines_on_one_store_share_pages_and_write_each_once(managers, model, storage):
    first, second = managers(model, storage), managers(model, storage)
    fill(first)
    assert second.lookup(KEYS) == [True] * 6
    fill(second)
    assert second.tier.get_stats().counters["stratakv:kv_pages", "already_stored"] == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "torch.bfloat16"},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8"},
        {"rope": 500000.0},
        {"max_model_len": 4096},
        {"tp": 2},
        {"pp": 2},
        {"layout": "BLHNC"},
        {"blocks_per_chunk": 2},
        {"row_bytes": 128},
        {"specs": ("FullAttentionSpec(block_size=32)", "SlidingWindowSpec(sliding_window=32)")},
        {"specs": ("SlidingWindowSpec(sliding_window=64)", "FullAttentionSpec(block_size=32)")},
        {"device": "cuda"},
        {"mamba_cache_mode": "align"},
        {"hash": "sha256_cbor"},
        {"speculative": speculative()},
        {"more": {"AttentionConfig": {"indexer_kv_dtype": "fp8"}}},
        {"more": {"AttentionConfig": {"backend": "FLASHINFER"}}},
        {"more": {"ModelConfig": {"that_nobody_knows_yet": False}}},
        {"more": {"VllmConfig": {"another_config": record("AnotherConfig", way="fast")}}},
    ],
    ids="-".join,
)
def test_another_setting_never_hits(managers, model, storage, changes):
    fill(managers(model, storage))
    other = managers(model, storage, **changes)
    assert other.lookup(KEYS) == [False] * 6
    assert managers(model, storage).lookup(KEYS) == [True] * 6


VARIABLES = (
    "VLLM_USE_DEEP_GEMM", "VLLM_THAT_NOBODY_KNOWS_YET", "VLLM_MARLIN_INPUT_DTYPE",
    "NVIDIA_TF32_OVERRIDE", "DNNL_DEFAULT_FPMATH_MODE", "LD_LIBRARY_PATH",
    "VLLM_CPU_OMP_THREADS_BIND", "VLLM_NCCL_SO_PATH",
)  # fmt: skip


@pytest.mark.parametrize("variable", VARIABLES)
def test_another_variable_never_hits(managers, model, storage, monkeypatch, variable):
    fill(managers(model, storage))
    monkeypatch.setenv(variable, "1")
    assert managers(model, storage).lookup(KEYS) == [False] * 6


@pytest.mark.parametrize("where", ["LD_LIBRARY_PATH", "LD_PRELOAD", "PATH nvcc", "PATH g++"])
def test_native_code_exchanged_in_place_never_hits(
    managers, model, storage, monkeypatch, tmp_path, where
):
    file = native_code(monkeypatch, tmp_path, where)
    fill(managers(model, storage))
    assert managers(model, storage).lookup(KEYS) == [True] * 6
    file.write_text("two")
    assert managers(model, storage).lookup(KEYS) == [False] * 6


@pytest.mark.parametrize(
    "binding", [{"numa_bind": True}, {"numa_bind_nodes": [0]}, {"numa_bind_cpus": ["0-3"]}], ids=str
)
def test_cores_of_a_worker_count_where_they_compute_and_not_beside_a_gpu(
    managers, model, storage, binding
):
    """Sums are divided among them, and the tier's own process has others."""
    more = {"ParallelConfig": binding}
    fill(managers(model, storage))
    assert managers(model, storage, more=more).lookup(KEYS) == [False] * 6
    fill(managers(model, storage, device="cuda"))
    assert managers(model, storage, device="cuda", more=more).lookup(KEYS) == [True] * 6


def test_what_decides_nothing_hits(managers, model, storage, monkeypatch):
    fill(managers(model, storage))
    for variable in ("VLLM_PORT", "VLLM_LOGGING_LEVEL", "NCCL_DEBUG", "HOSTNAME"):
        monkeypatch.setenv(variable, "another")
    more = {
        "ParallelConfig": {"master_port": 30000},
        "CacheConfig": {"num_gpu_blocks": 99},
        "SchedulerConfig": {"max_num_seqs": 4},
        "VllmConfig": {"instance_id": "another"},
    }
    assert managers(model, storage, more=more).lookup(KEYS) == [True] * 6


def test_an_object_is_what_it_says_and_never_where_it_lies():
    """Else a restart would never hit; what says nothing but that costs hits."""
    plain = record("Other", path=Path("/x"), names={"b", "a"}, kind=KVConnectorRole.WORKER)
    fields = {"made_by": checkpoint, "given": [plain, (1, None)]}
    (first, second) = (setting_fields(fields, ()) for _ in range(2))
    assert first == second
    assert "0x" not in "".join(first.values())
    other = {"made_by": checkpoint, "given": [replace(plain, names={"b"}), (1, None)]}
    assert setting_fields(other, ())["given"] != first["given"]
    assert setting_fields({"api_key": "secret"}, ())["api_key"].find("secret") == -1


def test_another_release_of_vllm_never_hits(managers, model, storage, monkeypatch):
    fill(managers(model, storage))
    adapter = fake_vllm.install(monkeypatch, "0.33.0")
    other = Manager(adapter, model, storage)
    assert other.lookup(KEYS) == [False] * 6
    other.end()


def test_other_devices_never_hit(managers, model, storage, monkeypatch):
    fill(managers(model, storage))
    platform = vars(fake_vllm.NAMES["platforms"]["current_platform"])
    monkeypatch.setitem(platform, "get_device_name", ["A", "B"].__getitem__)
    assert managers(model, storage).lookup(KEYS) == [False] * 6
    fill(managers(model, storage, tp=2))
    monkeypatch.setitem(platform, "device_count", lambda: 2)
    assert managers(model, storage, tp=2).lookup(KEYS) == [False] * 6


def test_devices_are_those_that_a_replica_computes_on(managers, model, storage, monkeypatch):
    platform = vars(fake_vllm.NAMES["platforms"]["current_platform"])
    monkeypatch.setitem(platform, "get_device_name", "ABCD".__getitem__)
    monkeypatch.setitem(platform, "device_count", lambda: 4)

    def devices(**changes):
        manager = managers(model, storage, tp=2, **changes)
        return manager.connector.extra["stratakv_engine"]["devices"]

    assert devices() == ["A", "B"]
    assert devices(replica=1) == ["C", "D"]
    assert devices(replica=1, executor="ray") == ["A", "B"]  # Ray shows each its own


def test_another_build_of_a_package_never_hits(managers, model, storage, install):
    install(Package("torch", "2", "a"))
    fill(managers(model, storage))
    install(Package("torch", "2", "b"))
    assert managers(model, storage).lookup(KEYS) == [False] * 6
    install(Package("torch", "2", "a"), Package("uvicorn", "1", "a"))
    assert managers(model, storage).lookup(KEYS) == [True] * 6


@pytest.mark.parametrize("which", ["weights", "settings", "code", "images"])
def test_another_model_in_the_same_place_never_hits(managers, tmp_path, storage, which):
    model = checkpoint(tmp_path / "model")
    first = managers(model, storage)
    fill(first)
    first.end()
    match which:
        case "weights":
            (model / "model.safetensors").unlink()
            made = checkpoint(tmp_path / "other", seed=1)
            (made / "model.safetensors").rename(model / "model.safetensors")
        case "settings":
            (model / "config.json").write_text(json.dumps({"model_type": "llama", "x": 1}))
        case "code":
            (model / "modeling.py").write_text("gain = 2")
        case "images":
            (model / "preprocessor_config.json").write_text('{"image_mean": [0.4]}')
    assert managers(model, storage).lookup(KEYS) == [False] * 6


def test_the_same_model_elsewhere_hits(managers, tmp_path, model, storage):
    fill(managers(model, storage))
    assert managers(checkpoint(tmp_path / "copy"), storage).lookup(KEYS) == [True] * 6


def test_a_draft_model_is_a_part_of_the_model(managers, tmp_path, model, storage):
    def drafting(seed):
        draft = checkpoint(tmp_path / f"draft{seed}", seed)
        return speculative(record("ModelConfig", model=str(draft)))

    fill(managers(model, storage, speculative=drafting(1)))
    assert managers(model, storage, speculative=drafting(2)).lookup(KEYS) == [False] * 6


def test_after_vllm_has_reset_its_caches_nothing_stored_before_is_used(managers, model, storage):
    """It does so where weights were changed in place, which no file shows."""
    manager = managers(model, storage)
    fill(manager)
    assert manager.lookup(KEYS) == [True] * 6
    manager.tier.drain_jobs()
    assert manager.lookup(KEYS) == [False] * 6
    manager.tier.on_request_finished(ReqContext("r"))
    assert manager.lookup(KEYS) == [False] * 6
    fill(manager)
    assert manager.lookup(KEYS, "s") == [True] * 6
    manager.end()
    assert managers(model, storage).lookup(KEYS) == [True] * 6  # what it has stored before


def test_a_job_that_comes_back_in_part_names_what_did(managers, model, storage, tmp_path):
    manager = managers(model, storage)
    fill(manager)
    assert manager.lookup(KEYS) == [True] * 6
    for path in (tmp_path / "store").rglob("*.seg"):
        path.write_bytes(bytes(len(path.read_bytes())))
    result = manager.load(KEYS, range(10, 16))
    assert (result.success, result.successful_keys, result.transfer_bytes) == (False, (), 0)
    assert manager.lookup(KEYS) == [False] * 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": SimpleNamespace()}, "--enable-lora"),
        ({"load_format": "dummy"}, "--load-format dummy"),
        (
            {"speculative": speculative(draft_load_config=record("L", load_format="dummy"))},
            "--load-format dummy",
        ),
        ({"tokenizer": "org/name"}, "--tokenizer org/name: allowed is a directory"),
        (
            {"more": {"ModelConfig": {"hf_config_path": "org/name"}}},
            "--hf-config-path org/name: allowed is a directory",
        ),
        ({"hash": "xxhash"}, "--prefix-caching-hash-algo xxhash"),
        ({"extra": {"storage": "ftp://x"}}, "--storage ftp://x"),
        ({"extra": {"storage": None}}, "--kv-transfer-config storage None"),
        ({"extra": {"root": "/x"}}, "--kv-transfer-config root"),
        ({"extra": {"timeout_s": 0}}, "--kv-transfer-config timeout_s 0"),
        ({"extra": {"storage_key_file": 1}}, "--kv-transfer-config storage_key_file 1"),
        ({"extra": {"storage_key_file": "/nowhere"}}, "/nowhere"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_name_can_hold_is_refused_at_the_start(managers, model, storage, changes, words):
    with pytest.raises(ConfigError, match=words):
        managers(model, storage, **changes)


ELSEWHERE = {"auto_map": {"AutoModel": "org/repo--a.A"}}
"""Code that lies in no directory of ours."""


def test_code_that_lies_elsewhere_is_refused_at_the_start(managers, model, storage, tmp_path):
    """From wherever the engine takes a configuration (tests/unit/test_connect_remote_code.py)."""
    other, words = checkpoint(tmp_path / "other"), "auto_map AutoModel org/repo--a.A is code"
    ways = {
        f"--tokenizer {other}": {"tokenizer": str(other)},
        f"--hf-config-path {other}": {"more": {"ModelConfig": {"hf_config_path": str(other)}}},
    }
    for changes in ways.values():
        managers(model, storage, **changes)
    (other / "config.json").write_text(json.dumps(ELSEWHERE))
    text = {"hf_text_config": SimpleNamespace(to_dict=lambda: ELSEWHERE)}
    ways["MODEL .*: model_config.hf_text_config"] = {"more": {"ModelConfig": text}}
    for flag, changes in ways.items():
        with pytest.raises(ConfigError, match=f"^{flag}.*: {words}"):
            managers(model, storage, **changes)
    with pytest.raises(ConfigError, match=f"^MODEL {other}: config.json: {words}"):
        managers(other, storage)


def test_a_model_that_is_no_directory_is_refused(managers, storage, tmp_path):
    with pytest.raises(ConfigError, match=r"MODEL org/name: allowed is the directory"):
        managers("org/name", storage)


def test_a_tier_without_our_connector_is_refused(monkeypatch, model, storage):
    adapter = fake_vllm.install(monkeypatch)
    config, kv_cache = configuration(model, storage)
    with pytest.raises(ConfigError, match="StrataConnector"):
        fake_vllm.OffloadingConnector(config, KVConnectorRole.SCHEDULER, kv_cache)
    assert adapter.StrataTier.medium is fake_vllm.Medium.STORAGE


def test_a_worker_has_no_tier_and_reads_no_weights(monkeypatch, storage):
    adapter = fake_vllm.install(monkeypatch)
    config, kv_cache = configuration("nowhere", storage)
    assert adapter.StrataConnector(config, KVConnectorRole.WORKER, kv_cache).tiers == []
    assert adapter.SETTINGS not in config.kv_transfer_config.kv_connector_extra_config


def test_what_happened_is_counted_under_names_that_are_declared(managers, model, storage):
    manager = managers(model, storage)
    fill(manager)
    manager.lookup(KEYS)
    declared = type(manager.tier).build_metric_definitions({})
    counters = manager.tier.get_stats().counters
    assert counters == {
        ("stratakv:kv_pages", "stored"): 6,
        ("stratakv:kv_pages", "asked"): 6,
        ("stratakv:kv_pages", "present"): 6,
    }
    assert {name for name, *_ in counters} <= declared.keys()
    assert manager.tier.get_stats().counters == {}


def test_a_sealed_store_is_read_with_its_key_alone(managers, model, storage, tmp_path):
    keys = []
    for name in "ab":
        keys.append(tmp_path / name)
        keys[-1].write_text(name * 64)
        keys[-1].chmod(0o600)
    fill(managers(model, storage, extra={"storage_key_file": str(keys[0])}))
    sealed = managers(model, storage, extra={"storage_key_file": str(keys[0])})
    assert sealed.lookup(KEYS) == [True] * 6
    assert managers(model, storage).lookup(KEYS) == [False] * 6
    other = managers(model, storage, extra={"storage_key_file": str(keys[1])})
    assert other.lookup(KEYS) == [False] * 6

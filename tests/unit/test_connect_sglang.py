"""The back end as SGLang drives it, without SGLang: what comes back is what was stored, and what
another server must never hit."""

import json
from threading import Event

import pytest
import torch
from prometheus_client import generate_latest

from stratakv.core.errors import ConfigError
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.testing.storage_faults import Faults, FaultyBackend
from tests.fixtures import fake_sglang
from tests.fixtures.fake_sglang import (
    Pool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    States,
    arguments,
    storage_config,
)
from tests.unit.test_connect_vllm import ELSEWHERE, checkpoint, native_code

pytestmark = pytest.mark.usefixtures("no_toolkit")
KEYS = [f"{number:064x}" for number in range(6)]
TRAILING, ALL = PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES


@pytest.fixture
def model(tmp_path):
    return checkpoint(tmp_path / "model")


@pytest.fixture
def storage(tmp_path):
    return f"file://{tmp_path}/store?quota=16MiB"


@pytest.fixture
def servers(monkeypatch):
    """Makes back ends with a KV pool, and closes them."""
    made = []

    def make(model, storage, pool=None, release="0.5.23", config=None, **server):
        adapter = fake_sglang.install(monkeypatch, arguments(model, **server), release)
        backend = adapter.StrataStorage(storage_config(storage, **(config or {})), {})
        made.append(backend)
        backend.register_mem_pool_host(pool or Pool())
        return backend

    yield make
    for one in made:
        one.close()


class InOnePiece(Pool):
    """A page is a run of the pool's own memory, as latents' is."""

    def __init__(self):
        super().__init__()
        self.buffer = torch.zeros((16, 2, self.page_size, 6))

    def _page(self, index):
        return self.buffer[index // self.page_size]

    def set_from_flat_data_page(self, index, data_page):
        raise AssertionError("a page is copied to where it lies, once")


def fill(backend, pages=range(6)):
    """Store pages of the KV pool, each of other numbers."""
    backend.mem_pool_host.fill(*pages)
    keys = [KEYS[page] for page in pages]
    assert backend.batch_set_v1(keys, backend.mem_pool_host.indices(*pages)) == [True] * len(keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_life_loads_what_the_first_has_stored_and_nothing_beside_it(
    servers, model, storage, dtype
):
    first = servers(model, storage, Pool(dtype=dtype))
    fill(first)
    second = servers(model, storage, Pool(dtype=dtype))
    pool = second.mem_pool_host
    assert second.batch_exists([*KEYS, "f" * 64]) == 6
    assert second.batch_get_v1(KEYS[:3], pool.indices(9, 4, 12)) == [True] * 3
    for at, page in enumerate((9, 4, 12)):
        assert torch.equal(pool.page(page), first.mem_pool_host.page(at))
    assert not any(pool.page(page).any() for page in range(16) if page not in {9, 4, 12})


def test_large_pages_come_back_in_parts_and_the_head_of_a_chain_stays_longest(servers, model):
    page_bytes = 2 * 4 * 4 * (1 << 18)
    backend = servers(model, f"memory://?quota={3 * page_bytes}B", Pool(pages=7, width=1 << 18))
    pool = backend.mem_pool_host
    fill(backend, range(3))
    assert backend.batch_get_v1(KEYS[:3], pool.indices(5, 4, 6)) == [True] * 3
    for at, page in enumerate((5, 4, 6)):
        assert torch.equal(pool.page(page), pool.page(at))
    fill(backend, [3])
    assert backend.batch_exists(KEYS[:3]) == 2


def test_pages_that_are_written_in_parts_go_from_the_end_of_their_chain(servers, model):
    page_bytes = 2 * 4 * 4 * (1 << 18)
    backend = servers(model, f"memory://?quota={5 * page_bytes}B", Pool(pages=6, width=1 << 18))
    fill(backend, range(5))
    fill(backend, [5])
    assert backend.batch_exists(KEYS[:5]) == 4


def test_a_prefix_ends_at_the_first_gap(servers, model, storage):
    backend = servers(model, storage)
    fill(backend, [0, 1, 3])
    assert backend.batch_exists(KEYS) == 2
    assert backend.exists(KEYS[3])
    assert not backend.exists(KEYS[2])


def test_damage_is_a_miss_and_leaves_the_page_as_it_was(servers, model, storage, tmp_path):
    first = servers(model, storage)
    fill(first)
    first.close()
    for path in (tmp_path / "store").rglob("*.seg"):
        data = bytearray(path.read_bytes())
        for at in range(len(data) // 2, len(data)):
            data[at] ^= 1
        path.write_bytes(data)
    second = servers(model, storage)
    hits = second.batch_get_v1(KEYS, second.mem_pool_host.indices(*range(6)))
    assert not all(hits)
    for page, hit in enumerate(hits):
        expected = first.mem_pool_host.page(page) if hit else torch.zeros_like(Pool().page(0))
        assert torch.equal(second.mem_pool_host.page(page), expected)


@pytest.mark.parametrize(
    ("server", "config", "pool"),
    [
        ({"dtype": "bfloat16"}, {}, {}),
        ({"quantization": "fp8"}, {}, {}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, {}),
        ({"mamba_ssm_dtype": "float16"}, {}, {}),
        ({"fp8_gemm_runner_backend": "triton"}, {}, {}),
        ({"moe_runner_backend": "triton"}, {}, {}),
        ({"rl_on_policy_target": "fsdp"}, {}, {}),
        ({"cuda_graph_config": {"decode": {"backend": "breakable"}}}, {}, {}),
        ({"that_nobody_knows_yet": False}, {}, {}),
        ({"json_model_override_args": '{"rope_theta": 1}'}, {}, {}),
        ({"context_length": 99}, {}, {}),
        ({"device": "cuda"}, {}, {}),
        ({"attention_backend": "fa3"}, {}, {}),
        ({"speculative_algorithm": "EAGLE"}, {}, {}),
        ({}, {"tp_size": 2}, {}),
        ({}, {"tp_size": 2, "tp_rank": 1}, {}),
        ({}, {"pp_size": 2}, {}),
        ({}, {"pp_size": 2, "pp_rank": 1}, {}),
        ({}, {"attn_cp_size": 2, "attn_cp_rank": 1}, {}),
        ({}, {"is_mla_model": True}, {}),
        ({}, {"tp_lcm_size": 4, "should_split_heads": True}, {}),
        ({}, {}, {"layout": "page_first"}),
        ({}, {}, {"dtype": torch.int32}),
        ({}, {}, {"rows": 8, "width": 3}),
        ({}, {}, {"width": 8}),
    ],
    ids=str,
)
def test_another_setting_never_hits(servers, model, storage, server, config, pool):
    fill(servers(model, storage))
    assert servers(model, storage, Pool(**pool), config=config, **server).batch_exists(KEYS) == 0
    assert servers(model, storage).batch_exists(KEYS) == 6


def test_another_release_or_format_of_pages_never_hits(servers, model, storage):
    fill(servers(model, storage))
    assert servers(model, storage, release="0.5.24").batch_exists(KEYS) == 0
    tagged = Pool()
    tagged.storage_format_tag = "token-major"
    assert servers(model, storage, tagged).batch_exists(KEYS) == 0


def test_other_weights_in_the_same_place_never_hit(servers, tmp_path, model, storage):
    first = servers(model, storage)
    fill(first)
    other = checkpoint(tmp_path / "other", seed=1)
    (other / "model.safetensors").replace(model / "model.safetensors")
    assert servers(model, storage).batch_exists(KEYS) == 0
    assert servers(checkpoint(tmp_path / "copy"), storage).batch_exists(KEYS) == 6


class MLATokenToKVPoolHost(Pool):
    """Of latents, by the name that SGLang gives it."""


def test_ranks_have_pages_of_their_own_but_for_latents(servers, model, storage):
    for latents, kind, hits in (
        (False, Pool, 0),
        (True, MLATokenToKVPoolHost, 6),
        (True, Pool, 0),  # the heads of a draft model, say
    ):
        config = {"tp_size": 2, "is_mla_model": latents}
        fill(servers(model, storage, kind(), config=config))
        other = servers(model, storage, kind(), config={**config, "tp_rank": 1})
        assert other.batch_exists(KEYS) == hits


def test_states_belong_to_a_rank_beside_latents_too(servers, model, storage):
    config = {"tp_size": 2, "is_mla_model": True}
    backends = [servers(model, storage, config={**config, "tp_rank": rank}) for rank in range(2)]
    for backend in backends:
        backend.register_mem_host_pool_v2(States(), PoolName.MAMBA)
    pool = States()
    assert backends[0].batch_set_v2([PoolTransfer(PoolName.MAMBA, pool.indices(1), KEYS[:1])]) == {
        PoolName.MAMBA: [True]
    }
    states = [backend.batch_get_v2([PoolTransfer(PoolName.MAMBA, pool.indices(2), KEYS[:1])])
              for backend in backends]  # fmt: skip
    assert states == [{PoolName.MAMBA: [True]}, {PoolName.MAMBA: [False]}]


@pytest.mark.parametrize(
    "other",
    [
        {"temporal": torch.float16},
        {"conv": torch.float16},
        {"beside": [torch.float16]},
    ],
    ids=str,
)
def test_states_as_wide_of_another_dtype_never_hit(servers, model, storage, other):
    given = {"temporal": torch.bfloat16, "conv": torch.bfloat16, "beside": [torch.bfloat16]}

    def states(**changes):
        backend, pool = servers(model, storage), States(**(given | changes))
        backend.register_mem_host_pool_v2(pool, PoolName.MAMBA)
        return backend, PoolTransfer(PoolName.MAMBA, pool.indices(1), KEYS[:1])

    first, sent = states()
    assert first.batch_set_v2([sent]) == {PoolName.MAMBA: [True]}
    for changes, hit in ((other, False), ({}, True)):
        backend, asked = states(**changes)
        assert backend.batch_get_v2([asked]) == {PoolName.MAMBA: [hit]}


def test_states_without_a_dtype_are_not_stored(servers, model, storage):
    backend, pool = servers(model, storage), Pool(rows=1)
    backend.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    sent = PoolTransfer(PoolName.MAMBA, pool.indices(1), KEYS[:1])
    assert backend.batch_set_v2([sent]) == {PoolName.MAMBA: [False]}


VARIABLES = (
    "SGLANG_MAMBA_SSM_DTYPE", "SGLANG_MAMBA_CONV_DTYPE", "SGLANG_DSV4_COMPRESS_STATE_DTYPE",
    "SGLANG_FP8_IGNORED_LAYERS", "SGLANG_DSV4_UNIFIED_KV_FP8", "SGLANG_ROPE_CACHE_FP32",
    "SGLANG_CPU_QUANTIZATION", "SGLANG_THAT_NOBODY_KNOWS_YET", "USE_TRITON_W8A8_FP8_KERNEL",
    "FLASHINFER_NVFP4_4OVER6", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip


@pytest.mark.parametrize("variable", VARIABLES)
def test_another_variable_never_hits(servers, model, storage, monkeypatch, variable):
    """Whatever it is: SGLang has hundreds, and reads dtypes and kernels from them."""
    fill(servers(model, storage))
    for value, hits in (("bfloat16", 0), ("float16", 0)):
        monkeypatch.setenv(variable, value)
        assert servers(model, storage).batch_exists(KEYS) == hits
    monkeypatch.delenv(variable)
    assert servers(model, storage).batch_exists(KEYS) == 6


@pytest.mark.parametrize("where", ["LD_LIBRARY_PATH", "LD_PRELOAD", "PATH nvcc", "PATH g++"])
def test_native_code_exchanged_in_place_never_hits(
    servers, model, storage, monkeypatch, tmp_path, where
):
    file = native_code(monkeypatch, tmp_path, where)
    fill(servers(model, storage))
    assert servers(model, storage).batch_exists(KEYS) == 6
    file.write_text("two")
    assert servers(model, storage).batch_exists(KEYS) == 0


def test_another_device_never_hits(servers, model, storage, monkeypatch):
    fill(servers(model, storage))
    monkeypatch.setattr(fake_sglang, "DEVICE", "another")
    assert servers(model, storage).batch_exists(KEYS) == 0


@pytest.mark.parametrize(
    "variable",
    ["SGLANG_RUN_ID", "SGLANG_LOG_MS", "SGLANG_PORT", "FLASHINFER_WORKSPACE_BASE", "HOSTNAME"],
)
def test_a_variable_that_decides_nothing_hits(servers, model, storage, monkeypatch, variable):
    fill(servers(model, storage))
    monkeypatch.setenv(variable, "another")
    assert servers(model, storage).batch_exists(KEYS) == 6


@pytest.mark.parametrize(
    "server",
    [
        {"host": "0.0.0.0", "port": 30001},
        {"tokenizer_path": None},
        {"log_level": "debug"},
        {"random_seed": 8},
        {"mem_fraction_static": 0.8, "max_running_requests": 16},
        {"api_key": "another"},
        {"cuda_graph_config": {"decode": {"backend": "full", "bs": [1, 2, 4], "max_bs": 4}}},
        {"json_model_override_args": " {}"},
    ],
    ids=str,
)
def test_a_setting_that_decides_nothing_hits(servers, model, storage, server):
    fill(servers(model, storage))
    assert servers(model, storage, **server).batch_exists(KEYS) == 6


def test_a_file_that_a_setting_names_is_a_part_of_it(servers, model, storage, tmp_path):
    scales, table = tmp_path / "scales.json", tmp_path / "table"
    scales.write_text("{}")
    table.mkdir()
    server = {"quantization_param_path": str(scales), "of_a_newer_release": str(table)}
    fill(servers(model, storage, **server))
    assert servers(model, storage, **server).batch_exists(KEYS) == 6
    scales.write_text('{"kv": 2}')
    assert servers(model, storage, **server).batch_exists(KEYS) == 0
    scales.write_text("{}")
    (table / "x").write_text("x")
    assert servers(model, storage, **server).batch_exists(KEYS) == 0


def test_code_of_models_outside_of_the_checkpoint_is_a_part_of_the_model(
    servers, model, storage, tmp_path, monkeypatch
):
    package = tmp_path / "my_models"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "my_models")
    fill(servers(model, storage))
    assert servers(model, storage).batch_exists(KEYS) == 6
    (package / "llama.py").write_text("gain = 2")
    assert servers(model, storage).batch_exists(KEYS) == 0
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "stratakv_has_no_such_package")
    with pytest.raises(ConfigError, match="allowed is a package"):
        servers(model, storage)


def hybrid(servers, model, storage):
    backend = servers(model, storage)
    window = Pool(width=3)
    backend.register_mem_host_pool_v2(window, PoolName.SWA)
    fill(backend)
    return backend, window


def test_a_window_pool_says_where_a_prefix_can_go_on(servers, model, storage):
    backend, window = hybrid(servers, model, storage)
    window.fill(1, 2, 4)
    transfer = PoolTransfer(PoolName.SWA, window.indices(1, 2, 4), [KEYS[at] for at in (1, 2, 4)])
    assert backend.batch_set_v2([transfer]) == {PoolName.SWA: [True] * 3}

    def ends(trailing, policy=TRAILING):
        asked = PoolTransfer(PoolName.SWA, keys=KEYS[:trailing], hit_policy=policy)
        result = backend.batch_exists_v2(KEYS, [asked])
        return result.kv_hit_pages, result.restorable_prefix_pages, result.extra_pool_hit_pages

    assert ends(1) == (5, [2, 3, 5], {"swa": 5, "kv": 6})
    assert ends(2) == (3, [3], {"swa": 3, "kv": 6})
    assert ends(3) == (0, [], {"kv": 6})
    assert ends(1, ALL) == (0, [], {"kv": 6})
    assert ends(1, PoolHitPolicy.BLOCK_GROUPS) == (6, [1, 2, 3, 4, 5, 6], {"kv": 6})


def test_a_pool_that_nobody_registered_never_hits(servers, model, storage):
    backend, _ = hybrid(servers, model, storage)
    asked = PoolTransfer(PoolName.INDEXER, Pool().indices(0), KEYS[:1])
    assert backend.batch_exists_v2(KEYS, [asked]).kv_hit_pages == 0
    assert backend.batch_get_v2([asked]) == {PoolName.INDEXER: [False]}
    assert backend.batch_set_v2([asked]) == {PoolName.INDEXER: [False]}


def test_a_pool_without_flat_pages_is_not_stored(servers, model, storage):
    class Logical:
        page_size = 4

    backend = servers(model, storage, Logical())
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(KEYS[:1], torch.arange(4)) == [False]
    assert backend.batch_get(KEYS[:1], [torch.zeros(1)]) == [None]
    assert not backend.batch_set(KEYS[:1], [torch.zeros(1)])


def test_pages_that_lie_in_one_piece_are_read_and_written_in_place(servers, model, storage):
    first = servers(model, storage, InOnePiece())
    pool = first.mem_pool_host
    fill(first)
    sent = pool.buffer.clone()
    assert first.batch_get_v1(KEYS[:3], pool.indices(9, 4, 12)) == [True] * 3
    sent[[9, 4, 12]] = sent[:3].clone()
    assert torch.equal(pool.buffer, sent)


class Anchor(Pool):
    """DeepSeek-V4's: its pages have no bytes, and what counts lies in the pools beside it."""

    def _page(self, index):
        return torch.zeros(0)


def test_an_anchor_without_bytes_marks_what_was_stored(servers, model, storage):
    backend = servers(model, storage, Anchor())
    window = Pool(width=3)
    backend.register_mem_host_pool_v2(window, PoolName.SWA)
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(KEYS[:3], torch.arange(12)) == [True] * 3
    again = servers(model, storage, Anchor())
    assert again.batch_exists(KEYS) == 3
    assert again.batch_get_v1(KEYS[:4], torch.arange(16)) == [True] * 3 + [False]
    asked = PoolTransfer(PoolName.SWA, keys=KEYS[:1], hit_policy=TRAILING)
    assert backend.batch_exists_v2(KEYS, [asked]).kv_hit_pages == 0
    backend.batch_set_v2([PoolTransfer(PoolName.SWA, window.indices(0), KEYS[1:2])])
    assert backend.batch_exists_v2(KEYS, [asked]).restorable_prefix_pages == [2]


def test_an_anchor_without_bytes_is_marked_page_by_page_too(servers, model, storage):
    backend = servers(model, storage, Anchor())
    assert backend.batch_set(KEYS[:2], [torch.zeros(0)] * 2)
    assert backend.set(KEYS[2], torch.zeros(0))
    again = servers(model, storage, Anchor())
    targets = [torch.zeros(0) for _ in range(4)]
    assert again.batch_get(KEYS[:4], targets) == [*targets[:3], None]
    assert again.batch_get_v1(KEYS[:4], torch.arange(16)) == [True] * 3 + [False]
    assert backend.totals[PoolName.KV]["stored"] == 3


def test_indices_that_do_not_fit_are_refused(servers, model, storage):
    backend = servers(model, storage)
    fill(backend)
    assert backend.batch_get_v1(KEYS[:2], torch.arange(7)) == [False, False]
    assert backend.batch_set_v1(KEYS[:2], torch.arange(9)) == [False, False]


def test_calls_of_single_pages_work_as_well(servers, model, storage):
    backend = servers(model, storage)
    pool = backend.mem_pool_host
    pool.fill(0, 1)
    assert backend.set(KEYS[0], pool.get_data_page(0))
    assert backend.batch_set(KEYS[1:2], [pool.get_data_page(4)])
    first, missing = backend.batch_get(
        [KEYS[0], KEYS[3]], [pool.get_dummy_flat_data_page() for _ in range(2)]
    )
    assert torch.equal(first, pool.get_data_page(0))
    assert missing is None
    assert backend.get(KEYS[5], pool.get_dummy_flat_data_page()) is None


def test_a_store_that_is_down_or_full_costs_hits_and_nothing_else(
    servers, model, monkeypatch, quiet
):
    faulty = []

    def opened(_, form):
        faulty.append(FaultyBackend(MemoryBackend(form, 3 * sum(form.page_bytes)), Faults()))
        return faulty[-1]

    monkeypatch.setattr("stratakv.storage.ends.open_storage", opened)
    backend = servers(model, "memory://")
    pool = backend.mem_pool_host
    pool.fill(*range(6))
    assert backend.batch_set_v1(KEYS, pool.indices(*range(6))) == [True] * 3 + [False] * 3
    assert backend.batch_exists(KEYS) == 3
    faulty[0].change(Faults(call_fails=1.0))
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS[:2], pool.indices(0, 1)) == [False, False]
    assert backend.batch_set_v1(KEYS[3:4], pool.indices(3)) == [False]
    faulty[0].change(Faults())


def hanging(monkeypatch):
    """Stores open one memory. The backends, and what lets those that hang go on."""
    go_on, memories, faulty = Event(), {}, []

    def opened(_, form):
        memory = memories.setdefault(form, MemoryBackend(form))
        faulty.append(FaultyBackend(memory, Faults(), lambda _: go_on.wait(PATIENCE_S)))
        return faulty[-1]

    monkeypatch.setattr("stratakv.storage.ends.open_storage", opened)
    return faulty, go_on


SOON = {"extra": {"timeout_s": 0.05}}


@pytest.mark.parametrize("kind", [Pool, InOnePiece])
def test_a_read_that_hangs_is_a_miss_in_time_and_writes_into_no_page(
    servers, model, monkeypatch, quiet, kind
):
    faulty, go_on = hanging(monkeypatch)
    fill(servers(model, "memory://", kind()))
    backend = servers(model, "memory://", kind(), config=SOON)
    pool = backend.mem_pool_host
    faulty[-1].change(Faults(call_hangs=1.0))
    assert backend.batch_get_v1(KEYS[:3], pool.indices(9, 4, 12)) == [False] * 3
    assert backend.batch_exists(KEYS) == 0  # at once: nobody waits for a store that hangs
    assert backend.batch_get(KEYS[:1], [pool.get_dummy_flat_data_page()]) == [None]
    assert backend.totals["kv"]["late"] == 10
    pool.buffer.fill_(7)  # SGLang has used the pages for something else
    faulty[-1].change(Faults())
    go_on.set()
    wait_until(lambda: backend.batch_exists(KEYS) == 6, "the store's return")
    assert (pool.buffer == 7).all()
    asked = KEYS[:3], pool.indices(9, 4, 12)
    wait_until(lambda: backend.batch_get_v1(*asked) == [True] * 3, "a page in time")


@pytest.mark.parametrize("kind", [Pool, InOnePiece])
def test_a_write_that_hangs_is_given_up_in_time_and_writes_what_it_was_given(
    servers, model, monkeypatch, quiet, kind
):
    faulty, go_on = hanging(monkeypatch)
    backend = servers(model, "memory://", kind(), config=SOON)
    pool = backend.mem_pool_host
    pool.fill(0)
    written = pool.page(0).clone()
    faulty[-1].change(Faults(call_hangs=1.0))
    assert backend.batch_set_v1(KEYS[:1], pool.indices(0)) == [False]
    assert backend.totals["kv"] == {"unwritten": 1}
    pool.buffer.fill_(7)
    faulty[-1].change(Faults())
    go_on.set()
    wait_until(lambda: backend.batch_exists(KEYS[:1]) == 1, "the store's return")
    asked = KEYS[:1], pool.indices(3)
    wait_until(lambda: backend.batch_get_v1(*asked) == [True], "a page in time")
    assert torch.equal(pool.page(3), written)


@pytest.mark.parametrize("kind", [Pool, InOnePiece])
def test_what_was_given_up_before_it_was_copied_is_never_stored(
    servers, model, monkeypatch, quiet, kind
):
    """A use that nobody waits for hangs; what SGLang has in these pages by then is another's."""
    faulty, go_on = hanging(monkeypatch)
    fill(servers(model, "memory://", kind()), range(3))
    backend = servers(model, "memory://", kind(), config=SOON)
    monkeypatch.setattr(faulty[-1], "touch", lambda _: go_on.wait(PATIENCE_S))
    pool = backend.mem_pool_host
    asked = KEYS[:1], pool.indices(9)
    wait_until(lambda: backend.batch_get_v1(*asked) == [True], "a page in time")
    assert backend.batch_set_v1(KEYS[5:], pool.indices(5)) == [False]
    pool.buffer.fill_(7)
    go_on.set()
    wait_until(lambda: backend.batch_exists(KEYS[:3]) == 3, "the store's return")
    assert backend.batch_exists(KEYS[5:]) == 0


def test_an_end_over_a_store_that_hangs_comes_in_time_and_closes_it_when_it_is_back(
    servers, model, monkeypatch, quiet
):
    faulty, go_on = hanging(monkeypatch)
    backend, closed = servers(model, "memory://", config=SOON), []
    monkeypatch.setattr(faulty[-1], "close", lambda: closed.append(True))
    faulty[-1].change(Faults(call_hangs=1.0))
    assert backend.batch_exists(KEYS) == 0
    backend.close()
    assert closed == []
    go_on.set()
    wait_until(lambda: closed, "the store's end")


def test_clearing_forgets_every_page(servers, model, storage):
    backend = servers(model, storage)
    fill(backend)
    assert backend.clear()
    assert servers(model, storage).batch_exists(KEYS) == 0


@pytest.mark.parametrize(
    ("server", "extra", "words"),
    [
        ({"enable_lora": True}, {}, "--enable-lora"),
        ({"lora_paths": ["x"]}, {}, "--enable-lora"),
        ({"load_format": "dummy"}, {}, "--load-format dummy"),
        ({"speculative_draft_load_format": "dummy"}, {}, "--speculative-draft-load-format dummy"),
        ({"model_path": "org/name"}, {}, "MODEL org/name"),
        ({"tokenizer_path": "org/name"}, {}, "--tokenizer-path org/name: allowed is a directory"),
        ({}, {"storage": "ftp://x"}, "--storage ftp://x"),
        ({}, {"storage": None}, "--hicache-storage-backend-extra-config storage None"),
        (
            {},
            {"storage_keyfile": "/x"},
            "storage_keyfile: allowed are storage, storage_key_file, timeout_s, backend_name, ",
        ),
        ({}, {"timeout_s": 0}, "timeout_s 0: allowed is a number above 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_name_can_hold_is_refused_at_the_start(
    servers, model, storage, server, extra, words
):
    path = server.pop("model_path", model)
    with pytest.raises(ConfigError, match=words):
        servers(path, storage, config={"extra": extra}, **server)


def test_code_that_lies_elsewhere_is_refused_at_the_start(servers, model, storage, tmp_path):
    """From wherever the engine takes a configuration (tests/unit/test_connect_remote_code.py)."""
    other, words = checkpoint(tmp_path / "other"), "auto_map AutoModel org/repo--a.A is code"
    servers(model, storage, tokenizer_path=str(other))
    (other / "config.json").write_text(json.dumps(ELSEWHERE))
    with pytest.raises(ConfigError, match=f"^--tokenizer-path {other}: config.json: {words}"):
        servers(model, storage, tokenizer_path=str(other))
    with pytest.raises(ConfigError, match=f"^--json-model-override-args: {words}"):
        servers(model, storage, json_model_override_args=json.dumps(ELSEWHERE))
    for changes in ({}, {"speculative_draft_model_path": str(other)}):
        with pytest.raises(ConfigError, match=f"^MODEL {other}: config.json: {words}"):
            servers(model if changes else other, storage, **changes)


def exposed():
    """Lines of our metrics, as SGLang's ``/metrics`` has them."""
    lines = generate_latest().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line.startswith("stratakv:"))


def test_pages_are_counted_among_the_metrics_of_sglang(servers, model, monkeypatch, quiet):
    faulty, go_on = hanging(monkeypatch)
    given = {"enable_storage_metrics": True, "tp_rank": 3}
    backend = servers(model, "memory://", config=given)
    stored = 'stratakv:kv_pages_total{dp_rank="0",event="stored",pool="kv",pp_rank="0",tp_rank="3"}'
    off = 'stratakv:store_off{dp_rank="0",pp_rank="0",tp_rank="3"}'
    before = float(exposed().get(stored, 0))
    fill(backend)
    for _ in range(2):
        assert backend.get_stats() is None
        assert float(exposed()[stored]) == before + 6
    assert exposed()[off] == "0.0"
    faulty[-1].change(Faults(call_fails=1.0))
    assert backend.batch_exists(KEYS) == 0
    backend.get_stats()
    assert exposed()[off] == "1.0"
    again = servers(model, "memory://", config=given)  # detached and attached: made once
    fill(again, [0])
    again.close()  # what SGLang has not asked for by then
    assert float(exposed()[stored.replace('"stored"', '"already_stored"')]) >= 1
    go_on.set()


def test_without_metrics_of_sglang_none_are_made(servers, model, storage):
    backend = servers(model, storage)
    fill(backend)
    before = exposed()
    assert backend.get_stats() is None
    assert exposed() == before

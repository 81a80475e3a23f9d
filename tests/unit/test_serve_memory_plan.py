"""A plan's figures are the bytes that a server would take, to the last one, whatever this machine
has; and it comes without weights, also for what cannot be served."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch

from stratakv.assembly import sizing
from stratakv.assembly.models import build_engine
from stratakv.assembly.weights import weights_bytes
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model import wrap
from stratakv.engine.huggingface.model_facts import read_facts, read_planned
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.serve import memory_plan as serve_plan
from stratakv.serve.memory_plan import BytePlan, plan_bytes
from tests.fixtures.models import model_to_give_away, tiny_model
from tests.fixtures.tiny_configs import tiny_config

FAMILIES = ("llama", "gemma3", "qwen3_next", "deepseek_v3", "deepseek_v32", "deepseek_v4")
BLOCKS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """A plan is for another machine: it must not ask what is free on this one."""

    def asked() -> int:
        raise AssertionError("this machine's memory was asked for")

    monkeypatch.setattr(sizing, "free_host_bytes", asked)


def directory(path: Path, family: str, **fields: object) -> Path:
    """A model directory without weights."""
    tiny_config(family, **fields).save_pretrained(path)
    return path


def plan(path: Path, family: str, **settings: object) -> BytePlan:
    settings = {"device_memory": "8MiB", "max_running": 4, **settings}
    return plan_bytes(directory(path, family), EngineConfig(**settings))


@pytest.mark.parametrize("page_tokens", [None, 48])
@pytest.mark.parametrize("family", FAMILIES)
def test_figures_are_the_bytes_that_the_pools_allocate(tmp_path, family, page_tokens):
    found = plan(tmp_path, family, page_tokens=page_tokens, host_ratio=1.5)
    spec, sizes, figures = found.sizes.spec, found.sizes, found.figures()
    assert figures["page_tokens"] == spec.page_tokens == (page_tokens or 64)
    pools = DevicePools(spec, sizes.device)
    arenas = [HostArena(g, n) for g, n in zip(spec.groups, sizes.host, strict=True)]
    device_bytes = 0
    for group, row, arena in zip(spec.groups, figures["groups"], arenas, strict=True):
        names = [buffer["name"] for buffer in row["buffers"]]
        assert names == [buffer.name for buffer in group.buffers]
        for buffer in row["buffers"]:
            raw = pools.raw(group.id, buffer["name"])
            assert tuple(raw.shape) == (
                buffer["layers"], row["device_pages"], buffer["rows_per_page"], buffer["row_bytes"],
            )  # fmt: skip
            assert buffer["device_bytes"] == raw.nbytes
            device_bytes += buffer["device_bytes"]
        assert row["host_bytes"] == arena.bytes.nbytes
        assert row["host_bytes"] == row["host_pages"] * arena.layout.stride_bytes
        assert row["padding_bytes"] == arena.layout.stride_bytes - arena.layout.page_bytes
        assert row["page_bytes"] == arena.layout.page_bytes
        assert sum(buffer["page_bytes"] for buffer in row["buffers"]) == row["page_bytes"]
    assert figures["device_bytes"] == device_bytes == pools.size_bytes
    assert figures["host_bytes"] == sum(arena.size_bytes for arena in arenas)
    slack = sum(group.page_bytes for group in spec.groups)
    assert 0 <= figures["device_budget_bytes"] - device_bytes < slack
    assert json.loads(json.dumps(figures)) == json.loads(json.dumps(found.figures()))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "deepseek_v32", "deepseek_v4"])
def test_the_servers_own_table_is_the_plans(tmp_path, monkeypatch, family):
    settings = {"device_memory": "2MiB", "max_running": 4, "host_ratio": 1.5}
    model = tiny_model(family)
    model.config.save_pretrained(tmp_path)
    planned = plan_bytes(tmp_path, EngineConfig(**settings, dtype="float32"))
    monkeypatch.setattr(sizing, "free_host_bytes", lambda: 1 << 40)
    parts = build_engine(wrap(copy.deepcopy(model)), EngineConfig(**settings))
    try:
        assert parts.table == planned.table
        assert parts.max_model_len == planned.sizes.max_model_len
        assert parts.table.render() in planned.render()
        assert parts.pools.size_bytes == planned.table.device_bytes
    finally:
        parts.close()


def test_a_machine_with_any_memory_can_be_planned_for(tmp_path):
    found = plan(tmp_path, "gemma3", device_memory="20TiB", host_memory="40TiB")
    assert 19 << 40 < found.table.device_bytes <= 20 << 40
    assert 39 << 40 < found.table.host_bytes <= 40 << 40


def test_no_tier_has_more_pages_than_there_are_ids(tmp_path):
    found = plan(tmp_path, "gemma3", device_memory="1000TiB")
    assert max(*found.sizes.device, *found.sizes.host) == 2**31 - 1


def test_without_a_flag_the_host_has_two_pages_per_device_page_and_it_is_reported(tmp_path):
    found = plan(tmp_path, "gemma3", device_memory="20TiB")
    assert tuple(found.sizes.host) == tuple(2 * n for n in found.sizes.device)
    assert "host: 2.0 pages per device page" in found.render()
    for settings in ({"host_ratio": 2.0}, {"host_memory": "1MiB"}, {"cache": "device"}):
        assert "\nhost: " not in plan(tmp_path, "gemma3", **settings).render()


def test_without_a_host_tier_there_are_no_host_bytes(tmp_path):
    assert plan(tmp_path, "gemma3", cache="device").table.host_bytes == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_what_can_be_served_is_planned_without_a_word(tmp_path, family):
    found = plan(tmp_path, family)
    assert found.not_yet is None
    assert "cannot be served" not in found.render()
    assert found.figures()["cannot_be_served_yet"] is None


def test_what_the_engine_does_not_run_is_reported_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_plan, "refusal", lambda _: "buffers x are not run")
    found = plan(tmp_path, "llama")
    assert "cannot be served yet: buffers x are not run" in found.render().splitlines()
    assert found.figures()["cannot_be_served_yet"] == "buffers x are not run"


def test_what_surrounds_the_text_part_is_a_reason_too(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3n", "text_config": tiny_config("gemma3n").to_dict()})
    )
    found = plan_bytes(tmp_path, EngineConfig(device_memory="8MiB", max_running=4))
    assert "cannot be served yet: model type 'gemma3n' cannot be served as a whole" in (
        found.render()
    )
    assert found.table.device_bytes > 0


def test_deepseek_v4_has_pages_of_128_unless_somebody_says(tmp_path, monkeypatch):
    directory(tmp_path, "deepseek_v4", compress_rates=BLOCKS)
    given = {"device_memory": "64MiB", "max_running": 4}
    assert plan_bytes(tmp_path, EngineConfig(**given)).table.page_tokens == 128
    for page_tokens in (128, 256):
        config = EngineConfig(**given, page_tokens=page_tokens)
        assert plan_bytes(tmp_path, config).table.page_tokens == page_tokens
    for page_tokens in (64, 4, 192):
        with pytest.raises(ConfigError, match=f"--page-tokens {page_tokens}: .*multiples of 128"):
            plan_bytes(tmp_path, EngineConfig(**given, page_tokens=page_tokens))
    # A server has the same default.
    monkeypatch.setattr(sizing, "free_host_bytes", lambda: 1 << 40)
    facts, _ = read_planned(tmp_path)
    assert sizing.size(facts, EngineConfig(**given), device_free=None).spec.page_tokens == 128
    with pytest.raises(ConfigError, match="--page-tokens 64"):
        sizing.size(facts, EngineConfig(**given, page_tokens=64), device_free=None)


@pytest.mark.parametrize(
    ("family", "device_memory", "group"),
    [("qwen3_next", "1MiB", "state"), ("deepseek_v4", "1MiB", "open")],
)
def test_fewer_requests_than_asked_for_are_announced(tmp_path, family, device_memory, group):
    settings = {"max_running": 48, "device_memory": device_memory}
    found = plan(tmp_path, family, **settings)
    (line,) = [line for line in found.render().splitlines() if line.startswith("--max-running")]
    line = re.fullmatch(
        rf"--max-running 48: at most (\d+) requests run at once, since group '{group}' has (\d+) "
        r"pages on the device and each request takes ([12]); --device-memory (\d+) \(.*\) is "
        "enough for 48",
        line,
    )
    assert line is not None, line
    running, pages, live, enough = map(int, line.groups())
    assert running == pages // live < 48
    (row,) = [row for row in found.table.groups if row.name == group]
    assert row.device_pages == pages
    assert plan(tmp_path, family, **settings | {"device_memory": f"{enough}"}).sizes.notice is None


def test_a_server_announces_it_in_its_log(monkeypatch, caplog):
    monkeypatch.setattr(sizing, "free_host_bytes", lambda: 1 << 40)
    config = EngineConfig(device_memory="1MiB", max_running=48, host_ratio=1.0)
    build_engine(wrap(model_to_give_away("qwen3_next")), config).close()
    assert [line for line in caplog.messages if line.startswith("--max-running 48: at most ")]


def test_the_host_has_no_more_scratch_than_the_device(tmp_path):
    for settings in ({"host_ratio": 5.0}, {"host_memory": "100MiB"}, {}):
        found = plan(tmp_path, "deepseek_v4", **settings)
        anchor, window, live = found.table.groups
        assert live.host_pages == live.device_pages == 4
        assert anchor.host_pages / anchor.device_pages >= 2
        assert window.host_pages / window.device_pages >= 2


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4"])
def test_rows_in_fp8_are_planned_and_described(tmp_path, family):
    directory(tmp_path, family)
    config = EngineConfig(device_memory="8MiB", max_running=4)
    plain, packed = (plan_bytes(tmp_path, config, rows) for rows in ("plain", "fp8"))
    assert "cannot be served yet: " in packed.render()
    assert packed.sizes.device[0] > plain.sizes.device[0]
    latent = packed.figures()["row_formats"]["latent"]
    assert latent["row_bytes"] == sum(field["bytes"] for field in latent["fields"])
    (line,) = [line for line in packed.render().splitlines() if line.startswith("latent: rows of")]
    assert line.endswith(f": {latent['row_bytes']} bytes")
    (row,) = [b for g in packed.table.groups for b in g.buffers if b.name == "latent"]
    assert (row.row_bytes, row.dtype) == (latent["row_bytes"], "uint8")
    pools = DevicePools(packed.sizes.spec, packed.sizes.device)
    assert pools.size_bytes == packed.table.device_bytes
    assert plain.figures()["row_formats"] == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"device_memory": "1KiB"},
            "--device-memory 1KiB: too little for one request of 512 tokens",
        ),
        ({"device_memory": "much"}, "--device-memory much: allowed is"),
        ({"host_memory": "1"}, "--host-memory 1 B: too little for one page of group"),
        ({"host_memory": "1MiB", "host_ratio": 2.0}, "--host-memory 1MiB and --host-ratio 2 both"),
        ({"max_model_len": 5000}, "--max-model-len 5000: the model's positions end at 4096"),
        ({"max_model_len": 4096, "device_memory": "1MiB"}, "--max-model-len 4096: --device-memory"),
        ({"dtype": "int4"}, "--dtype int4: allowed are float32"),
        ({"snapshot_tokens": 100}, "--snapshot-tokens 100: .* of --page-tokens 64"),
    ],
)
def test_flags_that_the_model_rules_out_are_named(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, "gemma3", **settings)


def test_a_model_that_nobody_knows_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="keeps its states in the modules"):
        plan(tmp_path, "recurrent_gemma")


@pytest.mark.parametrize(("stored", "loaded"), [("float32", "float32"), ("float32", "bfloat16")])
def test_weights_are_counted_as_they_will_be_in_memory_and_leave_less_for_the_host(
    tmp_path, monkeypatch, stored, loaded
):
    model = copy.deepcopy(tiny_model("llama")).to(getattr(torch, stored))
    model.save_pretrained(tmp_path)
    counted = weights_bytes(tmp_path, loaded)
    width = getattr(torch, loaded).itemsize
    held = {weight.data_ptr(): weight.numel() for weight in model.parameters()}
    assert counted == width * sum(held.values())
    facts = read_facts(tmp_path, loaded)
    monkeypatch.setattr(sizing, "free_host_bytes", lambda: counted + (1 << 22))
    config = EngineConfig(device_memory="2MiB", max_running=2, max_model_len=64)
    less = sizing.size(facts, config, device_free=None, weights=counted)
    assert less.host[0] < sizing.size(facts, config, device_free=None).host[0]
    with pytest.raises(ConfigError, match="are free"):
        sizing.size(facts, config, device_free=None, weights=counted + (1 << 22))


@pytest.fixture
def host_memory(monkeypatch):
    monkeypatch.setattr(sizing, "free_host_bytes", lambda: 4 << 20)


def on_a_gpu(tmp_path, free, weights=0, **settings):
    tiny_model("llama").save_pretrained(tmp_path)
    facts = read_facts(tmp_path, "float32")
    config = EngineConfig(device="cuda", max_running=2, max_model_len=64, **settings)
    return sizing.size(facts, config, device_free=free, weights=weights)


def test_a_share_of_a_gpu_is_of_what_the_model_leaves(tmp_path, host_memory):
    half = on_a_gpu(tmp_path, 12 << 20, weights=4 << 20, device_memory="0.5")
    same = on_a_gpu(tmp_path, 99 << 20, device_memory="4MiB")
    assert half.device == same.device
    assert on_a_gpu(tmp_path, 12 << 20, device_memory="0.5").device[0] > half.device[0]


def test_a_gpu_takes_no_host_memory(tmp_path, host_memory):
    sizes = on_a_gpu(tmp_path, 99 << 20, weights=50 << 20, device_memory="40MiB")
    assert sizes.host[0] > 0


@pytest.mark.parametrize(
    ("free", "weights", "memory", "message"),
    [
        (
            12 << 20,
            4 << 20,
            "40MiB",
            r"40MiB: the tier takes .* MiB, and 8 MiB are free on the dev",
        ),
        (6 << 20, 4 << 20, "0.001", r"0\.001 of 2 MiB: too little for one request .* is \d+ bytes"),
    ],
)
def test_what_does_not_fit_a_gpu_is_refused_with_figures(
    tmp_path, host_memory, free, weights, memory, message
):
    with pytest.raises(ConfigError, match=f"^--device-memory {message}"):
        on_a_gpu(tmp_path, free, weights, device_memory=memory)


def test_a_model_that_does_not_fit_a_gpu_is_refused(tmp_path, host_memory):
    message = "^--device cuda: the weights take 8 MiB and 6 MiB are free on the device; allowed is"
    with pytest.raises(ConfigError, match=message):
        on_a_gpu(tmp_path, 6 << 20, 8 << 20)


def test_a_plan_for_a_gpu_takes_bytes_and_no_share(tmp_path):
    found = plan(tmp_path, "gemma3", device="cuda", device_memory="80GiB")
    assert found.device_budget_bytes == 80 << 30
    with pytest.raises(ConfigError, match=r"^--device-memory 0\.85: a plan .* allowed are bytes"):
        plan(tmp_path, "gemma3", device="cuda", device_memory=None)

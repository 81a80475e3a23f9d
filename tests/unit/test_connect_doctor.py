"""What ``stratakv doctor`` reports, and that its command line is what the tier takes."""

import json
import shlex
import sys

import pytest

from stratakv.cli import main
from stratakv.connect.doctor import EngineSetup, command_line, examine
from stratakv.connect.engines import ENGINES
from stratakv.storage.memory import MemoryBackend
from tests.fixtures import fake_sglang, fake_vllm
from tests.unit.test_connect_vllm import checkpoint


@pytest.fixture
def model(tmp_path):
    return checkpoint(tmp_path / "a model")


@pytest.fixture
def storage(tmp_path):
    return f"file://{tmp_path}/store?quota=16MiB"


def released(monkeypatch, number):
    """vLLM's package is installed, and its modules are the stand-ins."""
    fake_vllm.install(monkeypatch)
    monkeypatch.setattr("stratakv.connect.doctor.version", lambda _: number)


def verdicts(model, storage, key_file=None, *, engine="vllm", flags=()):
    setup = EngineSetup(
        engine=engine, model=str(model), storage=storage, storage_key_file=key_file,
        host_bytes=1, flags=flags,
    )  # fmt: skip
    return {check.what: (check.verdict, check.text) for check in examine(setup)}


def test_all_is_fine_and_the_store_is_as_it_was(monkeypatch, model, storage, tmp_path, capsys):
    released(monkeypatch, "0.32.0+cpu")
    line = ["doctor", "vllm", str(model), "--storage", storage, "--host-memory", "1GiB"]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert [part.split()[0] for part in shown.splitlines()[:5]] == ["fine"] * 5
    assert main(["fsck", str(tmp_path / "store")]) == 0
    assert "0 sound pages" in capsys.readouterr().out


def test_an_untested_release_is_named_and_does_not_fail(monkeypatch, model, storage, capsys):
    released(monkeypatch, "0.99.0")
    assert main(["doctor", "vllm", str(model), "--storage", storage]) == 0
    shown = capsys.readouterr().out
    assert "untested release: vllm 0.99.0; tested is 0.32.0" in shown
    assert "-> pip install vllm==0.33.0" in shown


def test_without_the_engine_everything_else_is_still_looked_at(model, storage, capsys):
    assert main(["doctor", "vllm", str(model), "--storage", storage]) == 1
    shown = capsys.readouterr().out
    assert "bad      release: not installed beside this Python" in shown
    assert "-> pip install stratakv into the environment of the engine" in shown
    assert "bad      interface: stratakv.connect.vllm: ModuleNotFoundError" in shown
    assert "fine     model: 1 files of weights" in shown
    assert "fine     store" in shown


def test_an_engine_that_has_changed_its_interface_is_seen(monkeypatch, model, storage):
    released(monkeypatch, "0.32.0")
    monkeypatch.delitem(sys.modules, fake_vllm.ADAPTER)
    monkeypatch.delattr(sys.modules["vllm.v1.kv_offload.base"], "LookupResult")
    verdict, text = verdicts(model, storage)["interface"]
    assert verdict == "bad"
    assert "LookupResult" in text


def test_an_engine_whose_method_is_given_something_else_is_seen(monkeypatch, model, storage):
    released(monkeypatch, "0.32.0")
    changed = lambda self, block, context: None  # noqa: E731 - a method as a newer vLLM has it
    monkeypatch.setattr(fake_vllm.SecondaryTierManager, "lookup", changed, raising=False)
    verdict, text = verdicts(model, storage)["interface"]
    assert (verdict, text) == ("bad", "StrataTier.lookup is given (block, context)")


@pytest.mark.parametrize(
    ("flags", "verdict", "words"),
    [
        ("--max-model-len 4096", "fine", "vllm takes them"),
        ("--max-model-len x", "bad", "argument --max-model-len: invalid int value: 'x'"),
        ("--enable-lora", "bad", "--enable-lora: vLLM names an adapter's pages"),
        ("--load-format dummy", "bad", "--load-format dummy: allowed are"),
        ("--prefix-caching-hash-algo xxhash", "bad", "--prefix-caching-hash-algo xxhash"),
        ("--no-enable-prefix-caching", "bad", "allowed is prefix caching"),
        ("--port 1", "fine", "vllm takes them"),
        ("--max-model-lenn=4", "bad", "no flag of vllm (did you mean --max-model-len?)"),
        ("--xyz 1 --port 1", "bad", "--xyz: no flag of vllm"),
        ("1", "bad", "1: no flag of vllm takes it"),
    ],
)
def test_flags_are_read_by_the_engines_own_parser_and_stand_in_the_command(
    monkeypatch, model, storage, flags, verdict, words
):
    released(monkeypatch, "0.32.0")
    setup = EngineSetup(
        engine="vllm", model=str(model), storage=storage, storage_key_file=None, host_bytes=1,
        flags=tuple(flags.split()),
    )  # fmt: skip
    found = {check.what: check for check in examine(setup)}["flags"]
    assert found.verdict == verdict
    assert words in found.text
    assert ("vllm serve --help" in found.advice) == (verdict != "fine")
    assert command_line(setup).endswith(flags)


def test_flags_of_sglang_are_read_by_its_parser_too(monkeypatch, model, storage, capsys):
    fake_sglang.install(monkeypatch, fake_sglang.arguments(model))
    monkeypatch.setattr("stratakv.connect.doctor.version", lambda _: "0.5.23")
    line = ["doctor", "sglang", str(model), "--storage", storage]
    assert main([*line, "--engine-flags=--load-format safetensors"]) == 0
    shown = capsys.readouterr().out
    assert "fine     flags: sglang takes them" in shown
    assert shown.splitlines()[-1].endswith("--load-format safetensors")
    assert main([*line, "--engine-flags=--enable-lora"]) == 1
    assert "bad      flags: --enable-lora: SGLang" in capsys.readouterr().out
    assert main([*line, "--engine-flags=--hicache-sise 1 --lod-format=auto"]) == 1
    shown = capsys.readouterr().out
    assert (
        "bad      flags: --hicache-sise: no flag of sglang (did you mean --hicache-size?)" in shown
    )
    assert "; --lod-format: no flag of sglang (did you mean --load-format?)" in shown
    assert main([*line, "--engine-flags='"]) == 2
    assert "allowed are a shell's words" in capsys.readouterr().err


def test_a_quota_that_the_disk_cannot_hold_is_poor(model, tmp_path):
    for quota, found, words in (
        ("1MiB", "fine", "removed; quota 1 MiB, of which"),  # a new store, then one that is there
        ("1MiB", "fine", "nothing was written to it; quota 1 MiB, of which"),
        ("1000TiB", "poor", "but the disk has no more than"),
    ):
        verdict, text = verdicts(model, f"file://{tmp_path}/store?quota={quota}")["store"]
        assert verdict == found
        assert words in text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://x", "--storage ftp://x: allowed are"),
        ("redis://127.0.0.1:1", "--storage redis://127.0.0.1:1"),
        ("file:///proc/nowhere", "--storage file:///proc/nowhere"),
    ],
)
def test_a_store_that_cannot_be_had_is_bad(model, url, words):
    verdict, text = verdicts(model, url)["store"]
    assert verdict == "bad"
    assert words in text


@pytest.mark.parametrize("fault", ["write", "read", "lie"])
def test_a_store_that_does_not_keep_its_word_is_bad(monkeypatch, model, fault, quiet):
    class Broken(MemoryBackend):
        def write(self, keys, pages):
            if fault == "write":
                return super().write([], [])
            return super().write(keys, pages)

        def read(self, keys, into):
            statuses = super().read(keys, into)
            if fault == "lie":
                into[0][0] ^= 1
            return statuses if fault != "read" else []

    monkeypatch.setattr("stratakv.storage.ends.open_storage", lambda _, form: Broken(form))
    assert verdicts(model, "memory://")["store"][0] == "bad"


def test_a_model_that_is_none_is_bad(tmp_path, storage):
    assert verdicts(tmp_path / "nowhere", storage)["model"][0] == "bad"
    (tmp_path / "empty").mkdir()
    assert verdicts(tmp_path / "empty", storage)["model"][0] == "bad"


def test_the_command_line_is_what_the_tier_takes(monkeypatch, model, storage):
    adapter = fake_vllm.install(monkeypatch)
    setup = EngineSetup(
        engine="vllm", model=str(model), storage=storage, storage_key_file=None, host_bytes=1 << 30
    )
    words = shlex.split(command_line(setup))
    assert words[:4] == ["vllm", "serve", str(model), "--kv-transfer-config"]
    given = json.loads(words[4])
    assert given["kv_connector_module_path"] == ENGINES["vllm"].adapter == adapter.__name__
    assert given["kv_connector"] == adapter.StrataConnector.__name__
    extra = given["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 1 << 30
    config, kv_cache = fake_vllm.configuration(model, storage)
    config.kv_transfer_config.kv_connector_extra_config = extra
    connector = adapter.StrataConnector(config, fake_vllm.KVConnectorRole.SCHEDULER, kv_cache)
    connector.tiers[0].shutdown()


def test_the_command_line_of_sglang_is_what_its_back_end_takes(monkeypatch, model, storage):
    adapter = fake_sglang.install(monkeypatch, fake_sglang.arguments(model))
    setup = EngineSetup(
        engine="sglang",
        model=str(model),
        storage=storage,
        storage_key_file=None,
        host_bytes=8 << 30,
    )
    words = shlex.split(command_line(setup))
    assert words[:5] == ["python3", "-m", "sglang.launch_server", "--model-path", str(model)]
    assert words[words.index("--hicache-size") + 1] == "9"
    extra = json.loads(words[-1])
    assert extra["module_path"] == ENGINES["sglang"].adapter == adapter.__name__
    backend = getattr(adapter, extra["class_name"])(
        fake_sglang.storage_config(storage, extra=extra), {}
    )
    backend.register_mem_pool_host(fake_sglang.Pool())
    backend.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["vllm", "m"], "--storage"),
        (["trt", "m", "--storage", "memory://"], "ENGINE trt: allowed are vllm, sglang"),
        (["vllm", "m", "--storage", "memory://", "--host-memory", "x"], "--host-memory"),
    ],
)
def test_a_wrong_flag_is_refused(line, words, capsys):
    try:
        code = main(["doctor", *line])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert words in capsys.readouterr().err

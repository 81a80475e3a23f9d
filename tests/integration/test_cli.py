"""The command as a user meets it: help that is true, and flags refused with their names.

Every refusal comes before weights are read or memory is taken: both are made to fail here.
"""

import json
import re
import shutil
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from stratakv.assembly import models
from stratakv.bench import storage as bench_storage
from stratakv.cli import argument_parser, main
from stratakv.core.clock import WallClock
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.core.familiar import FAMILIAR
from stratakv.serve import wiring
from stratakv.serve.server import Server, bound_socket
from stratakv.storage.file import fsck as fsck_module
from stratakv.storage.file.fsck import FsckReport, lines_of
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore
from stratakv.storage.header import is_sound, seal
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.storage_conformance import FORM, keys_of, store
from tests.fixtures.models import tiny_model
from tests.fixtures.tiny_configs import tiny_config
from tests.storage_files import flip_payload, segments


@pytest.fixture
def no_memory(monkeypatch):
    """Taking pages fails the test."""

    def taken(*_arguments):
        raise AssertionError("memory was taken")

    monkeypatch.setattr(models, "assemble", taken)


@pytest.fixture
def no_weights(monkeypatch, no_memory):
    """Reading weights fails the test."""

    def read(*_arguments):
        raise AssertionError("weights were read")

    monkeypatch.setattr(wiring, "load_model", read)


def leaves(argv: list[str]) -> int:
    """Exit code of the command, whether it returns it or argparse raises it."""
    try:
        return main(argv)
    except SystemExit as ended:
        return int(ended.code or 0)


def help_of(argv: list[str], capsys) -> str:
    assert leaves([*argv, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


# -- help ------------------------------------------------------------------------------------------


def test_help_names_every_verb(capsys):
    text = help_of([], capsys)
    for verb in ("serve", "bench", "fsck", "--version"):
        assert verb in text


def test_help_of_serve_lists_every_setting_with_its_default(capsys):
    text = help_of(["serve"], capsys)
    switches = "|".join(
        f"--{field.name.replace('_', '-')}"
        for field in fields(EngineConfig)
        if field.default is False
    )
    shape = rf"(--[a-z0-9-]+(?= (?:[A-Z|]+|NAME=DIR|\{{[^}}]*\}}) )|(?:{switches})(?=,))"
    parts = re.split(rf" {shape},? ", text)  # usage, flag, what it says, flag, ...
    described = dict(zip(parts[1::2], parts[2::2], strict=True))
    settings = [*fields(EngineConfig), *fields(ServerConfig)]
    wanted = {f"--{field.name.replace('_', '-')}": field.default for field in settings}
    assert described.keys() == wanted.keys() | {"--config"}
    for flag, default in wanted.items():
        about = described[flag].replace("- ", "-")  # argparse breaks lines at hyphens
        assert default in {None, (), False} or f"(default: {default})" in about, flag


@pytest.mark.parametrize(
    "part", ["tree", "transfer", "serve", "policy", "storage", "imports", "load"]
)
def test_help_of_every_bench(part, capsys):
    assert part in help_of(["bench"], capsys)
    text = help_of(["bench", part], capsys)
    assert "--json FILE" in text
    for flag in ("--trace FILE", "--model DIR"):
        assert (flag in text) == (part == "serve")
    assert ("--directory DIR" in text) == (part in {"storage", "load"})


def test_the_version(capsys):
    assert leaves(["--version"]) == 0
    assert capsys.readouterr().out == f"stratakv {version('stratakv')}\n"


def test_help_answers_without_torch():
    """It is read by people, who should not wait for an import of seconds."""
    code = (
        "import sys\nfrom stratakv.cli import main\n"
        "try: main(['serve', '--help'])\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "False\n"


def test_the_installed_command(tmp_path):
    command = shutil.which("stratakv", path=str(Path(sys.executable).parent))
    assert command is not None
    done = subprocess.run(
        [command, "serve", tmp_path / "nowhere"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"stratakv: MODEL {tmp_path}/nowhere: "
        "allowed is a directory with a Hugging Face config.json\n"
    )


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "VERB is missing; allowed are serve, route, plan, config, verify, bench, "),
        (["nothing"], "stratakv: VERB nothing: allowed are serve, route, plan, config, verify, "),
        (["config"], "stratakv: PART is missing; allowed are show, schema\n"),
        (["completion", "csh"], "stratakv: SHELL csh: allowed are bash\n"),
        (["serve"], "stratakv: MODEL is missing; allowed is a directory with config.json"),
        (["bench"], "stratakv: PART is missing; allowed are tree, transfer"),
        (["bench", "nothing"], "stratakv: PART nothing: allowed are tree, transfer"),
        (["serve", "DIR", "--page", "16"], "--page 16: not of stratakv serve; allowed is what"),
        (["serve", "DIR", "more"], "more: not of stratakv serve; allowed is what"),
        (["fsck", "DIR", "--repair=x"], "stratakv: --repair x: allowed is no value\n"),
        (["fsck", ""], "stratakv: DIR '': allowed is a directory, or file:///DIR\n"),
        (["fsck", "file://x"], "stratakv: DIR file://x: allowed is a directory, or file:///DIR\n"),
        (["serve", "DIR", "--storage-cut", "8"], "--storage-cut: its name is --storage-shards now"),
        (["serve", "DIR", "--storage-cut=8"], "--storage-cut: its name is --storage-shards now"),
        (["serve", "DIR", "--port", "http"], "stratakv: --port http: allowed is a whole number\n"),
        (["serve", "DIR", "--storage-shards", "abc"],
         "stratakv: --storage-shards abc: allowed is a whole number\n"),
        (["serve", "DIR", "--threads=2.5"], "stratakv: --threads 2.5: allowed is a whole number\n"),
        (["serve", "DIR", "--host-ratio", "two"], "--host-ratio two: allowed is a number\n"),
        (["bench", "ranks", "--tp", "two"], "stratakv: --tp two: allowed is a whole number\n"),
        (["bench", "policy", "--seed", "x"], "stratakv: --seed x: allowed is a whole number\n"),
        (["serve", "DIR", "--port"], "--port: its value is missing; allowed is one"),
        (["bench", "tree", "--json", "/nowhere/x"], "--json /nowhere/x: allowed is a file in a"),
        (["bench", "storage", "--directory", "/nowhere"], "--directory /nowhere: allowed is a dir"),
        (["bench", "load", "--directory", "/nowhere"], "--directory /nowhere: allowed is a dir"),
        (["bench", "serve", "--model", "/nowhere"], "stratakv: --model /nowhere: allowed is a dir"),
        (["bench", "http", "--model", "/nowhere"], "stratakv: --model /nowhere: allowed is a dir"),
        (["bench", "storage", "--redis", "x"], "allowed is redis://HOST:PORT/NUMBER of a server"),
        (["bench", "policy", "--save-trace", "/nowhere/x"], "--save-trace /nowhere/x: allowed is"),
        (["route", "--decode", "http://h:1"], "--prefill: allowed is at least one, as http://HOST"),
        (["route", "--prefill", "http://h:1"], "--decode: allowed is at least one, as http://H"),
        (["route", "--prefill", "http://h:x", "--decode", "http://h:1"],
         "stratakv: --prefill http://h:x: allowed is http://HOST:PORT\n"),
        (["route", "--prefill", "http://h:1", "--decode", "http://h:99999"],
         "stratakv: --decode http://h:99999: allowed is http://HOST:PORT\n"),
        (["route", "--prefill", "http://h:1", "--decode", "http://h:1", "--host="],
         "stratakv: --host '': allowed is an address of this machine"),
        (["fsck"], "stratakv: DIR is missing; allowed is a store's directory"),
        (["fsck", "/nowhere", "--json", "/nowhere/x"], "--json /nowhere/x: allowed is a file in a"),
        (["fsck", "/nowhere"], "stratakv: DIR /nowhere is no StrataKV store"),
        (["fsck", "file:///nowhere?quota=1GiB"], "stratakv: DIR /nowhere is no StrataKV store"),
        (["fsck", "s3://bucket"], "DIR s3://bucket: allowed is a directory, or file:///DIR"),
        (["fsck", "/nowhere", "--repair"], "stratakv: DIR /nowhere is no StrataKV store"),
    ],
)  # fmt: skip
def test_a_command_line_that_cannot_be_read(argv, message, capsys):
    assert leaves(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "verb"),
    [
        (["serve", "DIR", "--bogus"], "serve"),
        (["plan", "bytes", "DIR", "--bogus"], "plan bytes"),
        (["bench", "tree", "--bogus"], "bench tree"),
        (["fsck", "DIR", "--bogus"], "fsck"),
    ],
)
def test_a_flag_that_a_verb_lacks_is_refused_in_one_line_that_names_the_verb(argv, verb, capsys):
    assert leaves(argv) == 2
    assert capsys.readouterr().err == (
        f"stratakv: --bogus: not of stratakv {verb}; "
        f"allowed is what `stratakv {verb} --help` lists\n"
    )


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["serve", "DIR", "--page-size", "16"], "--page-tokens"),
        (["serve", "DIR", "--gpu-memory-utilization=0.9"], "--device-memory"),
        (["serve", "DIR", "--tensor_parallel_size", "2"], "--tp"),
        (["serve", "--model", "DIR"], "MODEL"),
        (["serve", "--model-path", "DIR"], "MODEL"),
        (["serve", "DIR", "--storge", "file:///x"], "--storage"),
        (["plan", "bytes", "DIR", "--block-size", "16"], "--page-tokens"),
        (["fsck", "--directory", "x"], None),
        (["plan", "bytes", "DIR", "--max-num-sequences", "16"], None),
        (["plan", "bytes", "DIR", "--hicache-storage-backend", "file"], None),  # of serve alone
    ],
)
def test_a_flag_that_others_have_or_that_is_misspelt_names_the_one_that_is_meant(
    argv, meant, capsys
):
    assert leaves(argv) == 2
    refused = capsys.readouterr().err
    if meant is None:
        assert "?" not in refused
    else:
        assert f" ({meant}?); allowed is what" in refused


def test_the_command_loads_no_store_before_it_knows_what_it_is_to_do():
    """Which takes a seventh of a second, and may warn before it is known how a log looks."""
    code = "import sys, stratakv.cli; print(*sorted({'numpy', 'torch'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_names_that_others_use_are_not_ours_and_stand_for_some_that_are():
    words = argument_parser().parts["serve"].format_help()
    ours = set(re.findall(r"--([a-z][\w-]*)", words)) | {"model"}
    assert not set(FAMILIAR) & ours
    assert set(FAMILIAR.values()) <= ours


@pytest.mark.parametrize("verb", ["serve", "plan bytes"])
def test_the_help_names_shards_as_the_flag_does(verb, capsys):
    assert leaves([*verb.split(), "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert not re.search(r"\bcuts?\b", shown)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--page-tokens 0", "--page-tokens 0: allowed is 1 and more"),
        ("--page-tokens -16", "--page-tokens -16: allowed is 1 and more"),
        ("--cache disk", "--cache disk: allowed are off, device, host"),
        ("--device-memory lots", "--device-memory lots: allowed is a number of bytes"),
        ("--device-memory 2XB", "--device-memory 2XB: allowed is a number of bytes"),
        ("--device-memory=", "--device-memory '': allowed is a number of bytes"),
        ("--device-memory=-1", "--device-memory -1: allowed is a number of bytes"),
        ("--host-memory 1e9", "--host-memory 1e9: allowed is a number of bytes"),
        ("--host-memory 1MiB --host-ratio 2", "--host-memory 1MiB and --host-ratio 2 both"),
        ("--host-ratio nan", "--host-ratio nan: allowed are finite numbers from 0 up"),
        ("--host-ratio -1", "--host-ratio -1.0: allowed are finite numbers from 0 up"),
        ("--cache off --host-ratio 2", "--cache off has no host tier to size"),
        ("--cache device --host-memory 1MiB", "--cache device has no host tier to size"),
        ("--max-running 0", "--max-running 0: allowed is 1 and more"),
        ("--max-model-len 1", "--max-model-len 1: allowed is 2 and more"),
        ("--step-tokens 8 --max-running 8", "--step-tokens 8: allowed is more than --max-run"),
        ("--chunk-tokens 0", "--chunk-tokens 0: allowed is 1 and more"),
        ("--chat-tokens 0", "--chat-tokens 0: allowed is 1 and more"),
        ("--load-back-threshold -1", "--load-back-threshold -1: allowed is 0 and more"),
        ("--load-back-budget 0", "--load-back-budget 0: allowed is 1 and more"),
        ("--port 65536", "--port 65536: allowed are 0 (any free one) to 65535"),
        ("--port -1", "--port -1: allowed are 0 (any free one) to 65535"),
        ("--host no.such.address", "--host no.such.address --port 8000 cannot be bound"),
        ("--max-waiting 0", "--max-waiting 0: allowed is 1 and more"),
        ("--limit-concurrency 0", "--limit-concurrency 0: allowed is 1 and more"),
        ("--limit-concurrency 999999999", "--limit-concurrency 999999999: this process may open"),
        ("--timeout-keep-alive 0", "--timeout-keep-alive 0.0: allowed are finite seconds above 0"),
        ("--timeout-request inf", "--timeout-request inf: allowed are finite seconds above 0"),
        ("--api-key=", "--api-key: allowed is a key that is not empty"),
        ("--admin-key=", "--admin-key: allowed is a key that is not empty and not --api-key's"),
        ("--host=", "--host '': allowed is an address of this machine"),
        ("--served-model-name=", "--served-model-name '': allowed is a name that is not empty"),
        ("--role prefill --advertise-host=", "--advertise-host '': allowed is an address at which"),
        ("--role prefill --advertise-host ::", "--advertise-host ::: peers cannot reach that;"),
        ("--role prefill --host 0.0.0.0", "--host 0.0.0.0: peers cannot reach that; allowed with"),
        ("--storage-shards 0", "--storage-shards 0: allowed are multiples of --tp 1 from it up"),
        ("--drain-s nan", "--drain-s nan: allowed are finite seconds from 0 up"),
        ("--drain-s -1", "--drain-s -1.0: allowed are finite seconds from 0 up"),
        ("--threads 0", "--threads 0: allowed is 1 and more"),
        ("--lora a", "--lora a: allowed is NAME=DIR, a name of 1 to 512 characters"),
        ("--lora =/a", "--lora =/a: allowed is NAME=DIR, a name of 1 to 512 characters"),
        ("--lora a=x --lora a=y", "--lora a=y: the name a is taken by another --lora; allowed is"),
        ("--lora me=x --served-model-name me", "--lora me=x: the model has this name"),
        ("--storage /var/lib/x", "--storage /var/lib/x: allowed are memory://, file://"),
        ("--storage=", "--storage '': allowed are memory://, file://"),
        ("--storage file://x", "--storage file://x: allowed is file:///DIRECTORY"),
        ("--storage file:///x?quota=lots",
         "--storage file:///x?quota=lots: allowed for quota is a number of bytes"),
        ("--storage memory://?quota=0",
         "--storage memory://?quota=0: allowed for quota is more than 0 bytes"),
        ("--storage mooncake://h:1?segment=x",
         "--storage mooncake://h:1?segment=x: allowed for segment is a number of bytes"),
        ("--storage redis://:pw@h:x/0", "--storage redis://:***@h:x/0: that is no URL"),
        ("--storage memory:// --cache device", "--storage: with --cache device there is no host"),
        ("--storage memory:// --host-ratio 0", "--storage memory://: there is no host page"),
        ("--storage-key-file /no", "--storage-key-file /no: No such file or directory; allowed is"),
        ("--storage-root x", "--storage-root x: allowed is the absolute path of a directory"),
        ("--storage-root / --cache off", "--storage-root: with --cache off there is no host"),
        ("--prefetch-policy never", "--prefetch-policy never: allowed are best-effort, wait-"),
        ("--prefetch-threshold 0", "--prefetch-threshold 0: allowed is 1 and more"),
        ("--prefetch-share 2", "--prefetch-share 2.0: allowed is above 0, and 1 at most"),
        ("--prefetch-timeout nan", "--prefetch-timeout nan: allowed are finite seconds from 0 up"),
        ("--prefetch-timeout 2 --prefetch-policy best-effort",
         "--prefetch-timeout: allowed with --prefetch-policy timeout"),
        ("--api-key k --admin-key k", "--admin-key: allowed is a key that is not empty and not"),
        ("--lora a=nowhere", "--lora a=nowhere: allowed is a directory with a PEFT adapter_co"),
    ],
)  # fmt: skip
def test_flags_are_refused_before_weights_are_read(directory, no_weights, flags, message, capsys):
    assert main(["serve", str(directory), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stratakv: {message}"), error
    assert error.count("\n") == 1


def test_a_port_that_is_taken(directory, no_weights, capsys):
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(directory), "--port", str(port)]) == 2
    assert f"--port {port} cannot be bound" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--device-memory 1KiB", "--device-memory 1KiB: too little for one request of 512 tokens"),
        ("--max-model-len 5000", "--max-model-len 5000: the model's positions end at 4096"),
        ("--max-model-len 4096 --device-memory 1MiB --dtype float32",
         "--max-model-len 4096: --device-memory 1MiB holds"),
        ("--device-memory 1000TiB", "--device-memory 1000TiB: "),
        ("--device-memory 1MiB --host-memory 9TiB", "--host-memory 9 TiB: "),
        ("--host-memory 1", "--host-memory 1 B: too little for one page of group"),
        ("--dtype int8", "--dtype int8: allowed are float32, bfloat16, float16, auto"),
    ],
)  # fmt: skip
def test_flags_that_the_model_decides_are_refused_before_weights_are_read(
    directory, no_weights, flags, message, capsys
):
    assert main(["serve", str(directory), "--port", "0", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert f"stratakv: {message}" in error


def damaged(directory: Path, tmp_path: Path, name: str, data: bytes | None) -> Path:
    path = tmp_path / "copy"
    shutil.copytree(directory, path)
    (path / name).unlink()
    if data is not None:
        (path / name).write_bytes(data)
    return path


CONFIG = json.loads(tiny_model("gemma3").config.to_json_string())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("config.json", None, "allowed is a directory with a Hugging Face config.json"),
        ("config.json", b"{", "config.json"),
        ("config.json", b'{"model_type": "nobody_knows"}', "nobody_knows"),
        ("tokenizer.json", None, "tokenizer"),
        ("tokenizer.json", b"{", "tokenizer"),
        (
            "config.json",
            json.dumps(CONFIG | {"intermediate_size": 96}).encode(),
            "not a causal LM that loads",
        ),
        ("model.safetensors", None, "no *.safetensors"),
        ("model.safetensors", b"", "not a causal LM that loads"),
        ("model.safetensors", b"x" * 1000, "not a causal LM that loads"),
    ],
)
def test_a_directory_that_is_no_model(directory, tmp_path, no_memory, name, data, message, capsys):
    path = damaged(directory, tmp_path, name, data)
    assert main(["serve", str(path), "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(path) in error


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG | {"sliding_window": None}, "sliding_window"),
        (tiny_config("recurrent_gemma").to_dict(), "keeps its states in the modules"),
    ],
)
def test_a_model_that_cannot_be_served(directory, tmp_path, no_weights, config, message, capsys):
    path = damaged(directory, tmp_path, "config.json", json.dumps(config, default=str).encode())
    assert main(["serve", str(path), "--port", "0"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "more", "flags", "message"),
    [
        ("deepseek_v32", {}, ["--lora", "a=LORA"], "'deepseek_v32' takes no adapters"),
        ("deepseek_v4", {"quantization_config": {"quant_method": "fp8"}}, [], "are quantized"),
        ("deepseek_v4", {}, ["--dtype", "float16"], "not float16"),
    ],
)
def test_what_our_own_modules_do_not_do(
    directory, tmp_path, no_weights, family, more, flags, message, capsys
):
    fields = tiny_config(family).to_dict() | more
    path = damaged(directory, tmp_path, "config.json", json.dumps(fields, default=str).encode())
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text("{}")
    (lora / "adapter_model.safetensors").write_bytes(b"")
    given = [flag.replace("LORA", str(lora)) for flag in flags]
    assert main(["serve", str(path), "--port", "0", "--page-tokens", "16", *given]) == 2
    assert message in capsys.readouterr().err


def test_bench_storage_is_given_a_place(tmp_path, monkeypatch):
    calls = []

    def run(**given):
        calls.append((given["directory"], given["redis"]))
        return {"cases": []}

    monkeypatch.setattr(bench_storage, "run", run)
    report = tmp_path / "report.json"
    assert main(["bench", "storage", "--json", str(report), "--directory", str(tmp_path)]) == 0
    assert json.loads(report.read_text()) == {"cases": []}
    assert main(["bench", "storage"]) == 0
    assert main(["bench", "storage", "--redis", "redis://h"]) == 0
    assert calls == [(tmp_path, None), (None, None), (None, "redis://h")]


# -- fsck ------------------------------------------------------------------------------------------


def damaged_store(path: Path) -> Path:
    """A store of six pages, one of them with a flipped byte."""
    keys = keys_of("a", 6)
    with closing(FileStore(path, FORM, StoreLimits(quota_bytes=64 << 20), WallClock())) as backend:
        store(backend, keys)
    flip_payload(path, keys[1], 5000)
    return path


def test_fsck_reports_mends_and_says_so_with_its_exit_code(tmp_path, capsys):
    path = damaged_store(tmp_path / "store")
    report = tmp_path / "report.json"
    assert main(["fsck", str(path), "--json", str(report)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}: 5 sound pages in 1 segments, ")
    assert lines[1] == "damaged payloads: 1"
    assert lines[2].endswith(": a damaged payload")
    assert lines[3] == "damaged; --repair removes what is"
    found = json.loads(report.read_text())
    assert (found["clean"], found["bad_payloads"], found["mended"]) == (False, 1, 0)
    assert main(["fsck", str(path), "--repair"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "mended: 1 removed"
    assert main(["fsck", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "clean"


def test_fsck_cannot_mend_what_a_running_process_writes(tmp_path, capsys):
    keys = keys_of("a", 2)
    keeping = StoreLimits(quota_bytes=64 << 20)
    with closing(FileStore(tmp_path, FORM, keeping, WallClock())) as backend:
        store(backend, keys)
        flip_payload(tmp_path, keys[0], 0)
        assert main(["fsck", str(tmp_path), "--repair"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "segments that a running process writes: 1"
    assert lines[-1] == "0 removed, 1 left, which a running process writes"


def test_fsck_of_what_cannot_be_read(tmp_path, monkeypatch, capsys):
    def refused(*_arguments, **_more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fsck_module, "fsck", refused)
    assert main(["fsck", str(tmp_path)]) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_fsck_names_a_hundred_problems_and_counts_the_rest():
    found = FsckReport(1, 0, 0, 0, 0, 4096, 130, 0, 0, 0, ["x"] * 100)
    assert lines_of(Path("d"), found, repair=False)[-2] == "  and 30 more"


# -- a server that keeps what it knows -------------------------------------------------------------


@contextmanager
def running(service):
    """As ``serve_forever`` does it, on a thread."""
    listener = bound_socket("127.0.0.1", 0)
    listener.listen()
    server = Server(service, drain_s=PATIENCE_S)
    service.driver.start()
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        service.storage.settle(PATIENCE_S)
        assert service.driver.stop(PATIENCE_S)
        service.storage.close()


STORED = EngineConfig(
    dtype="float32", page_tokens=16, device_memory="640KiB", host_memory="1280KiB",
    step_tokens=256, chunk_tokens=64, max_running=16, chat_tokens=256, prefetch_share=1.0,
    prefetch_policy="wait-complete",
)  # fmt: skip


def by_tier(http) -> dict[str, int]:
    """Where a prompt of 320 tokens came from."""
    body = {"prompt": list(range(3, 323)), "max_tokens": 2, "temperature": 0}
    usage = http.post("/v1/completions", json=body).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens_by_tier"]


def test_storage_outlives_a_server_and_keys_do_not_show(directory, tmp_path):
    config = replace(STORED, storage="redis://u:secret@127.0.0.1:1/0")
    with pytest.raises(ConfigError, match=r"--storage redis://u:\*\*\*@127.0.0.1:1/0: "):
        wiring.build_service(directory, config, ServerConfig())
    config = replace(STORED, storage=f"file://{tmp_path}/store?quota=64MiB")
    for turn in range(2):
        server = ServerConfig(api_key="hush", admin_key="psst")
        service, parts = wiring.build_service(directory, config, server)
        try:
            with running(service) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
                http.headers["Authorization"] = "Bearer hush"
                info = http.get("/server_info").text
                assert "hush" not in info
                assert "psst" not in info
                assert json.loads(info)["engine"]["storage"] == config.storage
                assert (by_tier(http)["storage"] > 0) == (turn > 0)
                seen = http.get("/cache/storage", headers={"Authorization": "Bearer psst"}).json()
                assert (seen["attached"], seen["url"]) == (True, config.storage)
        finally:
            parts.close()
    assert main(["fsck", str(tmp_path / "store")]) == 0


def test_a_running_server_attaches_only_directories_that_it_was_given(directory, tmp_path):
    def put(http, place):
        return http.put("/cache/storage", json={"url": f"file://{place}?quota=64MiB"})

    home = replace(STORED, storage=f"file://{tmp_path}/home?quota=64MiB")
    below = replace(STORED, storage_root=(str(tmp_path / "root"),))
    (tmp_path / "root").mkdir()
    for config, allowed in ((home, tmp_path / "home"), (below, tmp_path / "root" / "store")):
        service, parts = wiring.build_service(directory, config, ServerConfig(admin_key="psst"))
        try:
            with running(service) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
                http.headers["Authorization"] = "Bearer psst"
                http.delete("/cache/storage")
                for place in (tmp_path / "new", tmp_path / "root" / ".." / "new", "/etc"):
                    error = put(http, place).json()["error"]
                    assert (error["param"], error["code"]) == ("url", "invalid_value")
                    assert "--storage-root" in error["message"]
                assert not (tmp_path / "new").exists()
                assert put(http, allowed).status_code == 200
                assert by_tier(http)["storage"] == 0
        finally:
            parts.close()


def test_servers_share_a_store_by_their_key_and_a_forged_page_is_computed(directory, tmp_path):
    """By a server with a key, one with another, one with none, and the first again, robbed."""
    keys = {name: tmp_path / name for name in ("one", "two")}
    for name, path in keys.items():
        path.write_text(name * 16)
        path.chmod(0o600)
    store = tmp_path / "store"
    config = replace(STORED, storage=f"file://{store}?quota=64MiB")
    seen = []
    for key in ("one", "two", None, "one", "one"):
        if len(seen) == 4:
            forge(store)
        here = replace(config, storage_key_file=key and str(keys[key]))
        service, parts = wiring.build_service(directory, here, ServerConfig(admin_key="psst"))
        try:
            with running(service) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
                http.headers["Authorization"] = "Bearer psst"
                came, text = by_tier(http)["storage"], generated_text(http)
                figures = http.get("/cache/storage").json()
                seal = figures["backend"].get("seal")
                assert (seal is None) == (key is None)
                assert "oneone" not in http.get("/server_info").text
                forged = 0 if seal is None else seal["forged"]
                lost = figures["lost_tokens"].get("corrupt", 0)
                seen.append((came > 0, forged > 0, lost > 0, text))
        finally:
            parts.close()
    first = seen[0][-1]
    miss, hit, poisoned = (
        (False, False, False, first), (True, False, False, first), (False, True, True, first)
    )  # fmt: skip
    assert seen == [miss, miss, miss, hit, poisoned]


def generated_text(http) -> str:
    body = {"prompt": list(range(3, 323)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/completions", json=body).json()["choices"][0]["text"]


def forge(directory: Path) -> None:
    """Change a byte of every page, and all checksums with it, as who knows all but the key."""
    for _, segment in segments(directory):
        assert segment.own()
        for slot in range(segment.geometry.slots):
            header = segment.headers(slot, 1).copy()
            if is_sound(header)[0]:
                page = memoryview(bytearray(segment.geometry.page_bytes))
                segment.read_page(slot, page)
                page[0] ^= 1
                ((header["payload_hash"],), _) = segment.write_pages([slot], [page])
                segment.put_headers(slot, seal(header))


def test_storage_is_changed_while_a_server_runs(directory, tmp_path):
    body = {"url": f"file://{tmp_path}/store?quota=64MiB"}
    config = replace(STORED, storage_root=(str(tmp_path),))
    service, parts = wiring.build_service(directory, config, ServerConfig(admin_key="psst"))
    try:
        with running(service) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            http.headers["Authorization"] = "Bearer psst"
            by_tier(http)  # cached before there is a store: written when it is used again
            assert http.put("/cache/storage", json=body).status_code == 200
            assert by_tier(http)["storage"] == 0
            assert http.delete("/cache/storage").json()["dropped_pages"] == 0
            kept = fsck_module.fsck(tmp_path / "store").pages - 1  # beside the mark of the cut
            assert kept > 0
            assert http.put("/cache/storage", json=body).status_code == 200
            assert http.post("/flush_cache").status_code == 200
            assert by_tier(http)["storage"] > 0
            assert http.get("/cache/storage").json()["backend"]["pages"] >= kept
            assert http.post("/cache/storage/clear").status_code == 202
            assert http.delete("/cache/storage").status_code == 200
            assert fsck_module.fsck(tmp_path / "store").pages == 0
    finally:
        parts.close()

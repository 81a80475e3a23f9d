"""The command as a user meets it: help that is true, and flags refused with their names.

Every refusal comes before weights are read or memory is taken: both are made to fail here.
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest

from stratakv.cli import main
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.serve import wiring
from stratakv.serve.server import bound_socket
from tests.fixtures.models import tiny_model
from tests.fixtures.tiny_configs import tiny_config
from tests.serving import train_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = train_tokenizer(tmp_path_factory.mktemp("model"))
    tiny_model("gemma3").save_pretrained(path)
    return path


@pytest.fixture
def no_memory(monkeypatch):
    """Taking pages fails the test."""

    def taken(*_arguments):
        raise AssertionError("memory was taken")

    monkeypatch.setattr(wiring, "assemble", taken)


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
    for verb in ("serve", "bench", "--version"):
        assert verb in text


def test_help_of_serve_lists_every_setting_with_its_default(capsys):
    text = help_of(["serve"], capsys)
    listed = set(re.findall(r"(--[a-z-]+) (?:INT|FLOAT|STR|SIZE|NAME=DIR|\{)", text))
    settings = [*fields(EngineConfig), *fields(ServerConfig)]
    wanted = {f"--{field.name.replace('_', '-')}" for field in settings}
    assert listed == wanted | {"--threads"}
    for field in settings:
        about = text.rpartition(f" --{field.name.replace('_', '-')} ")[2]
        about = about.replace("- ", "-")  # argparse breaks lines at hyphens
        shown = f"(default: {field.default})"
        assert field.default in {None, ()} or about.index(shown) < 200, field.name


@pytest.mark.parametrize("part", ["tree", "transfer", "serve"])
def test_help_of_every_bench(part, capsys):
    assert part in help_of(["bench"], capsys)
    text = help_of(["bench", part], capsys)
    assert "--json FILE" in text
    for flag in ("--trace FILE", "--model DIR"):
        assert (flag in text) == (part == "serve")


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
    ("argv", "said"),
    [
        ([], "arguments are required: VERB"),
        (["nothing"], "'nothing' (choose from"),
        (["serve"], "arguments are required: MODEL"),
        (["bench"], "arguments are required: PART"),
        (["bench", "nothing"], "'nothing' (choose from"),
        (["serve", "DIR", "--page", "16"], "unrecognized arguments: --page 16"),
        (["serve", "DIR", "--port", "http"], "--port: invalid int value: 'http'"),
        (["serve", "DIR", "--host-ratio", "two"], "--host-ratio: invalid float value: 'two'"),
        (["serve", "DIR", "--port"], "--port: expected one argument"),
        (["bench", "tree", "--json", "/nowhere/x"], "--json /nowhere/x: allowed is a file in a"),
    ],
)  # fmt: skip
def test_a_command_line_that_cannot_be_read(argv, said, capsys):
    assert leaves(argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--page-tokens 0", "--page-tokens 0: allowed is 1 and more"),
        ("--page-tokens -16", "--page-tokens -16: allowed is 1 and more"),
        ("--cache disk", "--cache disk: allowed are off, device, host"),
        ("--device-memory lots", "--device-memory 'lots': allowed is a number of bytes"),
        ("--device-memory 2XB", "--device-memory '2XB': allowed is a number of bytes"),
        ("--device-memory=-1", "--device-memory '-1': allowed is a number of bytes"),
        ("--host-memory 1e9", "--host-memory '1e9': allowed is a number of bytes"),
        ("--host-memory 1MiB --host-ratio 2", "--host-memory 1MiB and --host-ratio 2 both"),
        ("--host-ratio nan", "--host-ratio nan: allowed are finite numbers from 0 up"),
        ("--host-ratio -1", "--host-ratio -1.0: allowed are finite numbers from 0 up"),
        ("--cache off --host-ratio 2", "--cache off has no host tier to size"),
        ("--cache device --host-memory 1MiB", "--cache device has no host tier to size"),
        ("--max-running 0", "--max-running 0: allowed is 1 and more"),
        ("--max-model-len 1", "--max-model-len 1: allowed is 2 and more"),
        ("--step-tokens 8 --max-running 8", "--step-tokens 8: more than --max-running 8"),
        ("--chunk-tokens 0", "--chunk-tokens 0: allowed is 1 and more"),
        ("--chat-tokens 0", "--chat-tokens 0: allowed is 1 and more"),
        ("--load-back-threshold -1", "--load-back-threshold -1: allowed is 0 and more"),
        ("--load-back-budget 0", "--load-back-budget 0: allowed is 1 and more"),
        ("--port 65536", "--port 65536: allowed are 0 (any free one) to 65535"),
        ("--port -1", "--port -1: allowed are 0 (any free one) to 65535"),
        ("--host no.such.address", "--host no.such.address --port 8000 cannot be bound"),
        ("--max-waiting 0", "--max-waiting 0: allowed is 1 and more"),
        ("--drain-s nan", "--drain-s nan: allowed are finite seconds from 0 up"),
        ("--drain-s -1", "--drain-s -1.0: allowed are finite seconds from 0 up"),
        ("--threads 0", "--threads 0: allowed is 1 and more"),
        ("--lora a", "--lora a: allowed is NAME=DIR, a name of 1 to 512 characters"),
        ("--lora =/a", "--lora =/a: allowed is NAME=DIR, a name of 1 to 512 characters"),
        ("--lora a=x --lora a=y", "--lora a=y: the name a is taken by another --lora"),
        ("--lora me=x --served-model-name me", "--lora me=x: the model has this name"),
        ("--lora a=nowhere", "--lora a=nowhere: not a directory with a PEFT adapter_config.json"),
    ],
)  # fmt: skip
def test_flags_are_refused_before_weights_are_read(directory, no_weights, flags, said, capsys):
    assert main(["serve", str(directory), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stratakv: {said}"), error
    assert error.count("\n") == 1


def test_a_port_that_is_taken(directory, no_weights, capsys):
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(directory), "--port", str(port)]) == 2
    assert f"--port {port} cannot be bound" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--device-memory 1KiB", "--device-memory 1 KiB: one request of 512 tokens needs at least"),
        ("--max-model-len 5000", "--max-model-len 5000: the model's positions end at 4096"),
        ("--max-model-len 4096 --device-memory 1MiB --dtype float32",
         "--max-model-len 4096: --device-memory 1MiB holds"),
        ("--device-memory 1000TiB", "--device-memory 1000TiB: "),
        ("--device-memory 1MiB --host-memory 9TiB", "--host-memory 9 TiB: "),
        ("--host-memory 1", "--host-memory 1 B: too little for one page of group"),
        ("--dtype int8", "--dtype int8: must be one of float32, bfloat16, float16, auto"),
    ],
)  # fmt: skip
def test_flags_that_the_model_decides_are_refused_before_weights_are_read(
    directory, no_weights, flags, said, capsys
):
    assert main(["serve", str(directory), "--port", "0", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert f"stratakv: {said}" in error


def damaged(directory: Path, tmp_path: Path, name: str, data: bytes | None) -> Path:
    path = tmp_path / "copy"
    shutil.copytree(directory, path)
    (path / name).unlink()
    if data is not None:
        (path / name).write_bytes(data)
    return path


CONFIG = json.loads(tiny_model("gemma3").config.to_json_string())


@pytest.mark.parametrize(
    ("name", "data", "said"),
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
def test_a_directory_that_is_no_model(directory, tmp_path, no_memory, name, data, said, capsys):
    path = damaged(directory, tmp_path, name, data)
    assert main(["serve", str(path), "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(path) in error


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CONFIG | {"sliding_window": None}, "sliding_window"),
        (tiny_config("deepseek_v32").to_dict(), "sparse and compressed buffers"),
        (tiny_config("recurrent_gemma").to_dict(), "keeps its states in the modules"),
    ],
)
def test_a_model_that_cannot_be_served(directory, tmp_path, no_weights, config, said, capsys):
    path = damaged(directory, tmp_path, "config.json", json.dumps(config, default=str).encode())
    assert main(["serve", str(path), "--port", "0"]) == 2
    assert said in capsys.readouterr().err

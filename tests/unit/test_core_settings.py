"""Settings by flag, environment and file: which wins, where each is from, what is refused."""

import json
import subprocess
import sys
import tomllib
from dataclasses import fields

import pytest

from stratakv.cli import argument_parser, main
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.settings import resolve
from stratakv.serve.config_command import SERVER_OPTIONS


@pytest.fixture
def file(tmp_path):
    """Writes a file of settings, and returns its path."""

    def written(text: str) -> str:
        path = tmp_path / "settings.toml"
        path.write_text(text)
        return str(path)

    return written


def resolved(argv, environment):
    return resolve(argument_parser().parse_args(["serve", *argv]), SERVER_OPTIONS, environment)


def test_a_flag_wins_over_a_variable_that_wins_over_a_file_that_wins_over_the_default(file):
    path = file('port = 1\nhost = "10.0.0.1"\nmax_running = 4\nmodel = "m"\n')
    environment = {"STRATAKV_PORT": "2", "STRATAKV_HOST": "10.0.0.2", "STRATAKV_CONFIG": path}
    found = resolved(["--port", "3"], environment)
    seen = {name: (found[name].value, found[name].source) for name in (
        "port", "host", "max_running", "model", "tp",
    )}  # fmt: skip
    assert seen == {
        "port": (3, "--port"),
        "host": ("10.0.0.2", "STRATAKV_HOST"),
        "max_running": (4, f"max-running in {path}"),
        "model": ("m", f"model in {path}"),
        "tp": (1, "default"),
    }
    server = found.record(ServerConfig)
    assert (server.port, server.host) == (3, "10.0.0.2")
    assert found.record(EngineConfig).max_running == 4


def test_the_flag_that_names_the_file_wins_over_the_variable(file):
    path = file("port = 1")
    found = resolved(["--config", path], {"STRATAKV_CONFIG": "/nowhere"})
    assert found["port"].value == 1


def test_every_kind_of_value_comes_by_each_way(file):
    text = 'lora = ["a=A", "b=B"]\nsparse-offload = true\ndrain-s = 2\ndevice-memory = 1048576\n'
    by_file = resolved(["--config", file(text)], {})
    variables = {
        "STRATAKV_LORA": "a=A,b=B", "STRATAKV_SPARSE_OFFLOAD": "True", "STRATAKV_DRAIN_S": "2",
        "STRATAKV_DEVICE_MEMORY": "1048576",
    }  # fmt: skip
    by_variable = resolved([], variables)
    flags = "--lora a=A --lora b=B --sparse-offload --drain-s 2 --device-memory 1048576"
    by_flag = resolved(flags.split(), {})
    wanted = [("a=A", "b=B"), True, 2.0, "1048576"]
    for found in (by_file, by_variable, by_flag):
        names = ("lora", "sparse_offload", "drain_s", "device_memory")
        assert [found[name].value for name in names] == wanted
    off = resolved(["--no-sparse-offload"], variables)
    assert off["sparse_offload"].value is False


@pytest.mark.parametrize(
    ("variables", "text", "message"),
    [
        ({"STRATAKV_PORT": "http"}, "",
         "--port http: allowed is a whole number; --port comes from STRATAKV_PORT"),
        ({"STRATAKV_PORT": "99999"}, "",
         "--port 99999: allowed are 0 (any free one) to 65535; --port comes from STRATAKV_PORT"),
        ({"STRATAKV_SPARSE_OFFLOAD": "maybe"}, "", "--sparse-offload maybe: allowed are true, f"),
        ({"STRATAKV_API_KEY": ""}, "", "not empty; --api-key comes from STRATAKV_API_KEY"),
        ({}, "port = 99999", "to 65535; --port comes from port in FILE"),
        ({}, 'port = "8000"', "--port 8000: allowed is a whole number; --port comes from port in"),
        ({}, "port = true", "--port True: allowed is a whole number; --port comes from port in"),
        ({}, "lora = 'a=b'", "--lora a=b: allowed is a list of texts; --lora comes from lora in"),
        ({}, "api-key = [1]", "--api-key ***: allowed is a text; --api-key comes from api-key in"),
        ({"STRATAKV_HOST_MEMORY": "1GiB"}, "host-ratio = 2.0",
         "or neither; --host-memory comes from STRATAKV_HOST_MEMORY; --host-ratio comes from"),
        ({}, "prot = 1", "--config FILE: it sets prot, which is no setting (port?); allowed are"),
        ({}, "block_size = 1", "it sets block_size, which is no setting (page-tokens?); allowed"),
        ({}, "nothing_like_it = 1", "it sets nothing_like_it, which is no setting; allowed are"),
        ({}, "max-running = 1\nmax_running = 2", "--config FILE: it sets max-running twice"),
        ({}, "port = ", "allowed is a TOML file that can be read"),
        ({}, "[serve]\nport = 1", "--config FILE: it sets serve, which is no setting"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_variable_or_the_key(
    file, monkeypatch, capsys, variables, text, message
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    path = file(text)
    assert main(["config", "show", "--config", path]) == 2
    assert message.replace("FILE", path) in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys):
    assert main(["config", "show", "--config", "/nowhere.toml"]) == 2
    assert "--config /nowhere.toml: [Errno 2] No such file" in capsys.readouterr().err


def test_a_refusal_of_a_flag_names_no_other_source(monkeypatch, capsys):
    monkeypatch.setenv("STRATAKV_PORT", "8000")
    assert main(["config", "show", "--port", "99999"]) == 2
    assert capsys.readouterr().err.endswith("(any free one) to 65535\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kv-events tcp://*:5557 --cache off", "--kv-events: with --cache off nothing is cached"),
        (
            "--sparse-offload --device-buffer-size 64 --role prefill --host 127.0.0.1",
            "--device-buffer-size: with --role prefill no request has a buffer",
        ),
    ],
)
def test_an_engine_and_a_server_that_do_not_go_together_are_refused(flags, message, capsys):
    assert main(["config", "show", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_variable_that_looks_like_a_setting_is_doubted_and_others_are_left_alone():
    environment = {
        "STRATAKV_API_KEYS": "k", "STRATAKV_SERVICE_HOST": "10.0.0.1", "STRATAKV_LEASH": "stdin",
    }  # fmt: skip
    doubts = resolved([], environment).doubts
    assert doubts == ("STRATAKV_API_KEYS is no setting; is STRATAKV_API_KEY meant?",)


def test_what_is_shown_is_a_file_of_settings_without_its_keys(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STRATAKV_API_KEY", "hush")
    monkeypatch.setenv("STRATAKV_STORAGE", "redis://u:secret@h:1/0")
    report = tmp_path / "shown.json"
    argv = ["config", "show", "m", "--admin-key", "psst", "--port", "1", "--json", str(report)]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert not [secret for secret in ("hush", "psst", "secret") if secret in text]
    values = tomllib.loads(text)
    assert (values["model"], values["port"]) == ("m", 1)
    # Read back, a mask would be a key, or a password.
    assert not values.keys() & {"api-key", "admin-key", "storage"}
    assert '# api-key = "***"' in text
    assert '# storage = "redis://u:***@h:1/0"' in text
    figures = json.loads(report.read_text())
    assert figures["port"] == {"value": 1, "source": "--port"}
    assert figures["api-key"] == {"value": "***", "source": "STRATAKV_API_KEY"}
    assert figures["max-model-len"] == {"value": None, "source": "default"}


def test_the_schema_has_every_setting_with_its_default(capsys):
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    settings = [*fields(EngineConfig), *fields(ServerConfig)]
    keys = {field.name.replace("_", "-"): field.default for field in settings}
    properties = schema["properties"]
    assert properties.keys() == keys.keys() | {"model"}
    for key, default in keys.items():
        assert properties[key].get("default", None) == (list(default) if default == () else default)
    assert properties["cache"]["enum"] == ["off", "device", "host"]
    assert properties["port"]["type"] == "integer"
    assert properties["device-memory"]["type"] == ["string", "number"]
    assert properties["host-memory"]["type"] == ["string", "integer"]
    assert schema["additionalProperties"] is False


def test_a_plan_takes_the_file_of_a_server(file, tmp_path, capsys):
    """Settings that a plan has no use for are not refused, what is no setting is."""
    path = file('port = 8000\nmodel = "/nowhere"\nmax-running = 0')
    assert main(["plan", "bytes", "--config", path]) == 2
    assert "--max-running 0: allowed is 1 and more; --max-run" in capsys.readouterr().err


REFUSED = """
import sys
from stratakv.cli import main
for line in sys.stdin.read().splitlines():
    code = main(["serve", *line.split()])
    assert code == 2, line
    assert "torch" not in sys.modules, line
"""


def test_what_flags_alone_give_away_is_refused_without_torch(tmp_path):
    """It takes seconds to load. Paths, addresses and URLs are looked at too."""
    pytest.importorskip("torch")  # without, that is what is said
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "open").write_text("name key")
    (tmp_path / "open").chmod(0o644)
    bad = {
        "--port http": "--port http: ", "--cache disk": "--cache disk: ",
        "--device-memory lots": "--device-memory lots: ", "--host-memory 1e9": "--host-memory 1e9",
        "--lora a=nowhere": "--lora a=nowhere: ", "--storage x": "--storage x: ",
        "--storage-root x": "--storage-root x: ", "--storage-key-file /": "--storage-key-file /: ",
        "--host no.such.address": "--host no.such.address --port 8000 cannot be bound",
        "--threads 0": "--threads 0: ", "--api-key-file /no": "--api-key-file /no: No such file",
        f"--api-key-file {tmp_path}/open": f"--api-key-file {tmp_path}/open: others may have it",
    }  # fmt: skip
    lines = "\n".join([*(f"{tmp_path} {flags}" for flags in bad), "nowhere"])
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], input=lines, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    refusals = [line for line in done.stderr.splitlines() if line.startswith("stratakv: ")]
    for line, message in zip(refusals, [*bad.values(), "MODEL nowhere: "], strict=True):
        assert line.startswith(f"stratakv: {message}"), line


COMPLETE = """
source <({python} -m stratakv completion bash)
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); _stratakv
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("stratakv pl", "plan"),
        ("stratakv bench tre", "tree"),
        ("stratakv serve --max-r", "--max-running"),
        ("stratakv serve models/demo --cache dev", "device"),
        ("stratakv fsck --max-r", ""),
    ],
)
def test_bash_completes_verbs_flags_and_values(words, offered):
    script = COMPLETE.format(python=sys.executable, words=words)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{offered}\n"


def test_a_file_may_have_a_share_as_a_number(file):
    found = resolved(["--config", file('device = "cuda"\ndevice-memory = 0.85\n')], {})
    config = found.record(EngineConfig)
    assert (config.device, config.device_memory) == ("cuda", "0.85")

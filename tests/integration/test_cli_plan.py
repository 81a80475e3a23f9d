"""``stratakv plan bytes`` as a user meets it."""

import json
import subprocess
import sys

import pytest

from stratakv.cli import main
from tests.fixtures.tiny_configs import tiny_config


@pytest.fixture
def directory(tmp_path):
    """A checkpoint whose weights have not been fetched."""
    tiny_config("deepseek_v32").save_pretrained(tmp_path)
    return tmp_path


def test_a_plan_is_printed_and_written(directory, capsys):
    report = directory / "plan.json"
    flags = ["--device-memory", "8MiB", "--max-running", "4", "--host-ratio", "2"]
    assert main(["plan", "bytes", str(directory), *flags, "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{directory}: deepseek_v32, ")
    title, row = next((i, line) for i, line in enumerate(lines) if line.startswith("pages of 64"))
    assert row == f"pages of 64 tokens, {figures['token_bytes']:g} bytes per token kept"
    (anchor,) = figures["groups"]
    cells = lines[title + 2].split()
    assert cells[0] == "anchor"
    assert f"{anchor['page_bytes']}" in cells
    assert f"{anchor['device_pages']}" in cells
    assert [b["name"] for b in anchor["buffers"]] == ["latent", "index_k"]
    assert figures["host_bytes"] >= 2 * figures["device_bytes"]


def test_a_plan_says_what_a_server_would_refuse(directory, capsys):
    config = directory / "config.json"
    fields = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(fields))
    assert main(["plan", "bytes", str(directory), "--device-memory", "8MiB"]) == 0
    assert "cannot be served yet: its weights are quantized" in capsys.readouterr().out


def test_rows_of_another_format_are_planned_for(directory, capsys):
    flags = ["--device-memory", "8MiB", "--max-running", "4", "--rows", "fp8"]
    assert main(["plan", "bytes", str(directory), *flags]) == 0
    assert "\nlatent: rows of 20 float8_e4m3fn values, 1 float32 scales" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "PART is missing; allowed are bytes"),
        (["bytes"], "MODEL is missing; allowed is a directory"),
        (["bytes", "/nowhere"], "stratakv: MODEL /nowhere: allowed is a directory with a Hugging"),
        (["bytes", "DIR", "--json", "/nowhere/x"], "--json /nowhere/x: allowed is a file in a"),
        (["bytes", "DIR", "--page-tokens", "0"], "--page-tokens 0: allowed is 1 and more"),
        (["bytes", "DIR", "--max-running", "0"], "--max-running 0: allowed is 1 and more"),
        (["bytes", "DIR", "--max-running", "4096"], "--step-tokens 2048: allowed is more than"),
        (["bytes", "DIR", "--device-memory", "1KiB"], "--device-memory 1KiB: too little for"),
        (["bytes", "DIR", "--rows", "fp4"], "--rows fp4: allowed are plain, fp8"),
        (["bytes", "DIR", "--port", "1"], "--port 1: not of stratakv plan bytes"),
        (["bytes", "DIR", "--page", "1"], "--page 1: not of stratakv plan bytes"),
    ],
)
def test_a_command_line_that_cannot_be_honoured(directory, argv, message, capsys):
    try:
        code = main(["plan", *(str(directory) if word == "DIR" else word for word in argv)])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_the_flags_are_those_of_the_server(capsys):
    texts = {}
    for verb in (["serve"], ["plan", "bytes"]):
        with pytest.raises(SystemExit):
            main([*verb, "--help"])
        texts[verb[0]] = " ".join(capsys.readouterr().out.split())
    for flag in (
        "page-tokens", "dtype", "cache", "device-memory", "host-memory", "host-ratio",
        "max-running", "max-model-len", "step-tokens", "chunk-tokens", "chat-tokens",
    ):  # fmt: skip
        about = texts["plan"].rpartition(f"--{flag} ")[2].partition(" --")[0]
        assert f"--{flag} {about}" in texts["serve"], flag
    assert "--storage" not in texts["plan"]


def test_help_answers_without_torch():
    code = (
        "import sys\nfrom stratakv.cli import main\n"
        "try: main(['plan', 'bytes', '--help'])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "False\n"

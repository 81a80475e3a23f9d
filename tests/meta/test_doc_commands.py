"""Every command that a document shows is one: its words parse, its paths and targets are there.

Owns what a shell block may hold. ``integration/test_doc_commands_run.py`` runs what can be run,
and the tests that ``doc_blocks`` names run Python.
Every check is shown to bite on a sample.
"""

import json
import re
import shlex
import tomllib

import pytest

from stratakv import cli
from stratakv.connect.doctor import EngineSetup, command_line
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.core.settings import resolve
from stratakv.serve.config_command import SERVER_OPTIONS
from tests.doc_blocks import PYTHON_IS_RUN_BY, all_blocks, blocks_of, shell_lines
from tests.meta.source import PACKAGE, ROOT, repository

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
BLOCKS = all_blocks()
SHELL = shell_lines()
LANGUAGES = {"sh", "python", "text", "mermaid", "toml"}


def routes() -> set[tuple[str, str]]:
    """(method, path) of everything the server answers."""
    source = "".join(f.read_text("utf-8") for f in sorted((PACKAGE / "serve").glob("*.py")))
    found = re.findall(r'Route\("([^"]+)", [\w.]+, methods=(\[[^\]]*\]|\w+)', source)
    return {(method, path) for path, methods in found for method in words_of(methods.upper())}


def words_of(text: str) -> list[str]:
    return re.findall(r"[\w-]+", text)


def fault(line: str) -> str | None:
    """Why nobody could run a line as it stands, None where they could."""
    words = shlex.split(line)
    check = CHECKS.get(words[0].rsplit("/", 1)[-1])
    return f"{words[0]} is no command of the documents" if check is None else check(words)


def no_target(words: list[str]) -> str | None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    return None if words[1] in targets else f"no target {words[1]}"


def no_extra(words: list[str]) -> str | None:
    name, *extras = words_of(words[-1])
    unknown = set(extras) - PROJECT["optional-dependencies"].keys()
    return None if name == PROJECT["name"] and not unknown else f"no such extra: {unknown}"


def no_route(words: list[str]) -> str | None:
    method = words[words.index("-X") + 1] if "-X" in words else "GET"
    (where,) = (word for word in words if word.startswith("localhost:8000/"))
    path = "/" + where.partition("/")[2].partition("?")[0]
    return None if (method, path) in routes() else f"no {method} {path}"


def refused(words: list[str]) -> str | None:
    try:
        start = words.index("serve") if words[0] == "torchrun" else 1
        arguments = cli.argument_parser().parse_args(words[start:])
        if "serve" in words:
            settings = resolve(arguments, SERVER_OPTIONS, {})
            settings.record(EngineConfig)
            settings.record(ServerConfig)
    except (SystemExit, ConfigError) as error:
        return f"refused: {error}"
    return None


def no_vllm(words: list[str]) -> str | None:
    extra = json.loads(words[-1])["kv_connector_extra_config"]
    storage = extra["secondary_tiers"][0]["storage"]
    return not_printed(words, "vllm", words[2], storage, extra["cpu_bytes_to_use"])


def no_sglang(words: list[str]) -> str | None:
    storage = json.loads(words[-1])["storage"]
    return not_printed(words, "sglang", words[4], storage, 8 << 30)


def not_printed(
    words: list[str], engine: str, model: str, storage: str, host_bytes: int
) -> str | None:
    """It is not what ``stratakv doctor`` prints."""
    setup = EngineSetup(
        engine=engine, model=model, storage=storage, storage_key_file=None, host_bytes=host_bytes
    )
    printed = command_line(setup)
    return None if shlex.split(printed) == words else f"the doctor prints {printed}"


def no_image(words: list[str]) -> str | None:
    """Of a Dockerfile that takes the argument, and serves from where the model is mounted."""
    file = (ROOT / "Dockerfile").read_text("utf-8")
    match words[1:]:
        case ["build", "-t", "stratakv", "--build-arg", name, "."] if f"\nARG {name}\n" in file:
            return None
        case ["run", "-p", ports, "-v", mount, "stratakv"]:
            served = f'"{mount.split(":")[1]}"' in file and f"EXPOSE {ports.split(':')[1]}" in file
            return None if served else f"the image does not serve {mount} on {ports}"
        case _:
            return f"{shlex.join(words)} is not checked"


CHECKS = {
    "stratakv": refused, "torchrun": refused, "make": no_target, "pip": no_extra, "curl": no_route,
    "vllm": no_vllm, "python3": no_sglang, "docker": no_image,
}  # fmt: skip


@pytest.mark.parametrize(("page", "line"), SHELL, ids=[f"{p}: {line}"[:60] for p, line in SHELL])
def test_a_command_of_the_documents_can_be_run(page, line):
    assert fault(line) is None, page


@pytest.mark.parametrize("line", [
    "stratakv serve MODEL --tpp 2", "stratakv serve MODEL --storage-shards 0", "make demmo",
    "curl localhost:8000/cache/stor", "curl -X PUT localhost:8000/cache/storage/clear",
    "pip install 'stratakv[server]'", "rm -rf store",
    "docker build -t stratakv --build-arg INDEX .", "docker run -p 80:81 -v /m:/model:ro stratakv",
    """vllm serve MODEL --kv-transfer-config '{"kv_connector_extra_config": {"cpu_bytes_to_use": 1,
    "secondary_tiers": [{"storage": "memory://"}]}}'""",
])  # fmt: skip
def test_a_command_that_cannot_is_seen(line, capsys):
    assert fault(line)


def test_every_block_says_what_it_is():
    sample = "   ```python\n   a = 1\n   ```\n\n```\nsecret\n```\n"
    assert [(b.language, b.code) for b in blocks_of("x.md", sample)] == [
        ("python", "a = 1\n"), ("", "secret\n"),
    ]  # fmt: skip
    assert not [(b.page, b.code) for b in BLOCKS if b.language not in LANGUAGES]


def test_every_file_of_settings_in_the_documents_holds_settings():
    keys = {option.key for option in SERVER_OPTIONS}
    files = [tomllib.loads(block.code) for block in BLOCKS if block.language == "toml"]
    assert files
    assert not [file.keys() - keys for file in files if file.keys() - keys]


def test_all_python_of_the_documents_is_run():
    texts = dict(repository())
    assert {b.page for b in BLOCKS if b.language == "python"} == PYTHON_IS_RUN_BY.keys()
    for page, test in PYTHON_IS_RUN_BY.items():
        assert f'python_of("{page}")' in texts[test]

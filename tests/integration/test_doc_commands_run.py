"""The shell lines of the documents, run: servers start and answer, verbs end well, so do calls.

A line is run as it stands but for what belongs to a reader's machine (``STAND_INS``, small sizes,
free ports). Owns the closed list of lines that are not run here, each with its reason.
"""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from stratakv import cli
from stratakv.bench.policy_traffic import ChatTraffic, generate
from stratakv.connect.engines import ENGINES
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.settings import resolve
from stratakv.serve.config_command import SERVER_OPTIONS
from stratakv.sim.trace import write_trace
from stratakv.testing.patience import PATIENCE_S
from tests.doc_blocks import shell_lines
from tests.fixtures.deepseek_v32 import v32_model
from tests.fixtures.lora import save_adapter
from tests.fixtures.models import tiny_model
from tests.fixtures.servers import free_port, redis_server
from tests.meta.source import ROOT
from tests.real_server import COMPLETIONS, completion, real_server, tokens
from tests.serving import train_tokenizer

ROLES = "tests/integration/test_disagg_servers.py starts these processes, on free ports"
ENGINE = "needs the released engine: tests/connect/environment.py"
NOT_RUN = {
    r"pip install ": "needs a network; tests/integration/test_packaging.py installs the wheel",
    r"docker (build|run) ": "tests/integration/test_dockerfile.py, where a container engine runs",
    r"make (demo|test)$": "is a step of continuous integration",
    r"make serve$": "port 8000 may be taken; the demo's model is served by demo/servers.py",
    r"stratakv serve .* --role ": ROLES,
    r"stratakv serve .* --device cuda": "needs a GPU",
    r"stratakv route ": ROLES,
    r"(torchrun .* )?stratakv serve .* --tp ": "tests/integration/test_serve_ranks.py starts ranks",
    r"stratakv verify ": "tests/integration/test_verify.py runs it, on shorter prompts",
    r"stratakv why-miss ": "tests/integration/test_why_miss.py asks a server that has had requests",
    r"vllm serve ": ENGINE,
    r"stratakv bench connect ": ENGINE,
    r"stratakv bench sparse ": "takes minutes; tests/unit/test_bench_sparse.py runs its parts",
    r"python3 -m sglang\.": ENGINE,
}
"""How a line begins -> why it is not run here."""
STAND_INS = {"file:///var/lib/stratakv": "file://{here}/store", "redis://cache:6379/0": "{redis}"}
SMALL = {
    "--page-tokens": "8", "--dtype": "float32", "--device-memory": "4MiB", "--host-memory": "4MiB",
    "--max-running": "4", "--step-tokens": "64", "--chunk-tokens": "24", "--max-model-len": "160",
    "--chat-tokens": "64",
}  # fmt: skip
PROMPT = [token % 256 for token in tokens(40, 1)]
BUFFER = "--device-buffer-size"


def program_of(line: str) -> str:
    return line.removeprefix(".venv/bin/")


def reasons(line: str) -> list[str]:
    return [why for start, why in NOT_RUN.items() if re.match(start, line)]


ALL = [program_of(line) for _, line in shell_lines()]
LINES = list(dict.fromkeys(line for line in ALL if not reasons(line)))
SERVERS = [line for line in LINES if line.startswith("stratakv serve ")]
CURLS = [line for line in LINES if line.startswith("curl ")]
VERBS = [line for line in LINES if re.match("stratakv (?!serve )", line)]


def test_every_line_is_run_or_has_one_reason_and_every_reason_a_line():
    assert sorted(LINES) == sorted([*SERVERS, *CURLS, *VERBS])
    assert all(len(reasons(line)) <= 1 for line in ALL)
    for start, why in NOT_RUN.items():
        assert any(re.match(start, line) for line in ALL), start
        assert all((ROOT / name).is_file() for name in re.findall(r"\w+/[\w/]+\.py", why))


@pytest.fixture(scope="module")
def redis():
    with redis_server() as running:
        yield f"redis://127.0.0.1:{running.port}/0"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """``sparse``: of a kind whose rows an indexer selects."""
    found = dict[str, Path]()
    for name, model in (("plain", tiny_model("llama")), ("sparse", v32_model("small"))):
        found[name] = train_tokenizer(tmp_path_factory.mktemp(name))
        model.save_pretrained(found[name])
    return found


@pytest.fixture
def here(tmp_path, monkeypatch, models):
    """A reader's directory: their model, adapters, trace and key are in it."""
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/model").symlink_to(models["plain"])
    for seed, name in enumerate(("sql", "poems")):
        save_adapter(tmp_path / "path/to" / name, "llama", seed)
    (tmp_path / "key").write_text("11" * 32)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "store").mkdir()
    write_trace(tmp_path / "conversation.jsonl", generate(ChatTraffic(chats=3)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_here(line: str, here: Path, redis: str) -> list[str]:
    """The words of a line, with what stands here for a reader's machine."""
    for theirs, ours in STAND_INS.items():
        line = line.replace(theirs, ours.format(here=here, redis=redis))
    return shlex.split(re.sub(r"tcp://\*:\d+", lambda _: f"tcp://127.0.0.1:{free_port()}", line))


def settings(words: list[str]) -> tuple[EngineConfig, ServerConfig]:
    """Of a line of ``serve``, with small sizes behind its own."""
    small = SMALL | ({BUFFER: "56"} if BUFFER in words else {})
    line = [*words[1:], *(part for pair in small.items() for part in pair)]
    arguments = cli.argument_parser().parse_args(line)
    found = resolve(arguments, SERVER_OPTIONS, {})
    return found.record(EngineConfig), found.record(ServerConfig)


@pytest.mark.parametrize("line", SERVERS)
def test_a_server_of_the_documents_starts_and_answers(line, here, models, redis):
    engine, server = settings(words_here(line, here, redis))
    selects = engine.sparse_offload and engine.approximate_pages is None
    model = models["sparse"] if selects else here / "path/to/model"
    with real_server(model, engine, server) as live:
        for name in (None, *engine.adapters()):
            body = completion(PROMPT, 4) | ({} if name is None else {"model": name})
            answer = httpx.post(live.url + COMPLETIONS, json=body, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4
        live.settled()


def fewer(words: list[str]) -> list[str]:
    """A replay of a second."""
    if "--branching" in words:
        return [*words, "--branching", "3", "--specs", "full"]
    if "conversation.jsonl" in words:
        return [*words, "--specs", "full"]
    return [*words, "--chats", "3", "--specs", "full"]


@pytest.mark.parametrize("line", VERBS)
def test_a_verb_of_the_documents_ends_well(line, here, redis, capsys):
    words = words_here(line, here, redis)[1:]
    code = cli.main(fewer(words) if words[:2] == ["bench", "policy"] else words)
    shown = capsys.readouterr().out
    if words[0] == "doctor" and {*words} & {*ENGINES}:  # the engine itself is not here
        lacking = [text.split()[1] for text in shown.splitlines() if text.startswith("bad ")]
        assert (code, lacking) == (1, ["release:", "interface:"]), shown
    else:
        assert code == 0
        assert shown
    for written in re.findall(r"--json (\S+)", line):
        assert json.loads((here / written).read_text())


def test_calls_of_the_documents_are_answered_one_after_the_other(models, redis):
    curl = shutil.which("curl") or pytest.skip("no curl on this machine: apt-get install curl")
    engine, _ = settings(["stratakv", "serve", "MODEL"])
    with real_server(models["plain"], engine, ServerConfig(admin_key="KEY")) as live:
        for line in CURLS:
            words = words_here(line, Path(), redis)[1:]
            words = [word.replace("localhost:8000", f"127.0.0.1:{live.port}") for word in words]
            done = subprocess.run(
                [curl, "--silent", "--show-error", "--fail-with-body", *words],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            assert json.loads(done.stdout)
        live.settled()

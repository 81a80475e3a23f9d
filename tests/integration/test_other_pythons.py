"""The library on the other Pythons that are on this machine: its package is built there, with the
helpers in C, and the tests that need no torch pass.

Each in a fresh environment, into which pip installs what it needs from wherever it finds packages.
torch itself is 5 GB for each, and stays out.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from stratakv.cli import SERVE_MODULES
from tests.meta.source import ROOT
from tests.packages import done, run, sdist_in

pytestmark = pytest.mark.long

MINORS = [minor for minor in (11, 12, 13, 14) if minor != sys.version_info.minor]
ROOMS = ("core", "spec", "tree", "memory", "policy", "agreement", "storage", "tiers", "transfer",
    "sparse", "cache", "disagg")  # fmt: skip
CONFORMANCE = ("cpu_transfer", "storage_memory", "storage_file",
    "transport_loopback", "transport_simulated")  # fmt: skip
HELPERS = ("core._page_keys", "tree._path_columns", "transfer._gather", "sparse._swap_in",
    "sparse._reads", "engine.deepseek._scores")  # fmt: skip


def python_of(minor: int) -> str | None:
    """One that runs and can make environments: of the PATH, or of pyenv, whose shims may not."""
    kept = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3"))
    for found in (shutil.which(f"python3.{minor}"), *reversed(kept)):
        if found is None:
            continue
        code = "import sys, ensurepip, venv; print(*sys.version_info[:2])"
        try:
            if run(found, "-c", code).stdout.split() == ["3", str(minor)]:
                return str(found)
        except OSError:
            continue
    return None


@dataclass(frozen=True, slots=True)
class OtherPython:
    minor: int
    program: Path

    def pytest(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = (self.program, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long")
        return run(*command, *words, cwd=ROOT)

    def without_torch(self, files: list[str]) -> list[str]:
        """Of ``files`` those that the library's own environment can import."""
        printed = self.pytest("--collect-only", *files).stdout
        lacking = set(re.findall(r"No module named '([^'.]+)", printed))
        assert lacking <= {*SERVE_MODULES, "openai", "httpx", "peft"}, lacking
        failed = set(re.findall(r"^ERROR (\S+)", printed, re.MULTILINE))
        assert bool(failed) == bool(lacking), printed
        return [file for file in files if file not in failed]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return sdist_in(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module", params=MINORS, ids=[f"3.{minor}" for minor in MINORS])
def other(request, sdist, tmp_path_factory):
    if (found := python_of(request.param)) is None:
        pytest.skip(f"no Python 3.{request.param} with venv on this machine")
    environment = tmp_path_factory.mktemp("other") / "venv"
    done(found, "-m", "venv", environment)
    program = environment / "bin" / "python"
    done(program, "-m", "pip", "install", "-q", "--no-compile", f"{sdist}[testing,redis]")
    yield OtherPython(request.param, program)
    shutil.rmtree(environment)


def test_helpers_in_c_are_built_where_they_are_here(other):
    names = [f"stratakv.{name}" for name in HELPERS if find_spec(f"stratakv.{name}") is not None]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done(other.program, "-W", "error", "-c", code, *names)


def test_the_command_runs_there(other):
    printed = done(other.program, "-W", "error", "-m", "stratakv", "doctor").splitlines()
    assert f"versions: Python 3.{other.minor}." in printed[0]


@pytest.mark.parametrize("room", ROOMS)
def test_what_needs_no_torch_passes(other, room):
    files = sorted(str(f.relative_to(ROOT)) for f in ROOT.glob(f"tests/unit/test_{room}_*.py"))
    chosen = other.without_torch(files)
    assert chosen, "a room of the library has tests that need none"
    ended = other.pytest(*chosen)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


@pytest.mark.parametrize("suite", CONFORMANCE)
def test_public_suites_pass(other, suite):
    ended = other.pytest(f"tests/conformance/test_{suite}.py")
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]

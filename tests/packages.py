"""The project as packages, and programs of other environments. Owns how they are built and run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from stratakv.testing.patience import PATIENCE_S
from tests.meta.source import ROOT


def run(*command: object, **options) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=environment, **options,
    )  # fmt: skip


def done(*command: object, **options) -> str:
    ended = run(*command, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    """With the tests' own setuptools, as pip would with a fresh one."""
    into.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(into)!r})"
    done(sys.executable, "-c", code, cwd=source)
    (built,) = into.iterdir()
    return built


def sdist_in(directory: Path) -> Path:
    """Of the sources alone, so that nothing else that lies beside them is in it."""
    source = directory / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    rubbish = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=rubbish)
    return build("sdist", source, directory / "sdist")

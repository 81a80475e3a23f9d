"""The bench of what an import costs, and what must not be loaded by it."""

import json
import subprocess
import sys

import pytest

from stratakv.bench import imports

HEAVY = (
    "asyncio", "concurrent", "ctypes.util", "email", "http", "importlib.metadata",
    "multiprocessing", "prometheus_client", "pytest", "selectors", "socket", "ssl", "starlette",
    "subprocess", "tempfile", "torch", "transformers", "uvicorn", "xml", "zipfile", "zmq",
)  # fmt: skip
"""Beyond what NumPy loads."""
READS_IN_THREADS = {"connect": {"concurrent", "tempfile"}}
"""What names a model reads its files."""
NOT_IN_THE_TIERS = ("ipaddress", "pathlib", "stratakv.core.config", "urllib.parse", "xxhash")


def loaded_with(*modules: str) -> set[str]:
    """What a fresh interpreter that has NumPy loads with ``modules``."""
    code = (
        "import json, sys, numpy; before = set(sys.modules); "
        f"import {', '.join(modules)}; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("part", imports.PARTS)
def test_what_embedders_import_loads_nothing_heavy(part):
    loaded = loaded_with(*imports.PARTS[part])
    assert "stratakv" in loaded
    assert loaded & set(HEAVY) == READS_IN_THREADS.get(part, set())
    if part in {"tree", "tiers"}:
        assert loaded.isdisjoint(NOT_IN_THE_TIERS)


@pytest.mark.parametrize("part", imports.TEST_PARTS)
def test_suites_bring_pytest_or_hypothesis_and_no_engine(part):
    loaded = loaded_with(*imports.TEST_PARTS[part])
    assert {"pytest", "hypothesis"} & loaded
    assert loaded.isdisjoint({"torch", "transformers", "starlette", "uvicorn", "zmq"})


@pytest.fixture
def few(monkeypatch):
    """Each part is an interpreter that starts."""
    monkeypatch.setattr(imports, "REPEATS", 1)
    for name in ("PARTS", "TEST_PARTS"):
        monkeypatch.setattr(imports, name, dict([*getattr(imports, name).items()][-2:]))


@pytest.mark.usefixtures("few")
def test_every_part_is_measured_and_written(capsys):
    report = imports.run()
    assert json.loads(json.dumps(report)) == report
    assert report["added_ms"].keys() == imports.PARTS.keys()
    assert report["suites_added_ms"].keys() == imports.TEST_PARTS.keys()
    assert report["pytest_ms"] > report["numpy_ms"] > 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*imports.PARTS, *imports.TEST_PARTS))


@pytest.mark.usefixtures("few")
def test_without_pytest_the_library_alone_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(imports, "TEST_BASELINE", ("numpy", "no_such_package"))
    assert imports.run().keys() == {"numpy_ms", "added_ms"}
    assert "Hypothesis" not in capsys.readouterr().out

"""The environments of released engines, and lives of an engine in one. Owns the processes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from stratakv.testing.patience import PATIENCE_S
from tests.meta.source import ROOT

HERE = Path(__file__).parent
ENGINES = ROOT / ".venv-connect"
"""What ``make test-connect`` makes."""
STEPS = 6
"""A process starts an engine several times, each of which takes as long as many tests do."""


def engine_process(program, *arguments, **environment):
    """A program of this directory, begun in the engines' environment."""
    python = ENGINES / "bin" / "python"
    if not python.exists():
        pytest.skip("no environment of the engines: make test-connect makes it")
    # The package that is tested, wherever the environment was made.
    paths = os.pathsep.join([str(ROOT / "src"), str(HERE)])
    settings = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    settings.pop("VIRTUAL_ENV", None)
    return subprocess.Popen(
        [python, HERE / program, *map(str, arguments)],
        env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ended(process):
    """Its output; an assertion where it failed or hangs."""
    try:
        output, _ = process.communicate(timeout=STEPS * PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output[-8000:]
    return output


def faulty_package(directory):
    """Where it is, for ``PYTHONPATH``: what an installer writes down of ``faulty_store``."""
    written = directory / "site" / "faulty_store-1.0.dist-info"
    written.mkdir(parents=True)
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-store\nVersion: 1.0\n")
    (written / "entry_points.txt").write_text(
        "[stratakv.storage]\nfaulty = faulty_store:open_store\n"
    )
    return written.parent


def misbehaving(directory):
    """URLs of one store, by how it behaves."""
    faults = {
        "well": "",
        "lying": "contains_lies=0.3&read_misses=0.1&read_fails=0.1&read_corrupt=0.1&write_lost=0.2",
        "down": "call_fails=0.2&call_breaks=0.1&write_fails=0.2",
        "slow": "delay_s=0.02", "full": "write_refused=0.5",
        "hanging": "call_hangs=0.05&hang_s=1.0",
    }  # fmt: skip
    return {name: f"faulty://{directory}?{query}" for name, query in faults.items()}


class Lives:
    """Runs ``program`` on cases, in a directory of its own."""

    def __init__(self, program, directory, **environment):
        self.program = program
        self.directory = directory
        self.environment = environment
        self.count = 0

    def begin(self, cases):
        """A process that lives them one after another, and where its answers will be."""
        self.count += 1
        given = self.directory / f"cases{self.count}.json"
        answers = self.directory / f"answers{self.count}.json"
        given.write_text(json.dumps(cases))
        return engine_process(self.program, given, answers, **self.environment), answers

    def finish(self, begun):
        process, answers = begun
        ended(process)
        return json.loads(answers.read_text())

    def live(self, *cases):
        return self.finish(self.begin(cases))


def tokens_of(life):
    return [answer["tokens"] for answer in life["answers"]]


def cached_of(life):
    return [answer["cached"] for answer in life["answers"]]

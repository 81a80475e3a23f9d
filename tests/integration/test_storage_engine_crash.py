"""kill -9 at any moment of an engine that serves and stores: the next one over the same directory
hits what is there, and says exactly what it would have said.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from stratakv.storage.file.fsck import fsck
from tests.storage_cases import file_url, lost, settled, storage_lab
from tests.storage_engines import PAGE, PROMPTS


@dataclass
class Maker:
    """The process that makes engines."""

    process: "subprocess.Popen[str]"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def start(self, directory: Path, seed: int) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{directory} {seed}\n")
        self.process.stdin.flush()
        return int(self._line())

    def killed(self, engine: int, served: int, after_s: float) -> list[str]:
        """What it said until it died: ``after_s`` after its ``served``th answer."""
        lines = [self._line() for _ in range(served)]
        time.sleep(after_s)
        os.kill(engine, signal.SIGKILL)
        while not (line := self._line()).startswith("="):
            assert line, "the maker of engines has died"
            lines.append(line)
        assert line == f"={-signal.SIGKILL}", f"it was dead before: {line}"
        return lines


@contextmanager
def maker(family: str) -> Iterator[Maker]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.storage_engines", family],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield Maker(process)
    finally:
        process.kill()
        process.communicate()


def verify(family: str, directory: Path) -> int:
    """Ask everything of a new engine, and look at every byte on the disk; tokens from storage."""
    found = fsck(directory)
    assert (found.bad_headers, found.bad_payloads, found.quarantined) == (0, 0, 0), found.problems
    assert found.broken == 0, found.problems
    came = 0
    with storage_lab(family, PAGE, file_url(directory)) as this:
        for tokens in PROMPTS:
            came += this.ask(tokens).cached.storage
        assert lost(this).keys() <= {"window_incomplete", "state_missing"}
        settled(this)
    found = fsck(directory)
    assert found.clean, found.problems
    return came


def campaign(family: str, directory: Path, rounds: int) -> None:
    rng = random.Random(rounds)
    came = 0
    with maker(family) as engines:
        for turn in range(rounds):
            # Every third time a fresh directory: segments are being made when it dies.
            place = directory / f"{turn // 3}"
            place.mkdir(exist_ok=True)
            engine = engines.start(place, turn)
            engines.killed(engine, rng.randrange(6), rng.uniform(0, 0.15))
            if (place / "ledger").exists():
                came += verify(family, place)
    assert came > 100 * rounds, f"only {came} tokens came from storage: that proves little"


def test_kill_9_of_an_engine(tmp_path):
    campaign("gemma3", tmp_path, 3)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4", "qwen3_next", "mamba2"])
def test_kill_9_of_an_engine_40_times(family, tmp_path):
    campaign(family, tmp_path, 40)

"""kill -9 at any moment of a write: no wrong byte afterwards, and nothing acknowledged is lost."""

import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from stratakv.core.clock import WallClock
from stratakv.storage.backend import ReadStatus
from stratakv.storage.file.fsck import fsck
from stratakv.storage.file.room import Keeping
from stratakv.storage.file.store import FileStore
from stratakv.testing.storage_conformance import FORM, fetch, keys_of, store
from tests.storage_writer import KEYS

ROOMY, TIGHT = 8 << 20, 2 << 20
"""Room for every key, and room for a quarter."""
KEYS_OF = [*keys_of("killed", KEYS), *keys_of("killed", KEYS, group=1)]


def start(
    directory: Path, seed: int, *, quota: int = ROOMY, limit: int = 0
) -> "subprocess.Popen[str]":
    arguments = [str(directory), *map(str, (seed, quota, limit))]
    command = [sys.executable, "-m", "tests.storage_writer", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def killed(process: "subprocess.Popen[str]", after_s: float) -> list[str]:
    """The lines it had printed whole when it died."""
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    return [line for line in output.splitlines(keepends=True) if line.endswith("\n")]


def acknowledged(lines: list[str]) -> tuple[set[int], int]:
    """(keys that were stored and not removed since, pages evicted at the last line)."""
    there: set[int] = set()
    evicted = 0
    for word in " ".join(lines).split():
        if word[0] == "e":
            evicted = int(word[1:])
        elif word[0] == "+":
            there.add(int(word[1:]))
        else:
            there.discard(int(word[1:]))
    return there, evicted


def verify(directory: Path, lines: list[str], quota: int = ROOMY) -> int:
    """No corrupt and no wrong page, and where there was room, nothing is gone that was
    acknowledged. Returns how many pages were."""
    there, evicted = acknowledged(lines)
    with closing(FileStore(directory, FORM, Keeping(quota_bytes=quota), WallClock())) as backend:
        statuses = fetch(backend, KEYS_OF)  # compares every byte of every hit
        assert ReadStatus.CORRUPT not in statuses
        assert ReadStatus.FAILED not in statuses
        assert backend.stats().damaged_headers == 0
        if quota == ROOMY:
            assert not evicted
            missing = [at for at in there if statuses[at] is not ReadStatus.HIT]
            assert not missing, f"{len(missing)} acknowledged pages are gone"
        store(backend, KEYS_OF[:20])
        assert set(fetch(backend, KEYS_OF[:20])) == {ReadStatus.HIT}
    findings = fsck(directory)
    assert [findings.bad_headers, findings.bad_payloads, findings.broken] == [0, 0, 0]
    return len(there)


def campaign(directory: Path, rounds: int, quota: int) -> None:
    rng = random.Random(rounds)
    stored, lines = 0, []
    for turn in range(rounds):
        # Every fourth time a fresh directory: segments are being made when it dies.
        lines = [] if turn % 4 == 0 else lines
        place = directory / f"{turn // 4}"
        lines += killed(start(place, turn, quota=quota), rng.uniform(0, 0.25))
        stored += verify(place, lines, quota)
    assert stored > 5 * rounds, f"only {stored} pages: too little to prove anything"


@pytest.mark.parametrize("quota", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_kill_9_while_writing(tmp_path: Path, quota: int) -> None:
    campaign(tmp_path, 4, quota)


@pytest.mark.long
@pytest.mark.parametrize("quota", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_kill_9_while_writing_200_times(tmp_path: Path, quota: int) -> None:
    campaign(tmp_path, 200, quota)


def test_two_processes_share_a_directory_and_one_is_killed(tmp_path: Path) -> None:
    one, two = start(tmp_path, 1), start(tmp_path, 2)
    killed(one, 0.3)
    with closing(FileStore(tmp_path, FORM, Keeping(quota_bytes=ROOMY), WallClock())) as backend:
        for _ in range(20):
            statuses = fetch(backend, KEYS_OF)
            assert ReadStatus.CORRUPT not in statuses
            assert ReadStatus.FAILED not in statuses
            store(backend, KEYS_OF[:30])
            physical = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*.seg"))
            assert physical <= ROOMY
        assert ReadStatus.HIT in statuses
    assert two.poll() is None, "the other process died of it"
    killed(two, 0)


def test_a_disk_that_is_full_turns_growth_off_and_what_is_there_stays(tmp_path: Path) -> None:
    """The limit of a file's size stands in for the disk's: it needs no rights and no mount."""
    process = start(tmp_path, 3, limit=64 << 10)
    lines = killed(process, 0.4)
    assert not acknowledged(lines)[0], "a segment larger than the disk was made"
    assert not list(tmp_path.glob("*.seg")), "an unfinished segment was left"
    verify(tmp_path, [])

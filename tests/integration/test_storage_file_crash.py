"""kill -9 at any moment of a write: no wrong byte afterwards, and nothing acknowledged is lost."""

import random
import signal
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from stratakv.core.clock import WallClock
from stratakv.storage.backend import ReadStatus
from stratakv.storage.file.fsck import fsck
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore
from stratakv.testing.storage_conformance import FORM, fetch, keys_of, store
from tests.forks import fork_server
from tests.storage_writer import KEYS, write_forever

ROOMY, TIGHT = 8 << 20, 2 << 20
"""Room for every key, and room for a quarter."""
KEYS_OF = [*keys_of("killed", KEYS), *keys_of("killed", KEYS, group=1)]


class Writer:
    """``tests.storage_writer`` in a process of its own, from the moment it is ready."""

    def __init__(self, directory: Path, seed: int, *, quota: int = ROOMY, limit: int = 0) -> None:
        context = fork_server()
        self._received, sender = context.Pipe(duplex=False)
        arguments = (sender, directory, seed, quota, limit)
        self._process = context.Process(target=write_forever, args=arguments, daemon=True)
        self._process.start()
        sender.close()
        assert self._received.recv() == "ready"

    def read(self) -> str:
        """What it says next."""
        return self._received.recv()

    def killed(self, words: int, pause_s: float = 0.0) -> list[str]:
        """What it had said when it died: ``pause_s`` after ``words`` more words."""
        lines = [self.read() for _ in range(words)]
        time.sleep(pause_s)  # so that it may be anywhere between two words
        self._process.kill()
        self._process.join()
        assert self._process.exitcode == -signal.SIGKILL, "it died on its own"
        with suppress(EOFError, OSError):  # the last word may be cut short
            while True:
                lines.append(self._received.recv())
        self._received.close()
        return lines

    def end(self) -> None:
        self._process.kill()
        self._process.join()


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
    with closing(
        FileStore(directory, FORM, StoreLimits(quota_bytes=quota), WallClock())
    ) as backend:
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
        lines += Writer(place, turn, quota=quota).killed(rng.randrange(100), rng.uniform(0, 0.005))
        stored += verify(place, lines, quota)
    assert stored > 5 * rounds, f"only {stored} pages: too little to prove anything"


@pytest.mark.parametrize("rounds", [8, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("quota", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_kill_9_at_some_moments_while_writing(tmp_path: Path, quota: int, rounds: int) -> None:
    campaign(tmp_path, rounds, quota)


@pytest.mark.long
@pytest.mark.parametrize("quota", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_kill_9_while_writing_200_times(tmp_path: Path, quota: int) -> None:
    campaign(tmp_path, 200, quota)


def test_two_processes_share_a_directory_and_one_is_killed(tmp_path: Path) -> None:
    one, two = Writer(tmp_path, 1), Writer(tmp_path, 2)
    one.killed(100)
    with closing(FileStore(tmp_path, FORM, StoreLimits(quota_bytes=ROOMY), WallClock())) as backend:
        for _ in range(20):
            statuses = fetch(backend, KEYS_OF)
            assert ReadStatus.CORRUPT not in statuses
            assert ReadStatus.FAILED not in statuses
            store(backend, KEYS_OF[:30])
            assert backend.stats().physical_bytes <= ROOMY
        assert ReadStatus.HIT in statuses
    two.killed(0)


def test_a_disk_that_is_full_turns_growth_off_and_what_is_there_stays(tmp_path: Path) -> None:
    """The limit of a file's size stands in for the disk's: it needs no rights and no mount."""
    lines = Writer(tmp_path, 3, limit=64 << 10).killed(60)
    assert not acknowledged(lines)[0], "a segment larger than the disk was made"
    assert not list(tmp_path.glob("*.seg")), "an unfinished segment was left"
    verify(tmp_path, [])

"""A file system that is really full, and two processes that share a directory too small for both.

The disk is a small tmpfs that the test mounts, where it may; the limit of a file's size stands in
for it elsewhere (``test_storage_file_crash``).
"""

import os
import subprocess
from collections.abc import Generator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from stratakv.core.clock import WallClock
from stratakv.storage.backend import Everything, ReadStatus, WriteStatus
from stratakv.storage.file.fsck import fsck
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore
from stratakv.testing.storage_conformance import FORM, fetch, keys_of, store
from tests.integration.test_storage_file_crash import (
    KEYS_OF,
    ROOMY,
    TIGHT,
    Writer,
    acknowledged,
)
from tests.storage_files import Place

HIT, MISS, STORED = ReadStatus.HIT, ReadStatus.MISS, WriteStatus.STORED
DISK_BYTES = 4 << 20


@pytest.fixture
def writer(tmp_path: Path, request: pytest.FixtureRequest) -> Generator[Writer, None, None]:
    process = Writer(tmp_path, 5, quota=request.param)
    yield process
    process.end()


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path, None, None]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(tmp_path)]
    try:
        done = subprocess.run(command, check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no mount on this machine")
    if done.returncode:
        pytest.skip("mounting a small disk needs the rights of root")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_fills_up_stops_growth_and_keeps_everything_whole(disk: Path) -> None:
    """The quota is 16 times the disk, so it is the disk that says no, in the middle of a batch."""
    place = Place(disk / "store")
    with closing(place.open()) as backend:
        seen: set[WriteStatus] = set()
        for turn in range(3):
            keys = keys_of(f"fill {turn}", 400, group=turn % 2)
            statuses = store(backend, keys)
            seen |= set(statuses)
            stored = [status is WriteStatus.STORED for status in statuses]
            assert backend.contains(keys).tolist() == stored
            assert fetch(backend, keys) == [HIT if there else MISS for there in stored]
        assert WriteStatus.REFUSED in seen, "the disk was never full"
        assert WriteStatus.FAILED not in seen
        assert not backend.stats().growing
        assert place.physical_bytes() <= DISK_BYTES
    assert fsck(place.path).clean


def fill(disk: Path) -> Path:
    """Somebody else takes all that is left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    usage = os.statvfs(disk)
    assert usage.f_bavail == 0
    return filler


def test_on_a_disk_that_others_filled_it_lives_on_what_it_has_until_there_is_room(
    disk: Path,
) -> None:
    place = Place(disk / "store")
    old, new = keys_of("old", 40), keys_of("new", 40, group=1)
    with closing(place.open()) as backend:
        store(backend, old)
        had_bytes, filler = place.physical_bytes(), fill(disk)
        statuses = store(backend, new)
        assert WriteStatus.FAILED not in statuses
        assert place.physical_bytes() <= had_bytes
        stored = [status is WriteStatus.STORED for status in statuses]
        assert fetch(backend, new) == [HIT if there else MISS for there in stored]
        assert set(fetch(backend, old)) == {MISS}, "what made room is still there"
        filler.unlink()
        place.clock.advance(2)
        assert WriteStatus.STORED in store(backend, old)
        assert backend.stats().growing
        assert set(fetch(backend, old + new)) == {HIT}
        assert place.physical_bytes() > had_bytes
    assert fsck(place.path).clean


def test_a_disk_without_a_free_byte_is_read_and_a_new_store_on_it_stores_nothing(
    disk: Path,
) -> None:
    place, old = Place(disk / "store"), keys_of("old", 3)
    with closing(place.open()) as backend:
        store(backend, old)
    fill(disk)
    with closing(place.open()) as backend:
        assert fetch(backend, old) == [HIT] * 3
    with closing(Place(disk / "fresh").open()) as backend:
        assert set(store(backend, old)) == {WriteStatus.REFUSED}
        assert fetch(backend, old) == [MISS] * 3


@pytest.mark.parametrize("writer", [TIGHT], indirect=True)
def test_one_process_evicts_what_another_reads(tmp_path: Path, writer: Writer) -> None:
    hits = misses = 0
    lines: list[str] = []
    with closing(FileStore(tmp_path, FORM, StoreLimits(quota_bytes=TIGHT), WallClock())) as reader:
        while min(hits, misses, acknowledged(lines)[1]) < 100:
            lines.append(writer.read())
            statuses = fetch(reader, KEYS_OF[:120])  # compares every byte of every hit
            assert set(statuses) <= {HIT, MISS}
            hits, misses = hits + statuses.count(HIT), misses + statuses.count(MISS)
            assert reader.stats().physical_bytes <= TIGHT
        assert reader.stats().counters.read_errors == 0
    writer.killed(0)


@pytest.mark.parametrize("writer", [ROOMY], indirect=True)
def test_everything_is_forgotten_while_another_process_writes(
    tmp_path: Path, writer: Writer
) -> None:
    with closing(FileStore(tmp_path, FORM, StoreLimits(quota_bytes=ROOMY), WallClock())) as backend:
        for _ in range(20):
            removed = 0
            while not removed:
                removed = backend.remove(Everything.EVERYTHING)
            statuses = fetch(backend, KEYS_OF)
            assert set(statuses) <= {HIT, MISS}
        writer.killed(0)
        backend.remove(Everything.EVERYTHING)
        assert fetch(backend, KEYS_OF) == [MISS] * len(KEYS_OF)
    assert not list(tmp_path.glob("*.seg"))


def half_made(directory: Path, size_bytes: int) -> Path:
    """What a writer leaves that is killed while it makes a segment."""
    path = directory / "000000000777.seg"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    return path


def test_a_segment_that_was_never_finished_goes_with_everything(tmp_path: Path) -> None:
    with closing(FileStore(tmp_path, FORM, StoreLimits(quota_bytes=ROOMY), WallClock())) as backend:
        path = half_made(tmp_path, 1 << 16)
        assert set(store(backend, KEYS_OF[:3])) == {STORED}
        assert path.exists()
        assert backend.remove(Everything.EVERYTHING) == 3
        assert not path.exists()


def test_a_segment_that_was_never_finished_makes_room_for_another(tmp_path: Path) -> None:
    with closing(FileStore(tmp_path, FORM, StoreLimits(quota_bytes=TIGHT), WallClock())) as backend:
        path = half_made(tmp_path, TIGHT)
        assert set(store(backend, KEYS_OF[:3])) == {STORED}
        assert not path.exists()

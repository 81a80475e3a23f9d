"""Nothing that we did not write is ever written to, moved or deleted, and no directory of somebody
else's becomes a store.
"""

import os
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from stratakv.core.errors import ConfigError, StorageError
from stratakv.storage.backend import Everything, ReadStatus, WriteStatus
from stratakv.storage.file.fsck import fsck, lines_of
from stratakv.storage.file.recognise import NotOursError
from stratakv.storage.registry import open_storage
from stratakv.storage.urls import parse_storage_url
from stratakv.testing.storage_conformance import FORM, fetch, keys_of, store
from tests.storage_files import Place, flip

TEXT = b"Dear diary, today I was overwritten.\n" * 40
SEGMENT = "000000000001.seg"
KEYS = keys_of("ours", 3)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A user's file, somewhere else."""
    path = tmp_path / "diary"
    path.write_bytes(TEXT)
    return path


def picture(directory: Path) -> dict[str, object]:
    """Everything below a directory, with its inode, its times and what it holds."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        held = path.read_bytes() if path.is_file() else None
        found[str(path)] = (status.st_ino, status.st_mtime_ns, status.st_mode, held)
    return found


def a_directory(path: Path, _outside: Path) -> None:
    path.mkdir()


def a_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def a_hard_link(path: Path, outside: Path) -> None:
    path.hardlink_to(outside)


def a_pipe(path: Path, _outside: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path, _outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)  # a socket's path is short
        made.bind(path.name)


def a_text(path: Path, _outside: Path) -> None:
    path.write_bytes(TEXT)


def zeros(path: Path, _outside: Path) -> None:
    path.write_bytes(bytes(8192))


def nothing(path: Path, _outside: Path) -> None:
    path.touch()


def a_hole(path: Path, _outside: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 20)


Make = Callable[[Path, Path], None]
MADE: list[Make] = [
    a_directory, a_link, a_hard_link, a_pipe, a_socket, a_text, zeros, nothing, a_hole,
]  # fmt: skip


@pytest.fixture(params=MADE, ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    monkeypatch.chdir(tmp_path)
    return request.param


@pytest.mark.parametrize("name", ["ledger", SEGMENT, "notes.txt", ".hidden"])
def test_a_directory_of_somebody_elses_is_refused_before_anything_is_written(
    place: Place, outside: Path, make: Make, name: str
):
    place.path.mkdir()
    make(place.path / name, outside)
    if name == "ledger" and make is nothing:
        (place.path / "beside").touch()  # an empty one alone is only new
    before = picture(place.path)
    with pytest.raises(NotOursError, match="allowed is a directory that does not exist yet, an em"):
        place.open()
    url = parse_storage_url(f"file://{place.path}?quota=64MiB")
    with pytest.raises(ConfigError, match=rf"^--storage file://{place.path}: .*; allowed is a dir"):
        open_storage(url, FORM)
    for repair in (False, True):
        with pytest.raises(StorageError):
            fsck(place.path, repair=repair)
    assert picture(place.path) == before
    assert outside.read_bytes() == TEXT


def test_a_file_is_no_directory(place: Place):
    place.path.write_bytes(TEXT)
    with pytest.raises(NotOursError, match="is no directory; allowed is"):
        place.open()
    assert place.path.read_bytes() == TEXT


def test_an_empty_directory_and_a_new_file_system_become_stores(place: Place):
    (place.path / "lost+found").mkdir(parents=True)
    with closing(place.open()) as backend:
        assert store(backend, KEYS) == [WriteStatus.STORED] * 3
    with closing(place.open()) as backend:
        assert fetch(backend, KEYS) == [ReadStatus.HIT] * 3


def test_what_lies_beside_a_store_is_nobodys_business(place: Place, outside: Path, make: Make):
    """Also under the name of a segment, whatever is asked of the store."""
    with closing(place.open()) as backend:
        store(backend, KEYS)
    for name in ("00000000aaaa.seg", "0" * 11 + "2.seg", "notes.txt"):
        make(place.path / name, outside)
    (place.path / "ledger.bak").write_bytes(TEXT)
    foreign_segments = {
        path for path in place.path.iterdir() if path.name not in {"ledger", SEGMENT}
    }
    before = {
        name: seen for name, seen in picture(place.path).items() if Path(name) in foreign_segments
    }
    with closing(place.open(quota_bytes=4 << 20)) as backend:
        assert fetch(backend, KEYS) == [ReadStatus.HIT] * 3
        store(backend, keys_of("more than fits", 300))
        store(backend, keys_of("another group", 20, group=1))
        backend.remove(Everything.EVERYTHING)
        store(backend, KEYS)
    for repair in (False, True):
        found = fsck(place.path, repair=repair)
        assert (found.foreign, found.damage, found.clean) == (2, 0, True)
        lines = lines_of(place.path, found, repair=repair)
        assert "files named like segments that are not ours: 2" in lines
        assert "  00000000aaaa.seg: is not ours, and is left as it is" in lines
        assert lines[-1] == "clean"
    after = picture(place.path)
    assert {name: after.get(name) for name in before} == before
    assert outside.read_bytes() == TEXT


def test_a_damaged_segment_is_ours_all_the_same(place: Place):
    """It has lost the bytes that say so, but not its objects."""
    with closing(place.open()) as backend:
        store(backend, KEYS)
    flip(place.path / SEGMENT, 2)
    found = fsck(place.path, repair=True)
    assert (found.broken, found.foreign, found.mended) == (1, 0, 1)
    assert not list(place.path.glob("*.seg"))


def test_a_segment_whose_place_another_file_took_is_not_deleted(place: Place):
    with closing(place.open()) as backend:
        store(backend, KEYS)
        (place.path / SEGMENT).unlink()
        (place.path / SEGMENT).write_bytes(TEXT)
        backend.remove(Everything.EVERYTHING)
        assert (place.path / SEGMENT).read_bytes() == TEXT
        assert store(backend, KEYS) == [WriteStatus.STORED] * 3
    assert (place.path / SEGMENT).read_bytes() == TEXT
    with closing(place.open()) as backend:
        assert fetch(backend, KEYS) == [ReadStatus.HIT] * 3


def test_what_an_earlier_version_had_half_made_still_leaves(place: Place):
    """It has the disk's blocks, and nobody has written anything into them."""
    with closing(place.open()) as backend:
        store(backend, KEYS)
    half = place.path / "00000000aaaa.seg"
    with half.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
    if fsck(place.path).foreign:
        pytest.skip("this file system does not tell what was never written")
    assert fsck(place.path).unfinished == 1
    with closing(place.open()) as backend:
        backend.remove(Everything.EVERYTHING)
    assert not half.exists()


def test_a_store_that_lost_its_ledger_is_a_store(place: Place):
    with closing(place.open()) as backend:
        store(backend, KEYS)
    (place.path / "ledger").unlink()
    with closing(place.open()) as backend:
        assert fetch(backend, KEYS) == [ReadStatus.HIT] * 3

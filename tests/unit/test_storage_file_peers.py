"""Damage that one process finds in what another one writes: a server reads by one store and writes
by another."""

import errno
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from stratakv.storage.backend import Everything, ReadStatus, WriteStatus
from stratakv.storage.file.fsck import fsck
from stratakv.storage.file.segment import Segment
from stratakv.storage.file.store import FileStore
from stratakv.testing.storage_conformance import fetch, keys_of, store
from tests.storage_files import Place, flip_header, flip_payload, segments

HIT, MISS, CORRUPT = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.CORRUPT
STORED, PRESENT = WriteStatus.STORED, WriteStatus.PRESENT


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store")


def owned(backend: FileStore) -> int:
    return sum(placed.segment.owned for placed in backend._catalog.placed.values())


def test_a_page_that_goes_bad_under_a_live_writer_is_stored_anew(place: Place):
    keys = keys_of("live", 3)
    with closing(place.open()) as reader, closing(place.open()) as writer:
        store(writer, keys)
        assert fetch(reader, keys) == fetch(writer, keys) == [HIT] * 3
        flip_payload(place.path, keys[1], 5)
        assert fetch(reader, keys) == [HIT, CORRUPT, HIT]
        assert writer.contains(keys).tolist() == [True, False, True]
        assert store(writer, keys) == [PRESENT, STORED, PRESENT]
        assert fetch(reader, keys) == fetch(writer, keys) == [HIT] * 3
        assert writer.stats().counters.quarantined == 1
    assert fsck(place.path).quarantined == 1, "the place of the damage was used again"


def test_a_header_that_goes_bad_under_a_live_writer_is_stored_anew(place: Place):
    keys = keys_of("header", 3)
    with closing(place.open()) as reader, closing(place.open()) as writer:
        store(writer, keys)
        assert fetch(reader, keys) == [HIT] * 3
        flip_header(place.path, keys[1], 30)
        store(writer, keys_of("more", 1))  # the reader looks at all headers again
        assert reader.contains(keys_of("none", 1)).tolist() == [False]
        assert fetch(reader, keys) == [HIT, MISS, HIT]
        assert store(writer, keys) == [PRESENT, STORED, PRESENT]
        assert fetch(reader, keys) == [HIT] * 3


def test_damage_that_a_writer_did_not_live_to_see_is_seen_by_the_next(place: Place):
    keys = keys_of("dead", 3)
    writer = place.open()
    store(writer, keys)
    with closing(place.open()) as reader:
        flip_payload(place.path, keys[1], 5)
        assert fetch(reader, keys) == [HIT, CORRUPT, HIT]
        writer.close()
        with closing(place.open()) as second:
            assert store(second, keys_of("adopt", 1)) == [STORED]
            assert store(second, keys) == [PRESENT, STORED, PRESENT]
        assert fetch(reader, keys) == [HIT] * 3


def test_a_mark_at_a_page_that_is_whole_changes_nothing(place: Place):
    keys = keys_of("whole", 3)
    with closing(place.open()) as reader, closing(place.open()) as writer:
        store(writer, keys)
        for _, segment in segments(place.path):
            for slot in (0, 1, 2, segment.geometry.slots - 1, segment.geometry.slots):
                segment.notes.mark(slot)
        reader._catalog.report_damage()
        assert writer.contains(keys).all()
        assert writer.stats().counters.quarantined == 0
        assert not any(segment.notes.marks() for _, segment in segments(place.path))
        assert fetch(reader, keys) == [HIT] * 3


def test_who_finds_damage_does_not_become_the_writer(place: Place):
    keys = keys_of("reader", 6)
    with closing(place.open()) as writer:
        store(writer, keys)
    flip_payload(place.path, keys[2], 5)
    with closing(place.open()) as reader, closing(place.open()) as writer:
        assert fetch(reader, keys) == [HIT, HIT, CORRUPT, HIT, HIT, HIT]
        assert owned(reader) == 0
        assert store(writer, keys) == [PRESENT, PRESENT, STORED, PRESENT, PRESENT, PRESENT]
        assert owned(writer) == 1
        assert len(list(segments(place.path))) == 1
        assert fetch(reader, keys) == [HIT] * 6
    assert fsck(place.path).quarantined == 1


def test_who_deletes_what_is_old_or_unwanted_does_not_stay_the_writer(place: Place):
    old, young = keys_of("old", 3), keys_of("young", 3)
    with closing(place.open(ttl_s=100)) as writer:
        store(writer, old)
        place.clock.advance(60)
        store(writer, young)
    place.clock.advance(60)
    with closing(place.open(ttl_s=100)) as reader, closing(place.open()) as writer:
        place.clock.advance(2)
        reader.contains(old)
        assert reader.stats().counters.expired == 3
        assert reader.remove(young[:1]) == 1
        assert owned(reader) == 0
        assert store(writer, old) == [STORED] * 3
        assert len(list(segments(place.path))) == 1
        assert fetch(reader, young + old) == [MISS, HIT, HIT, HIT, HIT, HIT]


def test_a_page_that_took_the_place_of_the_damaged_one_stays(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    """The writer replaced it, and stopped, just before the reader would have marked it."""
    keys, other = keys_of("bad", 1), keys_of("good", 1)
    writer = place.open()
    store(writer, keys)
    with closing(place.open()) as reader:
        assert fetch(reader, keys) == [HIT]
        flip_payload(place.path, keys[0], 5)
        real = Segment.own

        def own(segment: Segment) -> bool:
            monkeypatch.setattr(Segment, "own", real)
            writer.remove(keys)
            store(writer, other)
            writer.close()
            return real(segment)

        monkeypatch.setattr(Segment, "own", own)
        assert fetch(reader, keys) == [CORRUPT]
        assert fetch(reader, other) == [HIT]


def test_another_users_segment_is_read_and_not_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    keys, mine = keys_of("theirs", 3), keys_of("mine", 2)
    with closing(place.open()) as backend:
        store(backend, keys)
    (theirs,) = place.path.glob("*.seg")
    flip_payload(place.path, keys[2], 5)
    before, real = theirs.read_bytes(), os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if Path(path) == theirs and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "injected")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with closing(place.open()) as backend:
        assert fetch(backend, keys) == [HIT, HIT, CORRUPT]
        assert backend.stats().writing
        assert store(backend, mine + keys) == [STORED, STORED, PRESENT, PRESENT, STORED]
        place.clock.advance(2)
        assert fetch(backend, mine + keys) == [HIT] * 5
        assert backend.remove(Everything.EVERYTHING) == 5
        assert not backend.contains(mine + keys).any()
    assert theirs.read_bytes() == before


@pytest.mark.usefixtures("python_page_io")
def test_a_read_that_a_signal_cuts_short_goes_on(place: Place, monkeypatch: pytest.MonkeyPatch):
    keys, real = keys_of("short", 3), os.preadv
    with closing(place.open()) as backend:
        store(backend, keys)

        def preadv(fd: int, buffers: Sequence[memoryview], at: int) -> int:
            return real(fd, [buffers[0][:1000]], at)

        monkeypatch.setattr(os, "preadv", preadv)
        assert fetch(backend, keys) == [HIT] * 3


def test_a_segment_that_cannot_be_read_is_closed(place: Place, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object) -> bytes:
        raise OSError(errno.EIO, "injected")

    with closing(place.open()) as backend:
        store(backend, keys_of("one", 1))
    (path,) = place.path.glob("*.seg")
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", refuse)
        with pytest.raises(OSError, match="injected"):
            Segment.open(path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("python_page_io")
def test_damage_on_a_disk_that_takes_nothing_is_hidden_and_calls_go_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EROFS, "injected")

    keys = keys_of("frozen", 3)
    with closing(place.open()) as reader, closing(place.open()) as writer:
        store(writer, keys)
        assert reader.contains(keys).all()
        flip_payload(place.path, keys[0], 5)
        assert fetch(reader, keys) == [CORRUPT, HIT, HIT]
        with monkeypatch.context() as frozen:
            for name in ("pwrite", "pwritev"):
                frozen.setattr(os, name, refuse)
            assert writer.contains(keys).tolist() == [False, True, True]
            assert fetch(writer, keys) == [MISS, HIT, HIT]
        place.clock.advance(100)
        assert store(writer, keys) == [STORED, PRESENT, PRESENT]

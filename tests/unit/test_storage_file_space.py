"""Room on the disk: what is deleted is free at once, and nobody gives up pages for nothing."""

import errno
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from stratakv.storage.backend import Everything, ReadStatus, WriteStatus
from stratakv.storage.file import disk, eviction
from stratakv.storage.file.ledger import Ledger, Want
from stratakv.storage.file.segment import Segment
from stratakv.storage.file.store import FileStore
from stratakv.testing.storage_conformance import FORM, fetch, keys_of, store
from tests.storage_files import Place

HIT, MISS = ReadStatus.HIT, ReadStatus.MISS
STORED, REFUSED = WriteStatus.STORED, WriteStatus.REFUSED
QUOTA = 3 << 20


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store")


def pages_of(backend: FileStore) -> int:
    return backend.stats().pages


@pytest.mark.parametrize("holes", [True, False], ids=["holes", "no holes"])
def test_what_is_deleted_is_free_while_an_idle_peer_has_it_open(
    place: Place, monkeypatch: pytest.MonkeyPatch, *, holes: bool
):
    if not holes:
        monkeypatch.setattr(disk, "FIRST_BYTES", 0)  # a hole of no size is refused
    keys = keys_of("room", 200)
    with closing(place.open()) as writer, closing(place.open()) as reader:
        store(writer, keys)
        assert reader.contains(keys).all()
        files = [path.open("rb") for path in place.path.glob("*.seg")]
        writer.remove(Everything.EVERYTHING)
        assert [os.fstat(file.fileno()).st_blocks for file in files] == [0] * len(files)
        for file in files:
            file.close()
        assert set(fetch(reader, keys)) == {MISS}
        assert reader.stats().counters.corrupt == 0


def test_a_segment_that_is_deleted_during_a_read_is_misses(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    keys = keys_of("deleted", 3)
    with closing(place.open()) as writer, closing(place.open()) as reader:
        store(writer, keys)
        assert reader.contains(keys).all()
        real = Segment.read_pages

        def read_pages(
            segment: Segment, slots: Sequence[int], into: Sequence[memoryview]
        ) -> list[int]:
            if not segment.owned:
                writer.remove(Everything.EVERYTHING)
            return real(segment, slots, into)

        monkeypatch.setattr(Segment, "read_pages", read_pages)
        assert fetch(reader, keys) == [MISS] * 3
        assert reader.stats().counters.corrupt == 0


def test_a_file_with_a_second_name_keeps_its_bytes(place: Place):
    keys = keys_of("backup", 3)
    with closing(place.open()) as backend:
        store(backend, keys)
        (path,) = place.path.glob("*.seg")
        copy = place.path / "backup"
        os.link(path, copy)
        data = copy.read_bytes()
        with closing(Ledger(place.path, QUOTA)) as ledger, ledger.locked():
            ledger.delete(path.name)
        assert not path.exists()
        assert copy.read_bytes() == data


def test_who_adopts_a_segment_that_was_just_deleted_does_not_write_into_nowhere(place: Place):
    with closing(place.open()) as backend:
        store(backend, keys_of("gone", 3))
    (path,) = place.path.glob("*.seg")
    segment = Segment.open(path)
    assert segment is not None
    path.unlink()
    assert not segment.own()
    segment.close()


def test_a_disk_that_gets_nothing_back_costs_one_segment_not_all(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    """As with snapshots, which keep what is deleted."""

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "injected")

    with closing(place.open(quota_bytes=2 * QUOTA)) as backend:
        store(backend, keys_of("first", 400))
        place.clock.advance(1)
        before = backend.stats().segments
        monkeypatch.setattr(eviction, "free_bytes", lambda directory: 0)
        monkeypatch.setattr(os, "posix_fallocate", full)
        for turn in range(20):
            assert set(store(backend, keys_of(f"other {turn}", 2, group=1))) == {REFUSED}
        assert backend.stats().segments >= before - 1


def test_a_group_whose_pages_never_fit_takes_nothing_from_the_others(place: Place):
    form = replace(FORM, page_bytes=(64 << 10, 8 << 20))
    with closing(place.open(form, quota_bytes=QUOTA)) as backend:
        small = keys_of("small", 10)
        pages = [memoryview(bytearray(64 << 10)) for _ in small]
        large = [memoryview(bytearray(8 << 20))]
        assert backend.write(keys_of("large", 1, group=1), large) == [REFUSED]
        assert set(backend.write(small, pages)) == {STORED}
        assert backend.write(keys_of("large", 1, group=1), large) == [REFUSED]
        assert backend.contains(small).all()
        assert Ledger(place.path, QUOTA).want() is None, "others would yield for nothing"


def test_a_group_that_has_no_room_now_does_not_stop_a_smaller_one(place: Place):
    """A segment of the large group does not fit beside a peer's; one of the small group does."""
    form = replace(FORM, page_bytes=(64 << 10, 2 << 20))
    with (
        closing(place.open(form, quota_bytes=QUOTA)) as peer,
        closing(place.open(form, quota_bytes=QUOTA)) as backend,
    ):
        pages = [memoryview(bytearray(64 << 10)) for _ in range(20)]
        assert set(peer.write(keys_of("peer", 20), pages)) == {STORED}
        large = [memoryview(bytearray(2 << 20))]
        assert backend.write(keys_of("large", 1, group=1), large) == [REFUSED]
        assert set(backend.write(keys_of("small", 2), pages[:2])) == {STORED}


@pytest.mark.parametrize("ahead_s", [-29, 0, 86_400, -86_400])
def test_what_a_dead_process_asked_for_costs_one_segment_at_most(place: Place, ahead_s: int):
    with closing(place.open(quota_bytes=QUOTA)) as backend:
        store(backend, keys_of("held", 400))
        before = backend.stats().segments
        since_ns = int((place.clock.now_s() + ahead_s) * 1e9)
        with closing(Ledger(place.path, QUOTA)) as gone:
            gone.set_want(Want(12_345, 0, since_ns))
        for _ in range(60):
            place.clock.advance(1.1)
            backend.contains(keys_of("none", 1))
        lost = before - backend.stats().segments
        assert lost <= (1 if abs(ahead_s) < 60 else 0)
        assert set(store(backend, keys_of("more", 40))) == {STORED}
        assert backend.stats().segments >= before - 1


def test_a_process_that_stops_takes_its_request_for_space_back(place: Place):
    with closing(place.open(quota_bytes=QUOTA)) as old:
        store(old, keys_of("old", 400))
        new = place.open(quota_bytes=QUOTA)
        assert REFUSED in store(new, keys_of("new", 4))
        with closing(Ledger(place.path, QUOTA)) as ledger:
            assert ledger.want() is not None
            new.close()
            assert ledger.want() is None

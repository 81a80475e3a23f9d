"""A file store whose disk or clock does what it should not: writes stop, reads go on."""

import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from stratakv.core.errors import StorageError
from stratakv.storage.backend import ReadStatus, WriteStatus
from stratakv.storage.file.fsck import fsck
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.segment import Segment
from stratakv.storage.file.store import FileStore
from stratakv.storage.header import Headers, is_blank
from stratakv.testing.storage_conformance import FORM, fetch, keys_of, store
from tests.storage_files import START_S, Place, flip_payload, segments

HIT, MISS, CORRUPT = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.CORRUPT
STORED, FAILED, REFUSED = WriteStatus.STORED, WriteStatus.FAILED, WriteStatus.REFUSED


class WanderingClock:
    """A date that can be set back."""

    def __init__(self) -> None:
        self.date_s = START_S

    def now_s(self) -> float:
        return self.date_s


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store")


@pytest.mark.parametrize("spare_bytes", [0, 64 << 10], ids=["headers too", "payloads only"])
@pytest.mark.usefixtures("python_page_io")
def test_a_disk_that_is_full_in_the_middle_of_a_batch(
    place: Place, monkeypatch: pytest.MonkeyPatch, spare_bytes: int
):
    """As on a file system that copies on write: what was reserved is not there when written."""
    keys = keys_of("batch", 250)
    real, left_bytes = os.pwritev, 1_500_000

    def pwritev(fd: int, parts: Sequence[memoryview], at: int) -> int:
        nonlocal left_bytes
        if not left_bytes and sum(map(len, parts)) > spare_bytes:
            raise OSError(errno.ENOSPC, "injected")
        # The last one that fits is cut short.
        data = b"".join(parts)[: max(left_bytes, spare_bytes)]
        left_bytes = max(0, left_bytes - len(data))
        return real(fd, [data], at)

    with closing(place.open()) as backend:
        with monkeypatch.context() as full:
            full.setattr(os, "pwritev", pwritev)
            full.setattr(os, "pwrite", lambda fd, data, at: pwritev(fd, [memoryview(data)], at))
            statuses = store(backend, keys)
        stored = statuses.count(STORED)
        assert (stored > 50) is (spare_bytes > 0)
        assert statuses == [STORED] * stored + statuses[stored:]
        assert set(statuses[stored:]) == {FAILED, REFUSED}
        there = [status is STORED for status in statuses]
        assert fetch(backend, keys) == [HIT if hit else MISS for hit in there]
        assert set(store(backend, keys[-3:])) == {REFUSED}
        place.clock.advance(1.1)
        assert set(store(backend, keys)) <= {STORED, WriteStatus.PRESENT}
        assert set(fetch(backend, keys)) == {HIT}
        assert backend.stats().segments == 3, "slots were lost"
    assert fsck(place.path).clean


@pytest.mark.usefixtures("python_page_io")
def test_a_disk_that_turned_read_only_is_read(place: Place, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EROFS, "injected")

    keys = keys_of("read only", 4)
    with closing(place.open(ttl_s=1000)) as backend:
        store(backend, keys)
        backend.touch(keys)
        flip_payload(place.path, keys[3], 3)
        with monkeypatch.context() as frozen:
            for name in ("pwrite", "pwritev", "posix_fallocate"):
                frozen.setattr(os, name, refuse)
            place.clock.advance(2)
            assert backend.contains(keys).all()
            assert fetch(backend, keys) == [HIT, HIT, HIT, CORRUPT]
            assert fetch(backend, keys) == [HIT, HIT, HIT, MISS]
            assert not set(store(backend, keys_of("more", 3))) & {STORED}
            assert not backend.stats().writing
            place.clock.advance(1001)
            assert fetch(backend, keys) == [MISS] * 4
        place.clock.advance(100)
        assert set(store(backend, keys)) == {STORED}


def test_a_directory_that_was_deleted_is_an_error_and_no_page_is_taken_into_nowhere(place: Place):
    keys = keys_of("gone", 2)
    backend = place.open()
    store(backend, keys)
    shutil.rmtree(place.path)
    for call in (lambda: store(backend, keys_of("more", 1)), lambda: fetch(backend, keys)):
        with pytest.raises(StorageError, match="was deleted"):
            call()
    backend.touch(keys)
    backend.close()
    with closing(place.open()) as fresh:
        assert fetch(fresh, keys) == [MISS] * 2
        assert set(store(fresh, keys)) == {STORED}


def test_a_clock_that_is_set_back_changes_neither_order_nor_service(tmp_path: Path):
    clock = WanderingClock()
    limits = StoreLimits(quota_bytes=3 << 20, ttl_s=1000)
    old, young = keys_of("old", 40), keys_of("young", 40)
    with closing(FileStore(tmp_path, FORM, limits, clock)) as backend:
        store(backend, old)
        clock.date_s -= 3 * 86_400
        store(backend, young)
        assert set(fetch(backend, old + young)) == {HIT}
    with closing(FileStore(tmp_path, FORM, limits, clock)) as backend:
        assert set(fetch(backend, old + young)) == {HIT}
        for turn in range(12):
            clock.date_s += 1
            store(backend, keys_of(f"fresh {turn}", 20))
            there = backend.contains(old).any(), backend.contains(young).all()
            assert there[1] or not there[0], "the younger left while an older was there"
        assert not there[0]


def test_an_error_while_room_is_made_fails_a_page_not_the_call(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    def put_headers(*arguments: object) -> None:
        raise OSError(errno.EIO, "injected")

    with closing(place.open(quota_bytes=3 << 20)) as backend:
        keys = keys_of("full", 400)
        held = [key for key, ok in zip(keys, store(backend, keys), strict=True) if ok is STORED]
        backend.touch(held[:1])
        with monkeypatch.context() as broken:
            broken.setattr(Segment, "put_headers", put_headers)
            statuses = store(backend, [held[0], *keys_of("more", 2)])
            assert statuses == [WriteStatus.PRESENT, FAILED, REFUSED]
            assert fetch(backend, held[:1]) == [HIT]
        place.clock.advance(1.1)
        assert set(store(backend, keys_of("more", 2))) == {STORED}


def test_a_death_between_a_payload_and_its_header_leaves_no_half_page(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    """The moment that kill -9 seldom meets: the slot had another page before."""

    class DeathError(BaseException):
        pass

    real = Segment.put_headers

    def put_headers(segment: Segment, first: int, table: Headers) -> None:
        if not is_blank(table).all():
            raise DeathError
        real(segment, first, table)

    old, new = keys_of("old", 9), keys_of("new", 9)
    with closing(place.open()) as backend:
        store(backend, old)
        backend.remove(old[2:6])
        monkeypatch.setattr(Segment, "put_headers", put_headers)
        with pytest.raises(DeathError):
            store(backend, new)
        with closing(place.open()) as other:
            assert fetch(other, old + new) == [HIT] * 2 + [MISS] * 4 + [HIT] * 3 + [MISS] * 9
    found = fsck(place.path)
    assert (found.pages, found.clean) == (5, True)


@pytest.mark.usefixtures("python_page_io")
def test_at_every_write_the_headers_on_the_disk_vouch_only_for_payloads_that_are_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    """A death before or after any write of a batch that evicts: whoever opens the store then finds
    no header of a page that has gone, and none of one that has not come yet."""
    moments, real = 0, os.pwritev

    def check() -> int:
        pages = 0
        for path, segment in segments(place.path):
            page = memoryview(bytearray(segment.geometry.page_bytes))
            headers = segment.headers()
            for slot in np.flatnonzero(~is_blank(headers)).tolist():
                pages += 1
                there = segment.read_page(slot, page)
                assert there == headers["payload_hash"][slot], f"slot {slot} of {path.name}"
        return pages

    def pwritev(fd: int, parts: Sequence[memoryview], at: int) -> int:
        nonlocal moments
        moments += 1
        check()
        written = real(fd, parts, at)
        check()
        return written

    with closing(place.open(quota_bytes=256 << 10, slots=8)) as backend:
        monkeypatch.setattr(os, "pwritev", pwritev)
        for turn in range(8):
            assert set(store(backend, keys_of(f"turn {turn}", 5))) == {STORED}
            place.clock.advance(1)
            assert check() == backend.stats().pages
        assert backend.stats().counters.evicted > 10
        backend.remove(keys_of(f"turn {turn}", 5)[1:4])
        assert check() == backend.stats().pages
    assert moments > 20

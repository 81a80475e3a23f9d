"""What the file store promises beyond the public suite: quota, time, errors, neighbours."""

import errno
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stratakv.storage.backend import ReadStatus, WriteStatus
from stratakv.storage.file.segment import Segment
from stratakv.testing.storage_conformance import FORM, Arena, fetch, keys_of, store
from tests.storage_files import Place, place_of, segments

HIT, MISS, CORRUPT = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.CORRUPT
STORED, PRESENT, REFUSED = WriteStatus.STORED, WriteStatus.PRESENT, WriteStatus.REFUSED


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store")


def test_the_quota_counts_what_the_disk_counts(place: Place):
    quota = 3 << 20
    with closing(place.open(quota_bytes=quota)) as backend:
        for turn in range(20):
            statuses = store(backend, keys_of(f"quota {turn}", 40, group=turn % 2))
            assert set(statuses) == {STORED}
            assert place.physical_bytes() <= quota
        stats = backend.stats()
    assert stats.physical_bytes == place.physical_bytes() > 0.9 * quota
    assert stats.counters.evicted > 100


def test_the_quota_is_one_for_all_processes_and_a_newcomer_gets_room(place: Place):
    quota = 3 << 20
    with (
        closing(place.open(quota_bytes=quota)) as old,
        closing(place.open(quota_bytes=quota)) as new,
    ):
        store(old, keys_of("old", 400))
        mine = keys_of("new", 8)
        statuses: list[WriteStatus] = []
        for turn in range(30):
            statuses = store(new, mine)
            place.clock.advance(1.5)
            store(old, keys_of(f"more {turn}", 4))
            assert place.physical_bytes() <= quota
        assert statuses == [PRESENT] * 8
        assert fetch(new, mine) == [HIT] * 8
        assert fetch(old, mine) == [HIT] * 8


def test_another_models_segments_make_room_once_nobody_writes_them(place: Place):
    other = replace(FORM, spec_digest=b"another-model-00")
    with closing(place.open(other, quota_bytes=3 << 20)) as backend:
        store(backend, keys_of("other", 400))
        with closing(place.open(quota_bytes=3 << 20)) as mine:
            assert set(store(mine, keys_of("mine", 4))) == {REFUSED}
    with closing(place.open(quota_bytes=3 << 20)) as mine:
        assert set(store(mine, keys_of("mine", 4))) == {STORED}
        assert fetch(mine, keys_of("mine", 4)) == [HIT] * 4


def test_the_oldest_use_leaves_first_over_groups_and_restarts(place: Place):
    old, young = keys_of("old", 100, group=0), keys_of("young", 100, group=0)
    quota = 3 << 20
    with closing(place.open(quota_bytes=quota)) as backend:
        store(backend, old)
        store(backend, young)
        backend.touch(old[:10][::-1])
    with closing(place.open(quota_bytes=quota)) as backend:
        for turn in range(2):
            assert set(store(backend, keys_of(f"fresh {turn}", 40, group=1))) == {STORED}
        there = backend.contains(old)
        assert there[:10].all(), "a touched page left before an untouched one"
        assert not there[10:].all()
        assert backend.contains(young).all(), "the younger left while an older was there"


def test_a_use_in_one_process_is_seen_by_the_one_that_evicts(place: Place):
    keys = keys_of("shared", 200)
    quota = 3 << 20
    with closing(place.open(quota_bytes=quota)) as writer:
        store(writer, keys)
        held = [key for key, there in zip(keys, writer.contains(keys), strict=True) if there]
        with closing(place.open(quota_bytes=quota)) as reader:
            place.clock.advance(5)
            reader.touch(held[-5:])
            place.clock.advance(5)
            reader.contains(held)
            store(writer, keys_of("pressure", 60))
        assert writer.contains(held[-5:]).all()
        assert not writer.contains(held).all()


def test_what_nobody_used_expires_children_first(place: Place):
    chain = keys_of("ttl", 3)
    with closing(place.open(ttl_s=100)) as backend:
        store(backend, chain)
        place.clock.advance(60)
        backend.touch(chain[:1])
        place.clock.advance(60)
        assert backend.contains(chain).tolist() == [True, False, False]
        assert fetch(backend, chain) == [HIT, MISS, MISS]
        place.clock.advance(101)
        assert fetch(backend, chain) == [MISS] * 3
        assert backend.stats().counters.expired == 3
        assert place.physical_bytes() == 0, "an empty segment was kept"
        assert store(backend, chain) == [STORED] * 3


def test_a_new_store_whose_pages_expire_has_nothing(place: Place):
    with closing(place.open(ttl_s=100)) as backend:
        assert fetch(backend, keys_of("never stored", 2)) == [MISS] * 2


def test_what_expired_while_nobody_ran_is_a_miss_and_its_room_comes_back(place: Place):
    keys = keys_of("long ago", 3)
    with closing(place.open(ttl_s=100)) as backend:
        store(backend, keys)
    place.clock.advance(101)
    with closing(place.open(ttl_s=100)) as backend:
        assert fetch(backend, keys) == [MISS] * 3
        place.clock.advance(2)
        backend.contains(keys)
        assert place.physical_bytes() == 0


@pytest.mark.usefixtures("python_page_io")
def test_an_io_error_turns_writes_off_and_time_turns_them_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    keys = keys_of("errors", 4)
    with closing(place.open()) as backend:
        store(backend, keys[:1])
        real, broken = os.pwritev, True

        def pwritev(*arguments: object) -> int:
            if broken:
                raise OSError(errno.EIO, "injected")
            return real(*arguments)

        monkeypatch.setattr(os, "pwritev", pwritev)
        assert store(backend, keys) == [PRESENT, WriteStatus.FAILED, REFUSED, REFUSED]
        assert not backend.stats().writing
        broken = False
        assert store(backend, keys) == [PRESENT, REFUSED, REFUSED, REFUSED]
        assert fetch(backend, keys) == [HIT, MISS, MISS, MISS]
        place.clock.advance(1.1)
        assert store(backend, keys) == [PRESENT, STORED, STORED, STORED]
        assert backend.stats().writing
        assert fetch(backend, keys) == [HIT] * 4


def test_a_full_disk_turns_growth_off_evicts_what_it_has_and_grows_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    with closing(place.open()) as backend:
        first = keys_of("first", 3)
        store(backend, first)
        tried: list[int] = []
        real, disk_bytes = os.posix_fallocate, place.physical_bytes()

        def posix_fallocate(fd: int, offset: int, size: int) -> None:
            tried.append(size)
            if place.physical_bytes() + size > disk_bytes:
                raise OSError(errno.ENOSPC, "injected")
            real(fd, offset, size)

        with monkeypatch.context() as full:
            full.setattr(os, "posix_fallocate", posix_fallocate)
            assert STORED in store(backend, keys_of("many", 200))
            assert not backend.stats().growing
            calls = len(tried)
            assert STORED in store(backend, keys_of("many more", 50))
            assert len(tried) == calls, "it did not back off"
            assert set(store(backend, keys_of("other", 2, group=1))) == {STORED}, "no room was made"
            place.clock.advance(100)
            assert place.physical_bytes() <= disk_bytes
            assert not list(place.path.glob("*.seg"))[2:], "an unfinished segment was left"
        assert set(store(backend, keys_of("after", 400))) == {STORED}
        assert backend.stats().growing


@pytest.mark.usefixtures("python_page_io")
def test_repeated_errors_back_off_longer(place: Place, monkeypatch: pytest.MonkeyPatch):
    def pwritev(*arguments: object) -> int:
        raise OSError(errno.EIO, "injected")

    waits = []
    with closing(place.open()) as backend:
        store(backend, keys_of("first", 1))
        monkeypatch.setattr(os, "pwritev", pwritev)
        for turn in range(9):
            store(backend, keys_of(f"turn {turn}", 1))
            waited_s = 0.0
            while not backend.stats().writing:
                place.clock.advance(0.5)
                waited_s += 0.5
            waits.append(waited_s)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 64, 64]


@pytest.mark.usefixtures("python_page_io")
def test_a_read_error_is_a_failed_page_not_a_failed_call(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    keys = keys_of("bad sector", 3)
    with closing(place.open()) as backend:
        store(backend, keys)
        path, _, bad_at = place_of(place.path, keys[1])
        real = os.preadv

        def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
            if at <= bad_at < at + sum(map(len, buffers)) and os.path.sameopenfile(fd, bad_fd):
                raise OSError(errno.EIO, "injected")
            return real(fd, buffers, at)

        with path.open("rb") as file:
            bad_fd = file.fileno()
            monkeypatch.setattr(os, "preadv", preadv)
            assert fetch(backend, keys) == [HIT, ReadStatus.FAILED, HIT]
        assert backend.stats().counters.read_errors == 1


def test_a_page_that_its_writer_evicted_during_the_read_is_a_miss(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    keys = keys_of("evicted", 3)
    with closing(place.open()) as writer, closing(place.open()) as reader:
        store(writer, keys)
        assert reader.contains(keys).all()
        real = Segment.read_pages

        def read_pages(
            segment: Segment, slots: Sequence[int], into: Sequence[memoryview]
        ) -> list[int]:
            if not segment.owned:
                writer.remove(keys[1:2])
                store(writer, keys_of("in its place", 1))
            return real(segment, slots, into)

        monkeypatch.setattr(Segment, "read_pages", read_pages)
        assert fetch(reader, keys) == [HIT, MISS, HIT]
        assert reader.stats().counters.corrupt == 0


def test_a_segment_has_one_writer(place: Place):
    with closing(place.open()) as one, closing(place.open()) as two:
        store(one, keys_of("one", 2))
        store(two, keys_of("two", 2))
        assert len(list(segments(place.path))) == 2
        for _, segment in segments(place.path):
            assert not segment.own()
    with closing(place.open()) as three:
        assert set(store(three, keys_of("three", 4))) == {STORED}
        assert len(list(segments(place.path))) == 2, "a segment without a writer was not used"


def test_power_safe_means_one_sync_per_segment_and_batch(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    with closing(place.open()) as backend:
        store(backend, keys_of("process", 8))
    assert not synced
    with closing(place.open(power_safe=True)) as backend:
        store(backend, keys_of("warm", 1, group=1))
        synced.clear()
        store(backend, keys_of("power", 8, group=1))
        assert len(synced) == 1


def test_closing_leaves_no_file_open(place: Place):
    def handles() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = handles()
    for turn in range(5):
        with closing(place.open(quota_bytes=1 << 20)) as backend:
            store(backend, keys_of(f"turn {turn}", 60))
    assert handles() == before


def test_a_page_is_written_from_and_read_into_the_callers_memory(place: Place):
    keys = keys_of("zero copy", 2)
    arena = Arena(keys).fill()
    with closing(place.open()) as backend:
        backend.write(keys, arena.pages)
        target = np.zeros(sum(FORM.page_bytes[key.group] for key in keys), np.uint8)
        views = [memoryview(target)[:12_288], memoryview(target)[12_288:]]
        assert backend.read(keys, views) == [HIT, HIT]
        assert target.tobytes() == b"".join(map(bytes, arena.pages))


@pytest.mark.parametrize("page_bytes", [4096, 100_001, 1 << 20, (1 << 20) + 5, 3 << 20])
def test_pages_of_any_size_come_back_in_any_order(place: Place, page_bytes: int):
    """Small ones move together, large ones in pieces."""
    form = replace(FORM, page_bytes=(page_bytes,))
    keys = keys_of("sizes", 13)
    rng = np.random.default_rng(page_bytes)
    pages = [memoryview(rng.bytes(page_bytes)) for _ in keys]
    with closing(place.open(form, quota_bytes=256 << 20)) as backend:
        assert set(backend.write(keys, pages)) == {STORED}
        for order in (range(13), range(12, -1, -1), (0, 1, 2, 7, 8, 4, 5, 5, 6)):
            into = [memoryview(bytearray(page_bytes)) for _ in order]
            assert set(backend.read([keys[at] for at in order], into)) == {HIT}
            assert all(page == pages[at] for at, page in zip(order, into, strict=True))

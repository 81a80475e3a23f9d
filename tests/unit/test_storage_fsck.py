import os
from contextlib import closing
from pathlib import Path

import pytest

from stratakv.core.clock import ManualClock
from stratakv.core.errors import StorageError
from stratakv.storage.backend import ReadStatus
from stratakv.storage.file.fsck import fsck, lines_of
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore
from stratakv.testing.storage_conformance import FORM, fetch, keys_of, store
from tests.storage_files import flip, flip_header, flip_payload

HIT, MISS = ReadStatus.HIT, ReadStatus.MISS


def open_at(path: Path) -> FileStore:
    return FileStore(path, FORM, StoreLimits(quota_bytes=64 << 20), ManualClock(1000))


def test_a_store_without_faults_is_clean(tmp_path: Path):
    with closing(open_at(tmp_path)) as backend:
        store(backend, keys_of("a", 5) + keys_of("b", 3, group=1))
        looked = fsck(tmp_path, repair=True)
        assert (looked.segments, looked.in_use, looked.pages) == (2, 2, 8)
    found = fsck(tmp_path)
    assert found.clean
    assert (found.segments, found.in_use, found.pages, found.problems) == (2, 0, 8, [])


def test_every_kind_of_fault_is_found_and_mended(tmp_path: Path):
    keys = keys_of("a", 6)
    with closing(open_at(tmp_path)) as backend:
        store(backend, keys + keys_of("b", 2, group=1))
    flip_payload(tmp_path, keys[0], 1)
    with closing(open_at(tmp_path)) as backend:
        fetch(backend, keys)
    flip_payload(tmp_path, keys[1], 5000)
    flip_header(tmp_path, keys[2], 30)
    (tmp_path / "00000000aaaa.seg").write_bytes(b"SKVNEW\0\0" + bytes(8192))
    (tmp_path / "00000000bbbb.seg").write_bytes(b"SKVSEG\0\1 cut")
    before = {path: path.read_bytes()[:8192] for path in tmp_path.glob("*.seg")}
    found = fsck(tmp_path)
    assert (found.quarantined, found.bad_payloads, found.bad_headers) == (1, 1, 1)
    assert (found.unfinished, found.broken, found.mended) == (1, 1, 0)
    assert found.pages == 5
    assert len(found.problems) == 5
    assert not found.clean
    assert before == {path: path.read_bytes()[:8192] for path in tmp_path.glob("*.seg")}
    mended = fsck(tmp_path, repair=True)
    assert mended.mended == 5
    assert mended.clean
    assert fsck(tmp_path).problems == []
    with closing(open_at(tmp_path)) as backend:
        assert fetch(backend, keys) == [MISS] * 3 + [HIT] * 3
        assert backend.stats().damaged_headers == 0


def test_a_damaged_segment_header_and_a_truncated_segment_are_broken(tmp_path: Path):
    with closing(open_at(tmp_path)) as backend:
        store(backend, keys_of("a", 2) + keys_of("b", 2, group=1))
    one, two = sorted(tmp_path.glob("*.seg"))
    flip(one, 9)
    two.write_bytes(two.read_bytes()[:70_000])
    assert fsck(tmp_path).broken == 2
    assert fsck(tmp_path, repair=True).mended == 2
    assert not list(tmp_path.glob("*.seg"))


def test_a_live_writers_faults_are_reported_and_left(tmp_path: Path):
    keys = keys_of("live", 2)
    with closing(open_at(tmp_path)) as backend:
        store(backend, keys)
        flip_payload(tmp_path, keys[0], 0)
        found = fsck(tmp_path, repair=True)
        assert (found.in_use, found.bad_payloads, found.mended, found.clean) == (1, 1, 0, False)
        assert fetch(backend, keys) == [ReadStatus.CORRUPT, HIT]


def test_what_is_no_store_is_refused(tmp_path: Path):
    with pytest.raises(StorageError, match="no ledger"):
        fsck(tmp_path)
    assert not list(tmp_path.iterdir())


def report_of(path: Path, *, repair: bool) -> list[str]:
    return lines_of(path, fsck(path, repair=repair), repair=repair)[1:]


def test_what_is_reported_of_a_damaged_ledger(tmp_path: Path):
    with closing(open_at(tmp_path)) as backend:
        store(backend, keys_of("a", 2))
    flip(tmp_path / "ledger", 6)
    report = ["damaged ledger: 1", "  the ledger is damaged"]
    assert report_of(tmp_path, repair=False) == [*report, "damaged; --repair rebuilds the ledger"]
    assert report_of(tmp_path, repair=True) == [*report, "mended: the ledger rebuilt"]
    assert report_of(tmp_path, repair=True) == ["clean"]


def test_what_is_reported_of_a_damaged_ledger_and_pages(tmp_path: Path):
    keys = keys_of("a", 2)
    with closing(open_at(tmp_path)) as backend:
        store(backend, keys)
        flip_payload(tmp_path, keys[0], 0)
        flip(tmp_path / "ledger", 6)
        assert report_of(tmp_path, repair=False)[-1] == (
            "damaged; --repair removes what is and rebuilds the ledger"
        )
        assert report_of(tmp_path, repair=True)[-1] == (
            "0 removed, the ledger rebuilt, 1 left, which a running process writes"
        )
        flip(tmp_path / "ledger", 6)
    assert report_of(tmp_path, repair=True)[-1] == "mended: 1 removed, the ledger rebuilt"
    assert report_of(tmp_path, repair=False) == ["clean"]


def test_a_segment_that_lacks_its_last_byte_is_broken(tmp_path: Path):
    with closing(open_at(tmp_path)) as backend:
        store(backend, keys_of("a", 2))
    (path,) = tmp_path.glob("*.seg")
    os.truncate(path, path.stat().st_size - 1)
    found = fsck(tmp_path)
    assert (found.broken, found.unfinished, found.pages) == (1, 0, 0)
    assert found.problems == [f"{path.name}: is no whole segment"]


def test_what_was_never_finished_is_reported_to_be_that(tmp_path: Path):
    open_at(tmp_path).close()
    (tmp_path / "00000000aaaa.seg").write_bytes(b"SKVNEW\0\0" + bytes(8192))
    assert report_of(tmp_path, repair=False) == [
        "segments that were never finished: 1",
        "  00000000aaaa.seg: was never finished",
        "damaged; --repair removes what is",
    ]


def test_a_hundred_problems_are_reported_one_by_one_and_the_others_counted(tmp_path: Path):
    open_at(tmp_path).close()
    for at in range(102):
        (tmp_path / f"{at:012x}.seg").write_bytes(b"SKVSEG\0\1 cut")
    report = report_of(tmp_path, repair=False)
    assert report[0] == "segments that are broken: 102"
    assert [line.endswith("is no whole segment") for line in report[1:101]] == [True] * 100
    assert report[101:] == ["  and 2 more", "damaged; --repair removes what is"]


def test_segments_that_somebody_writes_are_counted_in_the_report(tmp_path: Path):
    with closing(open_at(tmp_path)) as backend:
        store(backend, keys_of("a", 2))
        assert report_of(tmp_path, repair=True) == [
            "segments that a running process writes: 1", "clean",
        ]  # fmt: skip

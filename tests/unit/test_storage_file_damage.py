"""Flipped, torn and missing bytes in the files of a store are never served."""

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import ObjectKey, ReadStatus, WriteStatus
from stratakv.storage.file import index
from stratakv.storage.file.segment import BLOCK_BYTES
from stratakv.storage.header import HEADER
from stratakv.testing.storage_conformance import fetch, keys_of, store
from tests.storage_files import Place, flip, flip_header, flip_payload, segments

HIT, MISS, CORRUPT = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.CORRUPT
STORED, PRESENT, REFUSED = WriteStatus.STORED, WriteStatus.PRESENT, WriteStatus.REFUSED
FIELDS = [(name, offset) for name, (_, offset, *_) in HEADER.fields.items()]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store")


@pytest.mark.parametrize(("field", "offset"), FIELDS)
def test_a_flip_in_any_field_of_a_header_is_seen_by_an_open_store_and_by_the_next(
    place: Place, field: str, offset: int
):
    keys = keys_of(field, 3)
    with closing(place.open()) as backend:
        store(backend, keys)
        flip_header(place.path, keys[0], offset, bit=5)
        assert fetch(backend, keys) == [CORRUPT, HIT, HIT]
        assert fetch(backend, keys) == [MISS, HIT, HIT]
        assert backend.stats().counters.quarantined == 1
        flip_header(place.path, keys[1], offset, bit=2)
    with closing(place.open()) as backend:
        assert fetch(backend, keys) == [MISS, MISS, HIT]
        assert backend.stats().damaged_headers == 2
        assert set(store(backend, keys)) == {STORED, PRESENT}
        assert fetch(backend, keys) == [HIT] * 3


@pytest.mark.parametrize("at", [0, 4095, 12_287])
def test_a_flip_in_a_payload_is_seen_after_a_restart_and_the_slot_is_not_used_again(
    place: Place, at: int
):
    keys = keys_of("flip", 2)
    with closing(place.open()) as backend:
        store(backend, keys)
    flip_payload(place.path, keys[1], at)
    for expected in (CORRUPT, MISS):
        with closing(place.open()) as backend:
            assert fetch(backend, keys) == [HIT, expected]
    with closing(place.open()) as backend:
        store(backend, keys)
        assert fetch(backend, keys) == [HIT, HIT]
        assert backend.stats().damaged_headers == 1, "the place of the damage was used again"


@pytest.mark.parametrize("shared", [slice(0, 31), slice(1, 32), slice(8, 32), slice(0, 24)])
def test_keys_that_share_a_part_are_two_keys(place: Place, shared: slice):
    keys: list[ObjectKey] = []
    for value in range(5):
        page = bytearray([value] * 32)
        page[shared] = bytes(len(page[shared]))
        keys.append(ObjectKey(PageKey(bytes(page)), GroupId(0)))
    with closing(place.open()) as backend:
        store(backend, keys[:4])
        assert fetch(backend, keys) == [HIT] * 4 + [MISS]


def test_keys_with_one_fingerprint_are_never_taken_for_each_other(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(index, "_fingerprints", lambda table: np.zeros(len(table), np.uint64))
    one, two = keys_of("fingerprint", 2)
    others = [one._replace(shard=1), two]
    with closing(place.open()) as backend:
        store(backend, [one])
        assert backend.contains([one, *others]).tolist() == [True, False, False]
        assert fetch(backend, [one, *others]) == [HIT, MISS, MISS]
        store(backend, [two])
        assert fetch(backend, [two]) == [HIT]
        assert fetch(backend, [one])[0] in {HIT, MISS}
        assert backend.remove([one, two]) >= 1
        assert not backend.contains([one, two]).any()
    with closing(place.open()) as backend:
        assert set(fetch(backend, [one, two])) <= {HIT, MISS}


def test_a_flipped_time_of_use_does_no_harm(place: Place):
    keys = keys_of("future", 3)
    with closing(place.open(ttl_s=100)) as backend:
        store(backend, keys)
    (path, segment), *_ = segments(place.path)
    flip(path, segment.geometry.uses_at + 7, bit=6)
    with closing(place.open(ttl_s=100)) as backend:
        assert fetch(backend, keys) == [HIT] * 3
        place.clock.advance(101)
        assert fetch(backend, keys) == [MISS] * 3
        assert store(backend, keys_of("now", 1)) == [STORED]
        assert fetch(backend, keys_of("now", 1)) == [HIT]


def test_a_truncated_segment_is_misses_or_corrupt_never_wrong(place: Place):
    keys = keys_of("short", 30)
    with closing(place.open(quota_bytes=16 << 20)) as backend:
        store(backend, keys)
        (path, segment), *_ = segments(place.path)
        os.truncate(path, segment.geometry.data_at + 5000)
        assert set(fetch(backend, keys)) <= {HIT, CORRUPT}
        assert CORRUPT in fetch(backend, keys) or MISS in fetch(backend, keys)
    os.truncate(path, 5000)
    with closing(place.open()) as backend:
        assert set(fetch(backend, keys)) <= {HIT, MISS}
        assert set(store(backend, keys)) <= {STORED, PRESENT}


def test_a_damaged_block_0_loses_the_segment_and_nothing_else(place: Place):
    one, two = keys_of("one", 3), keys_of("two", 3, group=1)
    with closing(place.open()) as backend:
        store(backend, one + two)
    (path, _), *_ = segments(place.path)
    flip(path, 20)
    with closing(place.open()) as backend:
        assert fetch(backend, one + two) == [MISS] * 3 + [HIT] * 3


def test_an_unfinished_segment_is_nothing(place: Place):
    with closing(place.open()) as backend:
        store(backend, keys_of("whole", 1))
    (place.path / "00000000ffff.seg").write_bytes(bytes(3 * BLOCK_BYTES))
    with closing(place.open()) as backend:
        assert fetch(backend, keys_of("whole", 1)) == [HIT]
        assert set(store(backend, keys_of("more", 2))) == {STORED}

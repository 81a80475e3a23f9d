"""A segment file byte by byte: marks, tables, and what half a call to the kernel leaves."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from stratakv.core.errors import StorageError
from stratakv.storage.file.segment import BLOCK_BYTES, Geometry, Segment
from stratakv.storage.header import headers_of
from stratakv.testing.storage_conformance import FORM, keys_of

SLOTS = 600
"""More than block 0 has room for marks."""


def geometry(page_bytes: int = 5000, slots: int = SLOTS) -> Geometry:
    return Geometry(spec_digest=FORM.spec_digest, group=1, slots=slots, page_bytes=page_bytes)


def pages(count: int, page_bytes: int = 5000) -> list[memoryview]:
    random = np.random.default_rng(count)
    return [memoryview(bytearray(random.bytes(page_bytes))) for _ in range(count)]


def hashes(of: Sequence[memoryview]) -> list[int]:
    return [xxh3_64_intdigest(page) for page in of]


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    with closing(Segment.create(tmp_path / "000000000001.seg", geometry())) as made:
        yield made


def read(segment: Segment, first: int, count: int) -> tuple[list[int], list[memoryview]]:
    into = [memoryview(bytearray(segment.geometry.page_bytes)) for _ in range(count)]
    return segment.read_pages(range(first, first + count), into), into


def test_a_mark_says_which_slot_and_touches_no_other(segment: Segment) -> None:
    assert segment.notes.marks() == []
    for slot in (0, 1, 2, SLOTS - 1):
        segment.notes.mark(slot)
    segment.notes.mark(1)
    segment.notes.mark(0)
    assert sorted(segment.notes.marks()) == [0, 1, 2, SLOTS - 1]
    segment.notes.unmark(1)
    assert sorted(segment.notes.marks()) == [0, 2, SLOTS - 1]
    assert not segment.notes.is_marked_deleted()
    segment.notes.mark_deleted()
    assert segment.notes.is_marked_deleted()
    assert sorted(segment.notes.marks()) == [0, 2, SLOTS - 1]


def test_a_mark_beyond_the_slots_is_damage_and_says_nothing(tmp_path: Path) -> None:
    with closing(Segment.create(tmp_path / "1.seg", geometry(slots=2))) as segment:
        for slot in (1, 2, 3):
            segment.notes.mark(slot)
        assert segment.notes.marks() == [1]


def test_changes_are_counted_whatever_lies_beside_them(segment: Segment) -> None:
    segment.notes.mark_deleted()
    assert [segment.count_change() for _ in range(3)] == [1, 2, 3]
    assert segment.changes() == 3


def test_headers_are_read_from_where_they_were_put(segment: Segment) -> None:
    table = headers_of(keys_of("a", 3), FORM.spec_digest)
    segment.put_headers(5, table)
    assert segment.headers(5, 3).tobytes() == table.tobytes()
    assert segment.headers(6, 1).tobytes() == table[1:2].tobytes() == segment.header_bytes(6, 1)
    assert len(segment.headers()) == SLOTS
    assert np.flatnonzero(segment.headers()["magic"]).tolist() == [5, 6, 7]


def test_tables_that_the_file_ends_in_are_an_error(segment: Segment, tmp_path: Path) -> None:
    os.truncate(tmp_path / segment.name, BLOCK_BYTES + 100)
    with pytest.raises(StorageError, match=f"ends at {BLOCK_BYTES + 100}, inside its tables"):
        segment.headers()
    with pytest.raises(StorageError, match="inside its tables"):
        segment.uses()


def test_pages_are_read_from_where_they_were_put(segment: Segment) -> None:
    given = pages(300)
    assert segment.write_pages(range(17, 317), given) == (hashes(given), None)
    assert read(segment, 17, 300) == (hashes(given), given)
    assert read(segment, 16, 1)[1] == read(segment, 317, 1)[1] == [bytes(5000)]
    page = memoryview(bytearray(5000))
    assert (segment.read_page(18, page), page) == (hashes(given)[1], given[1])


def test_a_segment_has_one_writer_until_it_lets_go(segment: Segment, tmp_path: Path) -> None:
    opened = Segment.open(tmp_path / segment.name)
    assert opened is not None
    with closing(opened) as other:
        assert (segment.owned, other.owned, other.own()) == (True, False, False)
        segment.disown()
        assert other.own()
        assert other.own(), "twice"
        assert not segment.own()
        with pytest.raises(AssertionError, match="another writer"):
            segment.put_headers(0, headers_of(keys_of("a", 1), FORM.spec_digest))
        with pytest.raises(AssertionError, match="another writer"):
            segment.write_pages([0], pages(1))


def test_a_file_that_was_deleted_has_no_new_writer(segment: Segment, tmp_path: Path) -> None:
    opened = Segment.open(tmp_path / segment.name)
    assert opened is not None
    with closing(opened) as other:
        (tmp_path / segment.name).unlink()
        segment.disown()
        assert not other.own()
        assert not other.owned


def test_block_0_says_what_a_segment_is_and_nothing_else_does(tmp_path: Path) -> None:
    packed = geometry().pack()
    assert Geometry.unpack(packed) == Geometry.unpack(packed + bytes(50)) == geometry()
    for at in range(len(packed)):
        assert Geometry.unpack(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]) is None
        assert Geometry.unpack(packed[:at]) is None


@pytest.mark.parametrize(("page_bytes", "slots"), [(1, 1), (4096, 33), (5000, 600), (1 << 20, 7)])
def test_tables_and_payloads_do_not_overlap_and_their_blocks_are_counted(
    tmp_path: Path, page_bytes: int, slots: int
) -> None:
    shape = geometry(page_bytes, slots)
    assert shape.uses_at >= BLOCK_BYTES + 128 * slots
    assert shape.tables_bytes >= shape.uses_at + 8 * slots
    assert shape.data_at >= shape.tables_bytes
    assert (shape.data_at % (2 << 20), shape.stride_bytes % BLOCK_BYTES) == (0, 0)
    assert shape.stride_bytes - BLOCK_BYTES < page_bytes <= shape.stride_bytes
    with closing(Segment.create(tmp_path / "1.seg", shape)):
        status = (tmp_path / "1.seg").stat()
    assert status.st_blocks * 512 == shape.physical_bytes
    assert status.st_size == shape.data_at + shape.data_bytes
    room = Geometry.slots_in(slots * (shape.stride_bytes + 136), page_bytes)
    assert room == slots
    assert Geometry.slots_in(slots * (shape.stride_bytes + 136) - 1, page_bytes) == max(
        1, slots - 1
    )

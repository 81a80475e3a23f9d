"""The index of a file store: which row holds which object, whatever segments come and go."""

import random

import numpy as np
import pytest

from stratakv.storage.backend import ObjectKey
from stratakv.storage.file.index import FOREIGN, NOWHERE, Index, same_headers, servable
from stratakv.storage.file.segment import Geometry
from stratakv.storage.header import HEADER, QUARANTINED, Headers, headers_of, seal
from stratakv.testing.storage_conformance import FORM, keys_of

GEOMETRY = Geometry(spec_digest=FORM.spec_digest, group=0, slots=4, page_bytes=FORM.page_bytes[0])


def table(keys: list[ObjectKey], stored_ns: int = 7) -> Headers:
    found = headers_of(keys, FORM.spec_digest)
    found["payload_bytes"] = [FORM.page_bytes[key.group] for key in keys]
    found["stored_ns"] = stored_ns
    return seal(found)


def rows(*of: int):
    return np.array(of, np.int64)


@pytest.fixture
def index() -> Index:
    made = Index()
    assert [made.attach(number, 4) for number in (0, 1)] == [0, 4]
    return made


def test_what_was_put_is_found_and_nothing_else(index: Index) -> None:
    keys = keys_of("a", 4)
    index.put(rows(5, 1, 6), table(keys[:3], stored_ns=9))
    assert index.lookup(table(keys)).tolist() == [5, 1, 6, NOWHERE]
    assert len(index) == 3
    assert np.flatnonzero(index.present).tolist() == [1, 5, 6]
    assert index.used[:8].tolist() == [0, 9, 0, 0, 0, 9, 9, 0]
    index.drop(rows(5))
    assert index.lookup(table(keys)).tolist() == [NOWHERE, 1, 6, NOWHERE]
    assert same_headers(index.headers[[5]], table(keys[:1], stored_ns=9)).all(), "kept to compare"
    index.clear(rows(5, 6))
    assert index.lookup(table(keys)).tolist() == [NOWHERE, 1, NOWHERE, NOWHERE]
    assert not index.headers[[5, 6]].tobytes().strip(b"\0")
    assert index.used[:8].tolist() == [0, 9, 0, 0, 0, 0, 0, 0]
    assert len(index) == 1


def test_of_an_object_that_two_slots_hold_the_last_is_found(index: Index) -> None:
    keys = keys_of("a", 1)
    index.put(rows(2), table(keys))
    index.put(rows(6), table(keys))
    assert index.lookup(table(keys)).tolist() == [6]
    assert (index.present[2], index.present[6], len(index)) == (False, True, 1)
    index.clear(rows(2))
    assert index.lookup(table(keys)).tolist() == [6], "a slot that is not found takes nothing along"
    index.clear(rows(6))
    assert index.lookup(table(keys)).tolist() == [NOWHERE]


def test_rows_of_a_segment_that_has_left_are_for_one_of_its_size(index: Index) -> None:
    index.put(rows(1, 5), table(keys_of("a", 2)))
    index.writable[:4] = 0
    index.detach(0, 4)
    assert index.lookup(table(keys_of("a", 2))).tolist() == [NOWHERE, 5]
    assert index.segment[:8].tolist() == [NOWHERE] * 4 + [1] * 4
    assert index.writable[:4].tolist() == [FOREIGN] * 4
    assert index.attach(2, 3) == 8, "of another size"
    assert index.attach(3, 4) == 0
    assert index.attach(4, 4) == 11
    assert index.segment[:15].tolist() == [3] * 4 + [1] * 4 + [2] * 3 + [4] * 4
    assert (index.writable[:15] == FOREIGN).all()
    assert not index.present[:4].any()


def test_an_index_that_grows_keeps_what_it_has(index: Index) -> None:
    keys = keys_of("a", 8)
    index.put(np.arange(8), table(keys))
    index.writable[:4] = 1
    first = index.attach(2, 3000)
    last = index.attach(3, 2000)
    assert (first, last) == (8, 3008)
    assert index.lookup(table(keys)).tolist() == list(range(8))
    assert index.segment[[0, 7, 8, 3007, 3008, 5007]].tolist() == [0, 1, 2, 2, 3, 3]
    assert index.writable[[0, 3, 4, 5007]].tolist() == [1, 1, FOREIGN, FOREIGN]
    assert (index.segment[5008:] == NOWHERE).all()
    assert (index.writable[5008:] == FOREIGN).all()
    more = keys_of("b", 5000)
    index.put(np.arange(8, 5008), table(more))
    assert index.lookup(table(more)).tolist() == list(range(8, 5008))
    sizes = {len(column) for column in (
        index.headers, index.used, index.present, index.segment, index.writable,
    )}  # fmt: skip
    assert len(sizes) == 1


def test_a_segment_is_loaded_as_it_is_on_the_disk_and_what_stayed_keeps_its_use(
    index: Index,
) -> None:
    keys = keys_of("a", 4)
    disk = np.zeros(4, HEADER)
    disk[[0, 1]] = table(keys[:2])
    uses = np.array([20, 3, 5, 0], np.uint64)
    assert index.load(4, disk, uses, GEOMETRY) == []
    assert index.lookup(table(keys)).tolist() == [4, 5, NOWHERE, NOWHERE]
    assert index.used[4:8].tolist() == [20, 7, 5, 0]
    assert index.newest_ns == 20
    disk[[1, 2]] = table(keys[2:], stored_ns=11)
    assert index.load(4, disk, np.zeros(4, np.uint64), GEOMETRY) == []
    assert index.lookup(table(keys)).tolist() == [4, NOWHERE, 5, 6]
    assert index.used[4:8].tolist() == [20, 11, 11, 0]
    assert index.newest_ns == 20
    disk[0] = np.zeros((), HEADER)
    index.load(4, disk, np.zeros(4, np.uint64), GEOMETRY)
    assert index.lookup(table(keys)).tolist() == [NOWHERE, NOWHERE, 5, 6]


def test_damage_is_reported_once_and_is_not_served(index: Index) -> None:
    keys = keys_of("a", 4)
    disk = table(keys)
    disk["stored_ns"][2] += 1  # its checksum is wrong now
    none = np.zeros(4, np.uint64)
    assert index.load(0, disk, none, GEOMETRY) == [2]
    assert index.lookup(table(keys)).tolist() == [0, 1, NOWHERE, 3]
    disk["magic"][1] = QUARANTINED
    assert index.load(0, seal(disk), none, GEOMETRY) == [1], "the other one was mended"
    assert index.lookup(table(keys)).tolist() == [0, NOWHERE, 2, 3]
    assert index.load(0, disk, none, GEOMETRY) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spec", (1, 2)),
        ("group", 1),
        ("payload_bytes", 5000),
        ("magic", QUARANTINED),
        ("version", 9),
    ],
)
def test_a_segment_serves_what_it_can_hold(field: str, value: object) -> None:
    held = table(keys_of("a", 2))
    assert servable(held, GEOMETRY).tolist() == [True, True]
    held[field][1] = value
    assert servable(seal(held), GEOMETRY).tolist() == [True, False]


@pytest.mark.parametrize("seed", range(4))
def test_the_index_agrees_with_a_dict_of_slots(seed: int) -> None:
    rng, index = random.Random(seed), Index()
    keys = keys_of("walk", 12)
    bases: dict[int, tuple[int, int]] = {}
    slots: dict[int, ObjectKey] = {}  # what is found, by row
    for step in range(300):
        if not bases or (len(bases) < 5 and rng.random() < 0.1):
            size = rng.choice((3, 5))
            base = index.attach(step, size)
            assert not {*range(base, base + size)} & {
                row for at, count in bases.values() for row in range(at, at + count)
            }
            bases[step] = base, size
        number = rng.choice(list(bases))
        base, size = bases[number]
        row = base + rng.randrange(size)
        if rng.random() < 0.05:
            index.detach(*bases.pop(number))
            slots = {at: key for at, key in slots.items() if not base <= at < base + size}
        elif rng.random() < 0.5 and row not in slots:
            key = rng.choice(keys)
            index.clear(rows(row))
            index.put(rows(row), table([key]))
            slots = {at: held for at, held in slots.items() if held != key} | {row: key}
        elif row in slots:
            (index.clear if rng.random() < 0.5 else index.drop)(rows(row))
            del slots[row]
        where = {key: at for at, key in slots.items()}
        assert index.lookup(table(keys)).tolist() == [where.get(key, NOWHERE) for key in keys]
        assert np.flatnonzero(index.present).tolist() == sorted(slots)
        assert len(index) == len(slots)

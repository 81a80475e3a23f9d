"""Removing everything: at once for whoever asks, and for others when next they are called."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from stratakv.storage.backend import Everything, ReadStatus, WriteStatus
from stratakv.storage.file.fsck import fsck
from stratakv.testing.storage_conformance import FORM, fetch, keys_of, store
from tests.storage_files import Place, flip_payload

HIT, MISS = ReadStatus.HIT, ReadStatus.MISS
STORED, PRESENT = WriteStatus.STORED, WriteStatus.PRESENT
ALL = Everything.EVERYTHING


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store")


def test_the_disk_has_its_room_back(place: Place):
    keys = keys_of("a", 200) + keys_of("b", 5, group=1)
    with closing(place.open()) as backend:
        store(backend, keys)
        assert backend.remove(ALL) == 205
        assert place.physical_bytes() == 0
        assert set(store(backend, keys)) == {STORED}
        assert set(fetch(backend, keys)) == {HIT}


def test_a_live_writer_serves_nothing_of_it_from_its_next_call_on(place: Place):
    keys = keys_of("peer", 30)
    with closing(place.open()) as one, closing(place.open()) as two, closing(place.open()) as three:
        store(one, keys)
        assert three.contains(keys).all()
        assert two.remove(ALL) == 30
        assert set(fetch(two, keys)) == {MISS}
        assert set(fetch(three, keys)) == {MISS}, "a third process still serves it"
        assert set(fetch(one, keys)) == {MISS}, "its writer still serves it"
        assert place.physical_bytes() == 0
        assert set(store(one, keys)) == {STORED}
        assert set(fetch(two, keys)) == set(fetch(three, keys)) == {HIT}


def test_a_writer_that_stores_next_starts_anew(place: Place):
    old, new = keys_of("old", 5), keys_of("new", 5)
    with closing(place.open()) as one, closing(place.open()) as two:
        store(one, old)
        two.remove(ALL)
        assert set(store(one, new)) == {STORED}
        assert set(fetch(one, new)) == set(fetch(two, new)) == {HIT}
        assert set(fetch(one, old)) == set(fetch(two, old)) == {MISS}


def test_a_writer_that_dies_before_it_obeys_leaves_nothing_to_the_next(place: Place):
    keys = keys_of("dead", 5)
    one = place.open()
    store(one, keys)
    with closing(place.open()) as two:
        two.remove(ALL)
    one.close()  # it never looked again
    assert len(list(place.path.glob("*.seg"))) == 1
    assert fsck(place.path).pages == 0
    with closing(place.open()) as three:
        assert set(fetch(three, keys)) == {MISS}
        assert set(store(three, keys)) == {STORED}
        assert set(fetch(three, keys)) == {HIT}
    assert len(list(place.path.glob("*.seg"))) == 1


def test_what_is_not_of_this_format_stays(place: Place):
    keys = keys_of("other", 5)
    other = replace(FORM, spec_digest=b"another-model-00")
    with closing(place.open(other)) as theirs:
        store(theirs, keys)
        with closing(place.open()) as mine:
            store(mine, keys)
            assert mine.remove(ALL) == 5
        assert theirs.contains(keys).all()
    with closing(place.open()) as mine:
        assert mine.remove(ALL) == 0
    with closing(place.open(other)) as theirs:
        assert theirs.contains(keys).all()


def test_a_slot_in_quarantine_goes_with_the_rest(place: Place):
    keys = keys_of("bad", 3)
    with closing(place.open()) as backend:
        store(backend, keys)
        flip_payload(place.path, keys[0], 7)
        fetch(backend, keys)
        assert backend.remove(ALL) == 2
        assert place.physical_bytes() == 0
    assert fsck(place.path).clean

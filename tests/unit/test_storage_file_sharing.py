"""Several stores over one directory: what each sees of the others, and who makes room for whom."""

from contextlib import closing
from pathlib import Path

import pytest

from stratakv.storage.backend import ObjectKey, WriteStatus
from stratakv.storage.file.ledger import Ledger
from stratakv.storage.file.segment import Segment
from stratakv.storage.file.store import FileStore
from stratakv.testing.storage_conformance import keys_of, store
from tests.storage_files import Place, place_of

STORED, FAILED, REFUSED = WriteStatus.STORED, WriteStatus.FAILED, WriteStatus.REFUSED
QUOTA = 3 << 20


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store")


def fill(backend: FileStore, name: str, group: int = 0) -> list[ObjectKey]:
    """Those of a few hundred pages that are there in the end."""
    keys = keys_of(name, 400, group=group)
    store(backend, keys)
    return [key for key, there in zip(keys, backend.contains(keys), strict=True) if there]


def want(place: Place) -> object:
    with closing(Ledger(place.path, QUOTA)) as ledger:
        return ledger.want()


def test_a_reader_sees_what_changes_in_any_segment(place: Place):
    """Its own lies between theirs, and one of them has just been forgotten."""
    with closing(place.open(slots=4)) as peer, closing(place.open(slots=4)) as backend:
        for turn in range(4):
            store(peer, keys_of(f"theirs {turn}", 4))
            store(backend, keys_of(f"mine {turn}", 4))
        last = keys_of("theirs 3", 4)
        assert backend.contains(last).all()
        for turn in (0, 3):
            keys = keys_of(f"theirs {turn}", 4)
            assert peer.remove(keys[:2]) == 2
            place.clock.advance(1.1)
            assert backend.contains(keys).tolist() == [False, False, True, True]
            new = keys_of(f"new {turn}", 2)
            assert store(peer, new) == [STORED] * 2
            assert backend.contains(new).all()


def test_who_has_too_much_still_stores_in_what_it_has(place: Place):
    with (
        closing(place.open(quota_bytes=QUOTA)) as old,
        closing(place.open(quota_bytes=QUOTA)) as new,
    ):
        fill(old, "old")
        assert REFUSED in store(new, keys_of("new", 4))
        assert store(old, keys_of("more", 4)) == [STORED] * 4


def test_who_has_got_room_asks_for_no_more(place: Place):
    with (
        closing(place.open(quota_bytes=QUOTA)) as old,
        closing(place.open(quota_bytes=QUOTA)) as new,
    ):
        fill(old, "old")
        assert store(new, keys_of("new", 1)) == [REFUSED]
        assert want(place) is not None
        place.clock.advance(1.5)
        old.contains(keys_of("none", 1))
        assert store(new, keys_of("new", 1)) == [STORED]
        assert want(place) is None


def test_who_gives_gives_of_what_it_has_most(place: Place):
    with (
        closing(place.open(quota_bytes=QUOTA)) as old,
        closing(place.open(quota_bytes=QUOTA)) as new,
    ):
        few = keys_of("few", 2, group=1)
        store(old, few)
        fill(old, "many")
        kept = old.contains(few).tolist()
        before = old.stats().segments
        for turn in range(3):
            store(new, keys_of(f"new {turn}", 4))
            place.clock.advance(1.5)
            old.contains(few)
        assert old.stats().counters.evicted > 0
        assert len(list(place.path.glob("*.seg"))) <= before
        assert old.contains(few).tolist() == kept


def test_pages_of_a_writer_that_is_gone_leave_before_younger_ones(place: Place):
    with closing(place.open(quota_bytes=QUOTA)) as gone:
        old = keys_of("old", 80)
        store(gone, old)
    place.clock.advance(10)
    with closing(place.open(quota_bytes=QUOTA)) as backend:
        young: list[ObjectKey] = []
        while backend.contains(old).all():
            some = keys_of(f"young {len(young)}", 8)
            assert store(backend, some) == [STORED] * 8
            young += some
            place.clock.advance(0.1)
        assert backend.contains(young).all()
        assert backend.stats().counters.evicted > 0


def test_segments_of_a_writer_make_room_once_it_is_gone(place: Place):
    """Who has found it alive asks again after a second."""
    with closing(place.open(quota_bytes=QUOTA)) as backend:
        with closing(place.open(quota_bytes=QUOTA)) as peer:
            fill(peer, "theirs")
            place.clock.advance(1.1)
            for _ in range(2):
                assert store(backend, keys_of("mine", 1)) == [REFUSED]
        assert store(backend, keys_of("mine", 1)) == [REFUSED], "it looks once a second"
        place.clock.advance(1.1)
        assert store(backend, keys_of("mine", 1)) == [STORED]


def test_free_slots_are_used_after_room_could_not_be_made(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    """The batch had taken them when a header could not be cleared."""

    def broken(*arguments: object) -> None:
        raise OSError(5, "injected")

    with closing(place.open(quota_bytes=QUOTA)) as backend:
        held = fill(backend, "held")
        assert backend.remove(held[:3]) == 3
        evicted = backend.stats().counters.evicted
        with monkeypatch.context() as patch:
            patch.setattr(Segment, "put_headers", broken)
            assert FAILED in store(backend, keys_of("fails", 9))
        place.clock.advance(1.1)
        assert store(backend, keys_of("after", 3)) == [STORED] * 3
        assert backend.stats().counters.evicted == evicted


def test_a_segment_with_room_is_taken_over_before_a_new_one_is_made(place: Place):
    with closing(place.open(slots=4)) as gone:
        store(gone, keys_of("full", 4))
        store(gone, keys_of("half", 2))
    place.clock.advance(1.1)
    with closing(place.open(slots=4)) as backend:
        more = keys_of("more", 2)
        assert store(backend, more) == [STORED] * 2
        assert backend.stats().segments == 2
        half = place_of(place.path, keys_of("half", 2)[0])[0]
        assert {place_of(place.path, key)[0] for key in more} == {half}
        with closing(place.open(slots=4)) as other:
            assert store(other, keys_of("theirs", 1)) == [STORED]
            assert other.stats().segments == 3, "the full one has no room, the other a writer"

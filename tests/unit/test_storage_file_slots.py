"""Free slots: in which order they are used, and what comes of a write that fails."""

import errno
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from stratakv.core.clock import ManualClock
from stratakv.storage.file.catalog import Catalog
from stratakv.storage.file.index import FOREIGN, NOWHERE
from stratakv.storage.file.ledger import Ledger
from stratakv.storage.file.segment import Geometry, Segment
from stratakv.storage.file.slots import Slots
from stratakv.storage.header import Headers, headers_of, is_blank, seal
from stratakv.testing.storage_conformance import FORM, keys_of

SLOTS = 4


def table(name: str, count: int) -> Headers:
    found = headers_of(keys_of(name, count), FORM.spec_digest)
    found["payload_bytes"] = FORM.page_bytes[0]
    return seal(found)


class Books:
    """A catalog of a directory of its own, with free slots."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ledger = Ledger(directory, 64 << 20)
        self.catalog = Catalog(self.ledger, FORM, ManualClock(1000.0))
        self.catalog.refresh()
        self.slots = Slots(self.catalog)

    def make(self, name: str, group: int = 0) -> int:
        geometry = Geometry(
            spec_digest=FORM.spec_digest,
            group=group,
            slots=SLOTS,
            page_bytes=FORM.page_bytes[group],
        )
        number = self.catalog.add(Segment.create(self.directory / name, geometry))
        assert self.slots.adopt(number)
        return number

    def on_disk(self, number: int) -> list[bool]:
        """Which slots of a segment have a header."""
        return (~is_blank(self.catalog.placed[number].segment.headers())).tolist()

    def close(self) -> None:
        self.catalog.close()
        self.ledger.close()


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    with closing(Books(tmp_path)) as made:
        yield made


def test_neighbours_are_taken_in_order_and_what_was_freed_last_first(books: Books) -> None:
    books.make("000000000001.seg")
    slots = books.slots
    assert slots.take(1, 2) == []
    assert slots.take(0, 3) == [0, 1, 2]
    assert slots.take(0, 3) == [3]
    assert slots.take(0, 1) == []
    slots.give_back(0, [0, 1, 2])
    assert slots.take(0, 2) == [0, 1]
    slots.give_back(0, [3])
    assert slots.take(0, 9) == [3, 2]
    assert slots.free == {0: []}


def test_a_header_goes_to_its_own_slot_whatever_the_order(books: Books) -> None:
    first = books.make("000000000001.seg")
    second = books.make("000000000002.seg")
    held = table("a", 3)
    before = [books.catalog.placed[number].changes for number in (first, second)]
    books.slots.fill([6, 1, 5], held)
    assert books.catalog.index.lookup(held).tolist() == [6, 1, 5]
    assert books.on_disk(first) == [False, True, False, False]
    assert books.on_disk(second) == [False, True, True, False]
    assert (
        books.catalog.placed[second].segment.headers()[[2, 1]].tobytes() == held[[0, 2]].tobytes()
    )
    for number, count in zip((first, second), before, strict=True):
        placed = books.catalog.placed[number]
        assert placed.changes == placed.segment.changes() == count + 1, "peers are told"


def test_what_is_cleared_is_zeros_on_the_disk_and_free(books: Books) -> None:
    number = books.make("000000000001.seg")
    rows = books.slots.take(0, 4)
    held = table("a", 4)
    books.slots.fill(rows, held)
    books.slots.clear(np.array([2, 0, 1]))
    assert books.on_disk(number) == [False, False, False, True]
    assert books.catalog.index.lookup(held).tolist() == [NOWHERE] * 3 + [3]
    assert books.slots.take(0, 4) == [0, 1, 2]
    assert books.catalog.placed[number].changes == books.catalog.placed[number].segment.changes()
    books.slots.clear(np.array([], np.int64))


def test_a_header_that_did_not_reach_the_disk_leaves_its_slot_free_and_others_out_of_use(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    books.make("000000000001.seg")
    second = books.make("000000000002.seg")
    put = Segment.put_headers

    def full(segment: Segment, first: int, headers: Headers) -> None:
        if segment is books.catalog.placed[second].segment:
            raise OSError(errno.ENOSPC, "no space")
        put(segment, first, headers)

    books.slots.free = {0: []}
    monkeypatch.setattr(Segment, "put_headers", full)
    held = table("a", 3)
    with pytest.raises(OSError, match="no space"):
        books.slots.fill([2, 3, 4], held)
    assert books.catalog.index.lookup(held).tolist() == [NOWHERE] * 3
    assert books.slots.free == {0: [4]}


def test_a_segment_that_goes_takes_its_free_slots_and_no_others(books: Books) -> None:
    first, second = books.make("000000000001.seg"), books.make("000000000002.seg")
    held = table("a", 1)
    books.slots.fill(books.slots.take(0, 1), held)
    books.slots.forget(second)
    assert sorted(books.slots.free[0]) == [0, 1, 2, 3]
    assert list(books.catalog.placed) == [first]
    assert books.catalog.index.lookup(held).tolist() == [NOWHERE]


def test_a_segment_is_borrowed_for_a_while_and_its_slots_with_it(books: Books) -> None:
    mine, theirs = books.make("000000000001.seg"), books.make("000000000002.seg")
    catalog, slots = books.catalog, books.slots
    slots.clear(np.array([], np.int64))
    slots.free = {0: [0]}
    catalog.disown(theirs)
    assert (catalog.index.writable[4:8] == FOREIGN).all()
    with slots.borrowed({mine, theirs}):
        assert [catalog.placed[number].segment.owned for number in (mine, theirs)] == [True, True]
        assert catalog.index.writable[:8].tolist() == [0] * 8
        assert sorted(slots.free[0]) == [0, 4, 5, 6, 7]
    assert [catalog.placed[number].segment.owned for number in (mine, theirs)] == [True, False]
    assert slots.free == {0: [0]}
    assert catalog.index.writable[:8].tolist() == [0] * 4 + [FOREIGN] * 4


def test_what_somebody_else_writes_is_not_adopted(books: Books) -> None:
    number = books.make("000000000001.seg")
    with closing(Books(books.directory)) as peer:
        (theirs,) = peer.catalog.placed
        assert not peer.slots.adopt(theirs)
        assert not peer.slots.free
        with peer.slots.borrowed({theirs}):
            assert not peer.catalog.placed[theirs].segment.owned
        books.slots.fill(books.slots.take(0, 2), table("a", 2))
        books.catalog.disown(number)
        assert peer.slots.adopt(theirs)
        assert peer.catalog.index.lookup(table("a", 2)).tolist() == [0, 1]
        assert peer.slots.take(0, 4) == [2, 3]


def test_a_second_copy_of_an_object_is_freed_where_it_is_adopted(books: Books) -> None:
    first, second = books.make("000000000001.seg"), books.make("000000000002.seg")
    held = table("a", 1)
    books.slots.fill([0], held)
    books.catalog.placed[second].segment.put_headers(1, held)  # as a peer would
    books.catalog.placed[second].segment.count_change()
    books.catalog.disown(first)
    books.catalog.disown(second)
    with closing(Books(books.directory)) as peer:
        for number in list(peer.catalog.placed):
            assert peer.slots.adopt(number)
        assert len(peer.catalog.index) == 1
        kept = [sum(peer.on_disk(number)) for number in peer.catalog.placed]
        assert sorted(kept) == [0, 1]
        assert len(peer.slots.free[0]) == 2 * SLOTS - 1


def test_a_segment_that_is_to_be_deleted_is_not_adopted(books: Books) -> None:
    number = books.make("000000000001.seg")
    books.slots.fill(books.slots.take(0, 1), table("a", 1))
    with closing(Books(books.directory)) as peer:
        (theirs,) = peer.catalog.placed
        books.catalog.placed[number].segment.notes.mark_deleted()
        books.catalog.disown(number)
        assert not peer.slots.adopt(theirs)
        assert not peer.slots.free
        assert peer.catalog.index.lookup(table("a", 1)).tolist() == [NOWHERE]


def test_uses_of_our_segments_are_taken_in_by_group(books: Books) -> None:
    first, second = books.make("000000000001.seg"), books.make("000000000002.seg", group=1)
    for number in (first, second):
        uses = np.arange(1, 1 + SLOTS, dtype=np.uint64) * 10
        books.catalog.placed[number].segment.put_uses(uses)
    books.catalog.merge_uses(1)
    assert books.catalog.index.used[:8].tolist() == [0] * 4 + [10, 20, 30, 40]
    books.catalog.disown(first)
    books.catalog.merge_uses(0)
    assert not books.catalog.index.used[:4].any()


def test_a_use_in_the_far_future_is_damage(books: Books) -> None:
    number = books.make("000000000001.seg")
    tomorrow = np.uint64((1000 + 86_400) * 10**9)
    uses = np.array([tomorrow, tomorrow + np.uint64(1), 5, 0], np.uint64)
    books.catalog.placed[number].segment.put_uses(uses)
    books.catalog.index.used[3] = 77
    books.catalog.put_uses(number)
    assert books.catalog.index.used[:4].tolist() == [int(tomorrow), 0, 5, 77]
    assert books.catalog.placed[number].segment.uses().tolist() == [int(tomorrow), 0, 5, 77]


def test_rows_are_grouped_into_runs_of_neighbours_in_one_segment(books: Books) -> None:
    numbers = [books.make(f"00000000000{at}.seg") for at in (1, 2)]
    placed = [books.catalog.placed[number] for number in numbers]
    runs = [(placed.index(of), list(run)) for of, run in books.catalog.runs([0, 1, 3, 4, 5, 2, 7])]
    assert runs == [(0, [0, 1]), (0, [3]), (1, [4, 5]), (0, [2]), (1, [7])]
    assert list(books.catalog.runs([])) == []

"""A mark says in which slices a model's pages lie in a store, and nothing of another model's."""

import threading

import pytest

from stratakv.core.clock import ManualClock
from stratakv.core.errors import StorageError
from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import Everything, ObjectKey, StoreFormat, WriteStatus
from stratakv.storage.cut_marks import MARK_BYTES, RENEW_S, CutMarks, MarkedBackend, marks_form
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore
from stratakv.storage.memory import MemoryBackend
from stratakv.storage.registry import MARK_SLOTS, open_marks, open_storage
from stratakv.storage.urls import parse_storage_url
from stratakv.testing.storage_faults import Faults, FaultyBackend

CUTS = (1, 2, 4, 8)
SPEC = b"a whole cache ok"
PAGES = StoreFormat(spec_digest=SPEC, page_bytes=(64,))
KEY = ObjectKey(PageKey(b"k" * 32), GroupId(0))
PAGE = memoryview(bytes(64))


@pytest.fixture
def store():
    return MemoryBackend(marks_form(SPEC))


def marks_of(store, cut, model=b"m"):
    return CutMarks(store, model, cut, [other for other in CUTS if other != cut])


def claim(store, cut, model=b"m", *, writes=True):
    return marks_of(store, cut, model).claim(writes=writes)


def test_the_first_one_marks_and_another_cut_is_reported(store):
    assert claim(store, 8) == ()
    assert claim(store, 8) == ()
    assert claim(store, 1) == (8,)
    assert claim(store, 4) == (8,)
    assert claim(store, 8) == ()


def test_who_was_refused_has_left_nothing(store):
    claim(store, 8)
    claim(store, 1)
    (mark,) = store.snapshot()
    store.remove([mark])
    assert claim(store, 2, writes=False) == ()


def test_who_does_not_write_only_looks(store):
    assert claim(store, 8, writes=False) == ()
    assert claim(store, 1) == ()
    assert claim(store, 8, writes=False) == (1,)
    assert claim(store, 1, writes=False) == ()


def test_another_model_is_nobodys_business(store):
    assert claim(store, 8, b"one") == ()
    assert claim(store, 1, b"another") == ()
    assert marks_form(SPEC) != marks_form(b"another cache 16")


def test_marks_of_both_cuts_let_either_go_on(store, caplog):
    for cut in (1, 8):
        marks_of(store, cut).renew()
    assert claim(store, 1) == ()
    assert "slices of --storage-shards 8 too; those of --storage-shards 1 are used" in caplog.text


class Racing(MemoryBackend):
    """Another server writes its mark between the first look and the write."""

    def __init__(self):
        super().__init__(marks_form(SPEC))
        self.rival = None

    def write(self, keys, pages):
        rival, self.rival = self.rival, None
        if rival is not None:
            marks_of(self, rival).renew()
        return super().write(keys, pages)


def test_of_two_that_claim_at_once_one_gives_way_and_leaves_nothing():
    store = Racing()
    store.rival = 8
    assert claim(store, 1) == (8,)
    assert claim(store, 2, writes=False) == (8,)
    store.remove(Everything.EVERYTHING)
    store.rival = 1
    assert claim(store, 1) == ()


def test_two_that_claim_at_once_never_both_go_on(tmp_path):
    """Over a real directory, whose openers learn of each other late."""
    url = parse_storage_url(f"file://{tmp_path}?quota=64MiB")
    for _ in range(20):
        meet, held = threading.Barrier(2), []

        def work(cut, meet=meet, held=held):
            store = open_marks(url, marks_form(SPEC))
            meet.wait()
            if not claim(store, cut):
                held.append(cut)
            meet.wait()
            store.close()

        threads = [threading.Thread(target=work, args=(cut,)) for cut in (1, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) <= 1, held
        store = open_marks(url, marks_form(SPEC))
        store.remove(Everything.EVERYTHING)
        store.close()


def test_a_store_that_takes_no_writes_stays_unmarked(store):
    for faults in (Faults(write_refused=1), Faults(write_fails=1)):
        assert claim(FaultyBackend(store, faults), 8) == ()
    assert claim(store, 1) == ()


def test_a_store_that_refuses_to_be_written_is_read_all_the_same(store, monkeypatch):
    def refuse(keys, pages):
        raise StorageError("403")

    monkeypatch.setattr(store, "write", refuse)
    assert claim(store, 8) == ()


def test_a_store_that_cannot_be_read_is_an_error(store):
    claim(store, 8)
    for faults in (Faults(call_fails=1), Faults(read_fails=1)):
        with pytest.raises(StorageError):
            claim(FaultyBackend(store, faults), 1)


# -- while it is used ------------------------------------------------------------------------------


@pytest.fixture
def used(store):
    clock = ManualClock(0.0)
    marks = marks_of(store, 8)
    marks.claim(writes=True)
    return MarkedBackend(MemoryBackend(PAGES), marks, clock), clock


@pytest.mark.parametrize("use", ["write", "touch"])
def test_a_mark_that_was_evicted_is_written_again(store, used, use):
    backend, clock = used
    act = {"write": lambda: backend.write([KEY], [PAGE]), "touch": lambda: backend.touch([KEY])}
    store.remove(Everything.EVERYTHING)
    act[use]()
    assert claim(store, 1, writes=False) == ()  # it is not looked at each time
    clock.advance(RENEW_S + 1)
    act[use]()
    assert claim(store, 1, writes=False) == (8,)


class Cool(MemoryBackend):
    """One whose objects are no younger for being written again, as in Redis. ``fresh`` counts
    those that were not there."""

    fresh = 0

    def write(self, keys, pages):
        if self.contains(keys).all():
            return [WriteStatus.PRESENT] * len(keys)
        self.fresh += 1
        return super().write(keys, pages)


def test_who_lost_its_mark_to_another_cut_says_so(store, used, caplog):
    """And both go on: pages of either are there."""
    backend, clock = used
    store.remove(Everything.EVERYTHING)
    assert claim(store, 1) == ()
    clock.advance(RENEW_S + 1)
    backend.write([KEY], [PAGE])
    assert "slices of --storage-shards 1 too; those of --storage-shards 8 are used" in caplog.text
    assert claim(store, 1) == claim(store, 8) == ()


def test_a_mark_that_is_used_does_not_grow_old(used):
    _, clock = used
    small = Cool(marks_form(SPEC), quota_bytes=3 * MARK_BYTES)
    marks = marks_of(small, 8)
    marks.claim(writes=True)
    backend = MarkedBackend(MemoryBackend(PAGES), marks, clock)
    for turn in range(10):
        clock.advance(RENEW_S + 1)
        backend.touch([KEY])
        claim(small, 8, b"model %d" % turn)
    assert claim(small, 1, writes=False) == (8,)
    assert small.fresh == 1 + 10


def test_a_cleared_store_is_free_until_it_is_written(store, used):
    backend, clock = used
    backend.write([KEY], [PAGE])
    assert backend.remove(Everything.EVERYTHING) == 1
    clock.advance(RENEW_S + 1)
    backend.touch([KEY])
    assert claim(store, 1, writes=False) == ()
    backend.write([KEY], [PAGE])
    assert claim(store, 1, writes=False) == (8,)


def test_the_first_pages_after_a_clear_are_marked_before_they_are_written(store, used, monkeypatch):
    """However soon that is."""
    backend, _ = used
    backend.write([KEY], [PAGE])
    backend.remove(Everything.EVERYTHING)
    seen, write = [], MemoryBackend.write

    def marked_first(self, keys, pages):
        if keys == [KEY]:
            seen.append(claim(store, 1, writes=False))
        return write(self, keys, pages)

    monkeypatch.setattr(MemoryBackend, "write", marked_first)
    backend.write([KEY], [PAGE])
    assert seen == [(8,)]


def test_pages_that_are_removed_one_by_one_leave_the_mark(store, used):
    backend, _ = used
    backend.write([KEY], [PAGE])
    assert backend.remove([KEY]) == 1
    assert claim(store, 1, writes=False) == (8,)


def test_marks_that_fail_fail_no_page(store):
    clock = ManualClock(0.0)
    broken = FaultyBackend(store, Faults())
    marks = marks_of(broken, 8)
    marks.claim(writes=True)
    backend = MarkedBackend(MemoryBackend(PAGES), marks, clock)
    broken.change(Faults(call_fails=1))
    clock.advance(RENEW_S + 1)
    assert backend.write([KEY], [PAGE])
    assert broken.injected == 1
    backend.touch([KEY])
    assert backend.contains([KEY]).all()
    assert broken.injected == 1  # it is tried again when it is due


@pytest.mark.parametrize("use", ["nothing", "write", "touch"])
def test_a_mark_under_which_nothing_was_stored_goes_with_its_server(tmp_path, use):
    url = parse_storage_url(f"file://{tmp_path}?quota=64MiB")
    marks = marks_of(open_marks(url, marks_form(SPEC)), 8)
    marks.claim(writes=True)
    backend = MarkedBackend(open_storage(url, PAGES), marks, ManualClock(0.0))
    if use == "write":
        backend.write([KEY], [PAGE])
    elif use == "touch":
        backend.touch([KEY])
    backend.close()
    backend.close()
    store = open_marks(url, marks_form(SPEC))
    assert claim(store, 1, writes=False) == (() if use == "nothing" else (8,))
    store.close()


def test_a_mark_that_was_there_stays_with_the_pages_under_it(tmp_path):
    url = parse_storage_url(f"file://{tmp_path}?quota=64MiB")
    for use in (True, False):
        marks = marks_of(open_marks(url, marks_form(SPEC)), 8)
        assert marks.claim(writes=True) == ()
        backend = MarkedBackend(open_storage(url, PAGES), marks, ManualClock(0.0))
        if use:
            backend.write([KEY], [PAGE])
        backend.close()
    store = open_marks(url, marks_form(SPEC))
    assert claim(store, 1, writes=False) == (8,)
    store.close()


def test_both_are_closed(store, used):
    backend, _ = used
    backend.close()
    backend.close()
    for closed in (store, backend):
        with pytest.raises(StorageError):
            closed.contains([KEY])


def test_marks_take_little_of_a_directory(tmp_path):
    url = parse_storage_url(f"file://{tmp_path}?quota=1GiB")
    store = open_marks(url, marks_form(SPEC))
    for model in range(3):
        claim(store, 8, b"%d" % model)
    assert store.stats().physical_bytes < 100_000
    store.close()
    pages = open_storage(url, PAGES)
    pages.write([KEY], [PAGE])
    assert pages.stats().physical_bytes > 10_000_000
    pages.close()


@pytest.mark.parametrize(
    "url", ["memory://?quota=1MiB", "mooncake://h:1?segment=1GiB", "redis://h:1/0", "s3://b/p"]
)
def test_marks_are_where_the_pages_are(url, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "stratakv.storage.registry.open_storage", lambda found, form: asked.append((found, form))
    )
    open_marks(parse_storage_url(url), PAGES)
    ((found, form),) = asked
    assert form == PAGES
    wanted = url.replace("segment=1GiB", "segment=0")  # it lends no memory a second time
    assert found == parse_storage_url(wanted)


# -- a directory that is full ----------------------------------------------------------------------

QUOTA = 4 << 20
LARGE = StoreFormat(spec_digest=SPEC, page_bytes=(4096,))


def full(directory, clock):
    """An open store that has evicted: no segment more fits its directory."""
    pages = FileStore(directory, LARGE, StoreLimits(quota_bytes=QUOTA), clock)
    for at in range(1200):
        clock.advance(0.001)
        pages.write([ObjectKey(PageKey(b"%032d" % at), GroupId(0))], [memoryview(bytes(4096))])
    assert pages.stats().counters.evicted > 0
    return pages


def marks_beside(pages, directory, clock):
    """Open, where what the pages take is all that there may be."""
    keeping = StoreLimits(quota_bytes=pages.stats().physical_bytes, slots=MARK_SLOTS)
    return FileStore(directory, marks_form(SPEC), keeping, clock)


def test_a_full_directory_gives_a_mark_a_segment_that_nobody_uses(tmp_path):
    clock = ManualClock(1e9)
    pages = full(tmp_path, clock)
    count, store = pages.stats().pages, marks_beside(pages, tmp_path, clock)
    pages.close()
    assert claim(store, 8) == ()
    assert claim(store, 1) == (8,)
    store.close()
    again = FileStore(tmp_path, LARGE, StoreLimits(quota_bytes=QUOTA), clock)
    assert count * 31 // 32 <= again.stats().pages < count
    again.close()


def test_a_full_directory_that_is_used_makes_room_for_a_mark_in_time(tmp_path):
    clock = ManualClock(1e9)
    pages = full(tmp_path, clock)
    store = marks_beside(pages, tmp_path, clock)
    backend = MarkedBackend(pages, marks_of(store, 8), clock)
    marks_of(store, 8).claim(writes=True)
    assert claim(store, 1, writes=False) == ()
    for _ in range(3):
        clock.advance(RENEW_S + 1)
        backend.touch([KEY])
        clock.advance(2)  # a store listens to its peers once a second
        pages.contains([KEY])
    assert claim(store, 1, writes=False) == (8,)
    backend.close()

"""The suite that every storage backend must pass; subclass it beside your backend. Owns the
contract of ``storage.backend``, as tests.

    class TestMyBackend(StorageConformance):
        @pytest.fixture
        def subject(self, tmp_path):
            return StorageSubject(open=lambda form: MyBackend(tmp_path, form), ...)

Needs the ``testing`` extra (pytest).
"""

import hashlib
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pytest

from stratakv.core.errors import StorageError
from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StorageBackend,
    StoreFormat,
    WriteStatus,
)
from stratakv.storage.cut_marks import CutMarks, marks_form

FORM: Final = StoreFormat(spec_digest=b"conformance-form", page_bytes=(12_288, 5000, 1))
STRIDE_BYTES: Final = 12_352
"""Of the arena that buffers are cut from: neither a power of two nor a page's size."""
GUARD: Final = 0xA5


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSubject:
    """What the suite must know of a backend.

    ``open``: over the same place each time, which was empty at first. ``corrupt``: flip a bit of
    the stored payload of a key, behind the backend's back; None where nobody can. ``shared``: two
    may be open at once. ``lasting``: what was stored is there after close and open. ``small``:
    opens a fresh one that has room for between 4 and 32 pages of group 0 and evicts; None where it
    never does.
    """

    open: Callable[[StoreFormat], StorageBackend]
    corrupt: Callable[[ObjectKey], None] | None
    shared: bool
    lasting: bool
    small: Callable[[], StorageBackend] | None


def keys_of(name: str, count: int, group: int = 0, shard: int = 0) -> list[ObjectKey]:
    """Keys that differ from those of every other name."""
    pages = [PageKey(hashlib.sha256(f"{name} {at}".encode()).digest()) for at in range(count)]
    return [ObjectKey(page, GroupId(group), shard) for page in pages]


def page_of(key: ObjectKey, form: StoreFormat = FORM) -> bytes:
    """The one right content of an object."""
    seed = hashlib.sha256(key.page + bytes([key.group, key.shard])).digest()
    return np.random.default_rng(list(seed)).bytes(form.page_bytes[key.group])


class Arena:
    """Buffers for some keys, cut from one block of memory with guarded gaps between them."""

    def __init__(self, keys: Sequence[ObjectKey], form: StoreFormat = FORM) -> None:
        self.keys = keys
        self._block = bytearray([GUARD]) * (STRIDE_BYTES * len(keys) + 1)
        view = memoryview(self._block)
        # One byte off: nothing may count on aligned buffers.
        starts = range(1, len(self._block), STRIDE_BYTES)
        self.pages = [
            view[at : at + form.page_bytes[key.group]] for at, key in zip(starts, keys, strict=True)
        ]
        self._form = form

    def fill(self) -> "Arena":
        for key, page in zip(self.keys, self.pages, strict=True):
            page[:] = page_of(key, self._form)
        return self

    def verify(self, statuses: Sequence[ReadStatus]) -> None:
        """Every hit has the right bytes, and no byte between the buffers was written."""
        assert len(statuses) == len(self.keys)
        for key, page, status in zip(self.keys, self.pages, statuses, strict=True):
            if status is ReadStatus.HIT:
                assert page == page_of(key, self._form), f"a hit with wrong bytes: {key}"
        for at, page in enumerate(self.pages):
            start = 1 + at * STRIDE_BYTES
            gap = self._block[start + len(page) : start + STRIDE_BYTES]
            assert set(gap) <= {GUARD}, "bytes outside of a buffer were written"


def store(backend: StorageBackend, keys: Sequence[ObjectKey]) -> list[WriteStatus]:
    return backend.write(keys, Arena(keys).fill().pages)


def fetch(backend: StorageBackend, keys: Sequence[ObjectKey]) -> list[ReadStatus]:
    arena = Arena(keys)
    statuses = backend.read(keys, arena.pages)
    arena.verify(statuses)
    return statuses


class StorageConformance:
    """Subclass as ``Test...`` and give it a fixture ``subject``."""

    @pytest.fixture
    def backend(self, subject: StorageSubject) -> Generator[StorageBackend, None, None]:
        with closing(subject.open(FORM)) as backend:
            yield backend

    def test_what_is_written_is_there_and_reads_back_exactly(self, backend: StorageBackend) -> None:
        keys = keys_of("a", 5) + keys_of("a", 4, group=1) + keys_of("a", 2, group=2, shard=3)
        assert not backend.contains(keys).any()
        assert fetch(backend, keys) == [ReadStatus.MISS] * 11
        assert store(backend, keys) == [WriteStatus.STORED] * 11
        found = backend.contains(keys)
        assert found.dtype == np.bool_
        assert found.all()
        assert fetch(backend, keys) == [ReadStatus.HIT] * 11
        assert fetch(backend, keys[::-1]) == [ReadStatus.HIT] * 11

    def test_an_object_is_page_group_and_shard(self, backend: StorageBackend) -> None:
        (key,) = keys_of("identity", 1, group=1)
        store(backend, [key])
        others = [key._replace(group=GroupId(0)), key._replace(shard=1), *keys_of("other", 1, 1)]
        assert not backend.contains(others).any()
        assert fetch(backend, others) == [ReadStatus.MISS] * 3
        assert store(backend, others) == [WriteStatus.STORED] * 3
        assert fetch(backend, [key, *others]) == [ReadStatus.HIT] * 4

    def test_a_batch_may_be_present_in_part(self, backend: StorageBackend) -> None:
        keys = keys_of("part", 8)
        store(backend, keys[1::3])
        there = [at in {1, 4, 7} for at in range(8)]
        assert backend.contains(keys).tolist() == there
        wanted = [ReadStatus.HIT if hit else ReadStatus.MISS for hit in there]
        assert fetch(backend, keys) == wanted
        written = [WriteStatus.PRESENT if hit else WriteStatus.STORED for hit in there]
        assert store(backend, keys) == written

    def test_writing_again_is_present_and_changes_nothing(self, backend: StorageBackend) -> None:
        keys = keys_of("again", 3)
        store(backend, keys)
        lies = [memoryview(bytes(FORM.page_bytes[0]))] * 3
        assert backend.write(keys, lies) == [WriteStatus.PRESENT] * 3
        assert fetch(backend, keys) == [ReadStatus.HIT] * 3

    def test_a_key_may_come_twice_in_a_batch(self, backend: StorageBackend) -> None:
        keys = keys_of("twice", 2)
        doubled = [keys[0], keys[1], keys[0]]
        statuses = store(backend, doubled)
        assert statuses[:2] == [WriteStatus.STORED] * 2
        assert statuses[2] in {WriteStatus.STORED, WriteStatus.PRESENT}
        assert fetch(backend, doubled) == [ReadStatus.HIT] * 3

    def test_empty_batches_are_nothing(self, backend: StorageBackend) -> None:
        assert backend.contains([]).shape == (0,)
        assert backend.read([], []) == []
        assert backend.write([], []) == []
        assert backend.remove([]) == 0
        backend.touch([])

    def test_a_big_batch(self, backend: StorageBackend) -> None:
        keys = keys_of("big", 700, group=2)
        assert set(store(backend, keys)) == {WriteStatus.STORED}
        assert backend.contains(keys).all()
        assert set(fetch(backend, keys)) == {ReadStatus.HIT}

    def test_buffers_are_the_callers_again_after_a_write(self, backend: StorageBackend) -> None:
        keys = keys_of("owner", 4)
        arena = Arena(keys).fill()
        backend.write(keys, arena.pages)
        for page in arena.pages:
            page[:] = bytes(len(page))
        assert fetch(backend, keys) == [ReadStatus.HIT] * 4

    def test_what_was_removed_is_a_miss(self, backend: StorageBackend) -> None:
        keys = keys_of("removed", 6)
        store(backend, keys)
        assert backend.remove([*keys[:4], *keys_of("never", 2)]) == 4
        assert backend.contains(keys).tolist() == [False] * 4 + [True] * 2
        assert fetch(backend, keys) == [ReadStatus.MISS] * 4 + [ReadStatus.HIT] * 2
        assert backend.remove(keys[:4]) == 0
        assert store(backend, keys[:4]) == [WriteStatus.STORED] * 4
        assert fetch(backend, keys) == [ReadStatus.HIT] * 6

    def test_everything_goes_and_another_format_stays(self, subject: StorageSubject) -> None:
        keys = keys_of("all", 40) + keys_of("all", 5, group=1) + keys_of("all", 3, 2, shard=7)
        other = replace(FORM, spec_digest=b"another-format-.")
        with closing(subject.open(FORM)) as backend, closing(subject.open(other)) as two:
            store(backend, keys)
            two.write(keys, Arena(keys, other).fill().pages)
            assert backend.remove(Everything.EVERYTHING) == 48
            assert not backend.contains(keys).any()
            assert fetch(backend, keys) == [ReadStatus.MISS] * 48
            assert two.contains(keys).all()
            assert backend.remove(Everything.EVERYTHING) == 0
            assert store(backend, keys) == [WriteStatus.STORED] * 48
            assert fetch(backend, keys) == [ReadStatus.HIT] * 48

    def test_everything_is_what_others_wrote_too(self, subject: StorageSubject) -> None:
        keys = keys_of("all of us", 9)
        if subject.shared:
            with closing(subject.open(FORM)) as one, closing(subject.open(FORM)) as two:
                store(one, keys)
                assert two.remove(Everything.EVERYTHING) == 9
                assert not two.contains(keys).any()
                assert not one.contains(keys).any()
                assert store(one, keys) == [WriteStatus.STORED] * 9
                assert fetch(two, keys) == [ReadStatus.HIT] * 9
                assert one.remove(Everything.EVERYTHING) == 9
        if subject.lasting:
            with closing(subject.open(FORM)) as one:
                store(one, keys)
            with closing(subject.open(FORM)) as two:
                assert two.remove(Everything.EVERYTHING) == 9
            with closing(subject.open(FORM)) as three:
                assert not three.contains(keys).any()

    def test_touching_what_is_there_and_what_is_not_never_fails(
        self, backend: StorageBackend
    ) -> None:
        keys = keys_of("touch", 4)
        store(backend, keys[:2])
        backend.touch(keys)
        assert backend.contains(keys).tolist() == [True, True, False, False]

    def test_a_corrupt_object_is_reported_once_and_never_served(
        self, subject: StorageSubject
    ) -> None:
        if subject.corrupt is None:
            return
        keys = keys_of("corrupt", 3)
        with closing(subject.open(FORM)) as backend:
            store(backend, keys)
            subject.corrupt(keys[1])
            hit, miss = ReadStatus.HIT, ReadStatus.MISS
            assert fetch(backend, keys) == [hit, ReadStatus.CORRUPT, hit]
            assert fetch(backend, keys) == [hit, miss, hit]
            assert backend.contains(keys).tolist() == [True, False, True]
            assert store(backend, keys)[1] is WriteStatus.STORED
            assert fetch(backend, keys) == [hit] * 3

    def test_another_format_never_hits(self, subject: StorageSubject) -> None:
        if not subject.lasting:
            return
        keys = keys_of("format", 3, group=1)
        with closing(subject.open(FORM)) as backend:
            store(backend, keys)
        for other in (
            replace(FORM, spec_digest=b"another-format-."),
            StoreFormat(spec_digest=b"other page bytes", page_bytes=(12_288, 5001, 1)),
        ):
            with closing(subject.open(other)) as backend:
                assert not backend.contains(keys).any()
                arena = Arena(keys, other)
                assert backend.read(keys, arena.pages) == [ReadStatus.MISS] * 3
        with closing(subject.open(FORM)) as backend:
            assert fetch(backend, keys) == [ReadStatus.HIT] * 3

    def test_it_lasts(self, subject: StorageSubject) -> None:
        if not subject.lasting:
            return
        keys = keys_of("lasting", 9) + keys_of("lasting", 3, group=1)
        with closing(subject.open(FORM)) as backend:
            store(backend, keys[1:])
            backend.remove(keys[1:2])
        with closing(subject.open(FORM)) as backend:
            assert backend.contains(keys).tolist() == [False] * 2 + [True] * 10
            assert fetch(backend, keys) == [ReadStatus.MISS] * 2 + [ReadStatus.HIT] * 10

    def test_closing_twice_is_closing_once_and_then_nothing_works(
        self, subject: StorageSubject
    ) -> None:
        backend = subject.open(FORM)
        keys = keys_of("closed", 1)
        store(backend, keys)
        backend.close()
        backend.close()
        backend.touch(keys)
        with pytest.raises(StorageError):
            backend.contains(keys)
        with pytest.raises(StorageError):
            fetch(backend, keys)
        with pytest.raises(StorageError):
            store(backend, keys)

    def test_marks_report_pages_that_are_cut_otherwise(self, subject: StorageSubject) -> None:
        """They are of a format of their own, and open beside the pages."""
        form = marks_form(FORM.spec_digest)
        with closing(subject.open(FORM)) as pages, closing(subject.open(form)) as marks:
            assert CutMarks(marks, b"a model", 8, (1, 2)).claim(writes=True) == ()
            CutMarks(marks, b"a model", 8, (1, 2)).renew()
            store(pages, keys_of("marked", 3))
            pages.remove(Everything.EVERYTHING)
            assert CutMarks(marks, b"a model", 1, (2, 8)).claim(writes=True) == (8,)
            assert CutMarks(marks, b"another", 1, (2, 8)).claim(writes=True) == ()
        if subject.lasting:
            with closing(subject.open(form)) as marks:
                assert CutMarks(marks, b"a model", 2, (1, 8)).claim(writes=True) == (8,)

    def test_two_openers_see_each_other(self, subject: StorageSubject) -> None:
        if not subject.shared:
            return
        mine, theirs = keys_of("mine", 4), keys_of("theirs", 4)
        with closing(subject.open(FORM)) as one, closing(subject.open(FORM)) as two:
            store(one, mine)
            store(two, theirs)
            assert fetch(two, mine) == [ReadStatus.HIT] * 4
            assert fetch(one, theirs) == [ReadStatus.HIT] * 4
            assert store(two, mine) == [WriteStatus.PRESENT] * 4
            one.remove(mine[:2])
            assert fetch(two, mine) == [ReadStatus.MISS] * 2 + [ReadStatus.HIT] * 2
            late = keys_of("late", 2)
            store(one, late)
            assert two.contains(late).all()
            assert fetch(two, late) == [ReadStatus.HIT] * 2

    def test_two_openers_at_once(self, subject: StorageSubject) -> None:
        """Both write, read and remove the same keys; no wrong byte, no error."""
        if not subject.shared:
            return
        keys = keys_of("race", 24)
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                with closing(subject.open(FORM)) as backend:
                    for _ in range(30):
                        some = [keys[at] for at in rng.permutation(24)[:8]]
                        assert WriteStatus.FAILED not in store(backend, some)
                        fetch(backend, [keys[at] for at in rng.permutation(24)[:8]])
                        backend.remove([keys[at] for at in rng.permutation(24)[:3]])
            except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures

    def test_what_was_used_longest_ago_leaves_first(self, subject: StorageSubject) -> None:
        """Chains are touched deepest page first, so that heads stay and tails go."""
        if subject.small is None:
            return
        chain = keys_of("chain", 4)
        with closing(subject.small()) as backend:
            store(backend, chain)
            for turn in range(40):
                (fresh,) = keys_of(f"fresh {turn}", 1)
                backend.touch(chain[:2][::-1])
                assert store(backend, [fresh]) == [WriteStatus.STORED]
            assert backend.contains(chain).tolist() == [True, True, False, False]
            assert fetch(backend, chain)[:2] == [ReadStatus.HIT] * 2

    @pytest.mark.parametrize("touched", [False, True])
    def test_the_deepest_page_of_a_chain_leaves_first(
        self,
        subject: StorageSubject,
        touched: bool,  # noqa: FBT001 - a parameter of the test
    ) -> None:
        """A batch comes from the head down. What came page by page, the head is the oldest of, and
        a touch from the deepest page up puts it right."""
        if subject.small is None:
            return
        chain = keys_of("deep", 4)
        with closing(subject.small()) as backend:
            if touched:
                for key in chain:
                    store(backend, [key])
                backend.touch(chain[::-1])
            else:
                store(backend, chain)
            seen = {4}
            for turn in range(60):
                store(backend, keys_of(f"new {turn}", 1))
                there = backend.contains(chain).tolist()
                assert there == sorted(there, reverse=True), "a head left before its tail"
                seen.add(sum(there))
            assert 0 in seen

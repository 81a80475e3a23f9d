from dataclasses import replace

import pytest

from stratakv.core.errors import StorageError
from stratakv.storage.backend import Everything, ReadStatus, WriteStatus
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.storage_conformance import FORM, Arena, keys_of, page_of
from stratakv.testing.storage_faults import Faults, FaultyBackend

KEYS = keys_of("faults", 40, group=1)
NONE = Faults(seed=3)


def wrapped(faults: Faults = NONE) -> FaultyBackend:
    backend = FaultyBackend(MemoryBackend(FORM), replace(faults, seed=3), lambda seconds: None)
    quiet = backend.faults
    backend.change(NONE)
    backend.write(KEYS, Arena(KEYS).fill().pages)
    backend.change(quiet)
    return backend


def test_without_faults_it_is_what_it_wraps():
    backend = wrapped()
    arena = Arena(KEYS)
    assert set(backend.read(KEYS, arena.pages)) == {ReadStatus.HIT}
    arena.verify([ReadStatus.HIT] * 40)
    assert backend.injected == 0


@pytest.mark.parametrize(
    ("faults", "status"),
    [
        (Faults(read_misses=0.3), ReadStatus.MISS),
        (Faults(read_fails=0.3), ReadStatus.FAILED),
        (Faults(read_corrupt=0.3), ReadStatus.CORRUPT),
    ],
)
def test_reads_fail_as_configured_and_the_rest_are_right(faults: Faults, status: ReadStatus):
    backend, arena = wrapped(faults), Arena(KEYS)
    statuses = backend.read(KEYS, arena.pages)
    arena.verify(statuses)
    assert set(statuses) == {ReadStatus.HIT, status}
    assert statuses.count(status) == backend.injected
    assert statuses == wrapped(faults).read(KEYS, Arena(KEYS).pages), "a seed is a seed"


def test_a_lie_is_a_hit_with_wrong_bytes():
    arena = Arena(KEYS)
    statuses = wrapped(Faults(lies=0.3)).read(KEYS, arena.pages)
    assert set(statuses) == {ReadStatus.HIT}
    right = [page == page_of(key) for key, page in zip(KEYS, arena.pages, strict=True)]
    assert 0 < right.count(False) < 40


def test_writes_fail_as_configured_and_what_failed_is_not_there():
    backend = wrapped(Faults(write_refused=0.3, write_fails=0.3))
    fresh = keys_of("fresh", 40, group=1)
    statuses = backend.write(fresh, Arena(fresh).fill().pages)
    assert set(statuses) == {WriteStatus.STORED, WriteStatus.REFUSED, WriteStatus.FAILED}
    stored = [status is WriteStatus.STORED for status in statuses]
    assert backend.contains(fresh).tolist() == stored


def test_calls_fail_and_take_time():
    slept: list[float] = []
    backend = FaultyBackend(MemoryBackend(FORM), Faults(call_fails=1.0, delay_s=0.5), slept.append)
    for call in (backend.contains, backend.remove):
        with pytest.raises(StorageError, match="injected"):
            call(KEYS)
    backend.touch(KEYS)
    assert slept == [0.5, 0.5]
    assert backend.calls == {"contains": 1, "remove": 1, "touch": 1}


def test_a_call_that_breaks_has_done_a_part():
    backend = wrapped()
    backend.change(replace(NONE, call_breaks=1.0))
    fresh = keys_of("broken", 40, group=1)
    with pytest.raises(StorageError, match="injected after"):
        backend.write(fresh, Arena(fresh).fill().pages)
    for call in (backend.contains, backend.remove):
        with pytest.raises(StorageError, match="injected after"):
            call(KEYS)
    with pytest.raises(StorageError, match="injected after"):
        backend.read(KEYS, Arena(KEYS).pages)
    backend.change(NONE)
    there = backend.contains(fresh).tolist()
    assert 0 < sum(there) < 40
    assert there == sorted(there, reverse=True)
    assert 0 < backend.contains(KEYS).sum() < 40
    assert backend.injected == 4


def test_it_says_of_what_is_not_there_that_it_is_and_the_read_misses():
    backend = wrapped(Faults(contains_lies=0.3))
    fresh = keys_of("absent", 40, group=1)
    assert 0 < backend.contains(fresh).sum() < 40
    assert backend.read(fresh, Arena(fresh).pages) == [ReadStatus.MISS] * 40
    assert backend.contains(KEYS).all()


def test_a_write_that_is_lost_was_called_stored():
    backend = wrapped(Faults(write_lost=0.3))
    fresh = keys_of("lost", 40, group=1)
    assert set(backend.write(fresh, Arena(fresh).fill().pages)) == {WriteStatus.STORED}
    assert 0 < backend.contains(fresh).sum() < 40


def test_everything_can_be_removed_or_that_fails():
    backend = wrapped(Faults(call_fails=1.0))
    with pytest.raises(StorageError, match="injected"):
        backend.remove(Everything.EVERYTHING)
    backend.change(NONE)
    assert backend.remove(Everything.EVERYTHING) == 40

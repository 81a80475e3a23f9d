"""What a file store does beside its answers: what a failing disk turns off and for how long, which
files it has open, and what it writes when it closes.
"""

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from stratakv.storage.backend import Everything, ReadStatus, WriteStatus
from stratakv.storage.file.ledger import Ledger
from stratakv.storage.file.segment import Segment
from stratakv.storage.file.slots import Slots
from stratakv.storage.file.store import FileStore
from stratakv.testing.storage_conformance import FORM, fetch, keys_of, store
from tests.storage_files import Place, flip_payload

HIT, MISS = ReadStatus.HIT, ReadStatus.MISS
STORED, FAILED, REFUSED = WriteStatus.STORED, WriteStatus.FAILED, WriteStatus.REFUSED
OTHER = replace(FORM, spec_digest=b"another-model-00")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store")


def broken(*arguments: object) -> None:
    raise OSError(errno.EIO, "injected")


# -- a disk that fails -----------------------------------------------------------------------------


def on_payload(place: Place, backend: FileStore, patch: pytest.MonkeyPatch):
    patch.setattr(os, "pwritev", broken)
    assert store(backend, keys_of("fails", 2)) == [FAILED, REFUSED]


def on_header(place: Place, backend: FileStore, patch: pytest.MonkeyPatch):
    patch.setattr(Segment, "put_headers", broken)
    assert store(backend, keys_of("fails", 2)) == [FAILED, FAILED]


def on_sync(place: Place, backend: FileStore, patch: pytest.MonkeyPatch):
    patch.setattr(Segment, "sync", broken)
    assert set(store(backend, keys_of("fails", 2))) <= {FAILED, REFUSED}


def on_uses(place: Place, backend: FileStore, patch: pytest.MonkeyPatch):
    backend.touch(keys_of("first", 1))
    patch.setattr(Segment, "put_uses", broken)
    place.clock.advance(1.1)
    assert backend.contains(keys_of("first", 2)).tolist() == [True, True]


def on_mending(place: Place, backend: FileStore, patch: pytest.MonkeyPatch):
    """A peer has found damage in what this one writes."""
    flip_payload(place.path, keys_of("first", 2)[1], 3)
    with closing(place.open()) as peer:
        assert fetch(peer, keys_of("first", 2)) == [HIT, ReadStatus.CORRUPT]
    patch.setattr(Slots, "apply_damage_reports", broken)
    assert backend.contains(keys_of("first", 1)).all()


def on_room(place: Place, backend: FileStore, patch: pytest.MonkeyPatch):
    turn = 0
    while backend.stats().counters.evicted == 0:
        store(backend, keys_of(f"fill {turn}", 40))
        turn += 1
    patch.setattr(Segment, "put_headers", broken)
    more = store(backend, keys_of("fails", 60))
    assert FAILED in more
    assert STORED not in more


FAULTS = [on_payload, on_header, on_sync, on_uses, on_mending, on_room]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("python_page_io")
def test_a_write_that_fails_anywhere_turns_writes_off_for_a_second(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Place, FileStore, pytest.MonkeyPatch], None],
):
    """And no longer after the next one: what has worked meanwhile counts."""
    first = keys_of("first", 2)
    with closing(place.open(quota_bytes=3 << 20, power_safe=True)) as backend:
        assert store(backend, first) == [STORED] * 2
        for turn in range(1, 3):
            assert backend.stats().counters.write_errors == turn - 1
            with monkeypatch.context() as patch:
                fault(place, backend, patch)
            assert not backend.stats().writing
            assert backend.stats().counters.write_errors >= turn
            assert store(backend, keys_of("refused", 1)) == [REFUSED]
            backend.contains(first)
            assert backend.stats().counters.write_errors == turn
            place.clock.advance(1.1)
            assert backend.stats().writing
            assert store(backend, keys_of(f"after {turn}", 1)) == [STORED]
            if fault in (on_room, on_mending):  # once is enough: the store is another one now
                return


# -- files that are open ---------------------------------------------------------------------------


def forgets_all(place: Place, backend: FileStore):
    backend.remove(Everything.EVERYTHING)
    assert backend.stats().segments == 0


def expires(place: Place, backend: FileStore):
    place.clock.advance(101)
    backend.contains(keys_of("none", 1))
    assert backend.stats().segments == 0


def takes_the_room_of_another_model(place: Place, backend: FileStore):
    backend.remove(Everything.EVERYTHING)
    with closing(place.open(OTHER, quota_bytes=3 << 20)) as other:
        store(other, keys_of("other", 400))
        assert REFUSED in store(backend, keys_of("more", 1)), "it is being written"
    place.clock.advance(1.1)
    assert store(backend, keys_of("more", 1)) == [STORED]


def finds_what_is_no_segment(place: Place, backend: FileStore):
    (path,) = place.path.glob("*.seg")
    (place.path / f"{1 << 40:012x}.seg").write_bytes(path.read_bytes()[:5000])
    (place.path / f"{2 << 40:012x}.seg").write_bytes(b"notes of somebody")
    (place.path / f"{3 << 40:012x}.seg").symlink_to(path)
    os.mkfifo(place.path / f"{4 << 40:012x}.seg")
    with closing(Ledger(place.path, 1 << 20)) as ledger, ledger.locked():
        ledger.changed()
        for name in ledger.names():
            ledger.delete_idle(name)
    with closing(place.open()) as peer:
        assert peer.stats().segments == 1


def gets_no_new_file(place: Place, backend: FileStore):
    before = set(os.listdir(place.path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", broken)
        assert store(backend, keys_of("other group", 1, group=1)) == [REFUSED]
    assert set(os.listdir(place.path)) <= before


def gets_no_durable_file(place: Place, backend: FileStore):
    before = set(os.listdir(place.path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        assert store(backend, keys_of("other group", 1, group=1)) == [FAILED]
    assert set(os.listdir(place.path)) <= before
    place.clock.advance(1.1)
    assert store(backend, keys_of("other group", 1, group=1)) == [STORED]


@pytest.mark.parametrize(
    "what",
    [
        forgets_all, expires, takes_the_room_of_another_model, finds_what_is_no_segment,
        gets_no_new_file, gets_no_durable_file,
    ],
)  # fmt: skip
def test_nothing_is_left_open(place: Place, what: Callable[[Place, FileStore], None]):
    before = len(os.listdir("/proc/self/fd"))
    with closing(place.open(quota_bytes=3 << 20, ttl_s=100, power_safe=True)) as backend:
        store(backend, keys_of("first", 2))
        what(place, backend)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_names_of_new_segments_survive_a_power_loss(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    synced: list[bool] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.path.samestat(os.fstat(fd), place.path.stat()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with closing(place.open(power_safe=True)) as backend:
        store(backend, keys_of("first", 2))
        assert synced == [True]
        store(backend, keys_of("second", 2))
        assert synced == [True]


def test_the_segments_of_another_model_make_room_once_their_writer_is_gone(place: Place):
    """The store has met them while they were written, and nothing else happens in the directory
    that would tell it."""
    with closing(place.open(quota_bytes=3 << 20)) as backend:
        with closing(place.open(OTHER, quota_bytes=3 << 20)) as other:
            store(other, keys_of("other", 400))
            held = other.stats().segments
            for _ in range(2):
                assert store(backend, keys_of("mine", 1)) == [REFUSED]
        assert store(backend, keys_of("mine", 1)) == [REFUSED], "it looks once a second"
        place.clock.advance(1.1)
        assert store(backend, keys_of("mine", 1)) == [STORED]
        left = len(list(place.path.glob("*.seg")))
        assert held // 2 < left <= held, "no more than it needs are deleted"
        assert fetch(backend, keys_of("mine", 1)) == [HIT]


# -- what it writes when it closes -----------------------------------------------------------------


def test_uses_of_the_last_second_are_known_to_the_next_one(place: Place):
    old, young = keys_of("old", 4), keys_of("young", 4)
    with closing(place.open()) as backend:
        store(backend, old)
        store(backend, young)
        place.clock.advance(50)
        backend.touch(old)
    place.clock.advance(60)
    with closing(place.open(ttl_s=100)) as backend:
        assert backend.contains([*old, *young]).tolist() == [True] * 4 + [False] * 4


def test_a_store_in_a_directory_of_directories_that_are_not_there(tmp_path: Path):
    place = Place(tmp_path / "a" / "b" / "store")
    with closing(place.open()) as backend:
        assert store(backend, keys_of("first", 1)) == [STORED]


def uses_of(backend: FileStore, keys: Sequence[object]) -> list[bool]:
    return backend.contains(keys).tolist()


def test_what_is_used_at_the_last_moment_has_not_expired(place: Place):
    keys = keys_of("edge", 2)
    with closing(place.open(ttl_s=100)) as backend:
        store(backend, keys)
        place.clock.advance(60)
        backend.touch(keys[1:])
        place.clock.advance(100)
        assert uses_of(backend, keys) == [False, True]
        place.clock.advance(0.001)
        assert uses_of(backend, keys) == [False, False]

"""Whatever becomes of the 48 bytes of a ledger: the store opens, serves and keeps its quota."""

import fcntl
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from stratakv.core.errors import StorageError
from stratakv.storage.backend import Everything, ReadStatus, WriteStatus
from stratakv.storage.file.fsck import fsck
from stratakv.storage.file.ledger import Ledger, Want
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.storage_conformance import fetch, keys_of, store
from tests.storage_files import Place, flip

HIT, MISS = ReadStatus.HIT, ReadStatus.MISS
VOUCHED_BYTES, WANT_BYTES, MAGIC_BYTES = 16, 24, 8
LEDGER_BYTES = VOUCHED_BYTES + WANT_BYTES + MAGIC_BYTES
QUOTA_BYTES = 3 << 20
KEYS = keys_of("kept", 4)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A store of four pages, and somebody who wanted room long ago."""
    made = Place(tmp_path / "store")
    with closing(made.open(quota_bytes=QUOTA_BYTES)) as backend:
        store(backend, KEYS)
    with closing(Ledger(made.path, QUOTA_BYTES)) as ledger:
        ledger.set_want(Want(7, 1 << 20, 1))
    assert (made.path / "ledger").stat().st_size == LEDGER_BYTES
    return made


def serves(place: Place) -> None:
    with closing(place.open(quota_bytes=QUOTA_BYTES)) as backend:
        assert fetch(backend, KEYS) == [HIT] * len(KEYS)


def serves_and_keeps_its_quota(place: Place, others: int = 0) -> None:
    """Twice the quota is written; what is on the disk is what the store knows, then and later."""
    held = KEYS + keys_of("new", 400)
    with closing(place.open(quota_bytes=QUOTA_BYTES)) as backend:
        assert fetch(backend, KEYS) == [HIT] * len(KEYS)
        assert set(store(backend, held[len(KEYS) :])) <= {WriteStatus.STORED, WriteStatus.REFUSED}
        known = int(backend.contains(held).sum())
        assert known > 100
    assert place.physical_bytes() <= QUOTA_BYTES
    with closing(place.open(quota_bytes=QUOTA_BYTES)) as backend:
        assert int(backend.contains(held).sum()) == known
        assert backend.stats().segments == len(list(place.path.iterdir())) - 1 - others


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:size]


def vouched(count: int) -> bytes:
    data = struct.pack("<Q", count)
    return data + struct.pack("<Q", xxh3_64_intdigest(data))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": cut(0),
    "cut inside the count": cut(5),
    "cut inside the checksum": cut(12),
    "zeros": lambda data: bytes(len(data)),
    "ones before the magic": lambda data: b"\xff" * (len(data) - MAGIC_BYTES) + data[-MAGIC_BYTES:],
    "bit 48 of the count": lambda data: bytes([*data[:6], data[6] ^ 1, *data[7:]]),
    "no checksum, as it was": lambda data: data[:8] + data[VOUCHED_BYTES:-MAGIC_BYTES],
    "a bit of the count, before there was a magic": lambda data: bytes([data[0] ^ 1]) + data[1:40],
    "a count without end, vouched for": lambda data: vouched(2**64 - 1),
}
STRANGERS: dict[str, bytes] = {
    "text": b"12.03. rent 900\n",
    "a line of text": b"rent\n",
    "long": bytes(4096),
    "ones": b"\xff" * LEDGER_BYTES,
}


@pytest.fixture(params=DAMAGES)
def damaged(request: pytest.FixtureRequest, place: Place) -> Place:
    ledger = place.path / "ledger"
    ledger.write_bytes(DAMAGES[request.param](ledger.read_bytes()))
    return place


def test_a_damaged_ledger_costs_no_page_and_no_quota(damaged: Place):
    serves_and_keeps_its_quota(damaged)
    assert fsck(damaged.path).clean


def test_fsck_reports_a_damaged_ledger_and_mends_it(damaged: Place):
    before = (damaged.path / "ledger").read_bytes()
    found = fsck(damaged.path)
    assert (found.bad_ledger, found.mended, found.clean) == (1, 0, False)
    assert found.problems == ["the ledger is damaged"]
    assert (damaged.path / "ledger").read_bytes() == before
    mended = fsck(damaged.path, repair=True)
    assert (mended.bad_ledger, mended.mended, mended.clean) == (1, 1, True)
    assert fsck(damaged.path).bad_ledger == 0
    serves_and_keeps_its_quota(damaged)


def test_fsck_mends_a_ledger_and_segments_at_once(damaged: Place):
    (damaged.path / "00000000aaaa.seg").write_bytes(b"SKVSEG\0 no segment")
    mended = fsck(damaged.path, repair=True)
    assert (mended.bad_ledger, mended.broken, mended.mended, mended.clean) == (1, 1, 2, True)
    assert fsck(damaged.path).clean


@pytest.mark.parametrize("what", STRANGERS)
def test_a_ledger_that_is_somebody_elses_is_never_written_and_can_be_moved_away(
    place: Place, what: str
):
    ledger = place.path / "ledger"
    ledger.write_bytes(STRANGERS[what])
    for call in (place.open, lambda: fsck(place.path, repair=True)):
        with pytest.raises(StorageError, match=r"'ledger' in it is not ours and is left as it is"):
            call()
        assert ledger.read_bytes() == STRANGERS[what]
    ledger.rename(place.path / "my ledger")
    serves_and_keeps_its_quota(place, others=1)
    assert (place.path / "my ledger").read_bytes() == STRANGERS[what]


def test_a_ledger_of_before_the_magic_gets_one_with_the_next_segment(place: Place):
    ledger = place.path / "ledger"
    os.truncate(ledger, LEDGER_BYTES - MAGIC_BYTES)
    serves(place)
    assert fsck(place.path, repair=True).clean
    assert ledger.stat().st_size == LEDGER_BYTES - MAGIC_BYTES
    serves_and_keeps_its_quota(place)
    assert ledger.read_bytes()[-MAGIC_BYTES:] == b"SKVLEDGR"


EDGES = {0, 1, 7, 8, VOUCHED_BYTES - 1, VOUCHED_BYTES, LEDGER_BYTES - MAGIC_BYTES, LEDGER_BYTES - 1}
"""First and last bytes of what a ledger has; those between are tried in `make test-long`."""
PLACES = [
    pytest.param(at, marks=() if at in EDGES else pytest.mark.long) for at in range(LEDGER_BYTES)
]


@pytest.mark.parametrize("at", PLACES)
def test_a_flipped_bit_of_any_byte_is_seen_or_harmless(place: Place, at: int):
    for bit in range(8):
        flip(place.path / "ledger", at, bit)
        assert fsck(place.path).bad_ledger == (at < VOUCHED_BYTES)
        serves(place)
    flip(place.path / "ledger", at, bit=at % 8)
    serves_and_keeps_its_quota(place)


@pytest.mark.parametrize("size", PLACES)
def test_a_ledger_that_is_cut_anywhere_is_seen_or_harmless(place: Place, size: int):
    os.truncate(place.path / "ledger", size)
    assert fsck(place.path).bad_ledger == (size < VOUCHED_BYTES)
    serves(place)
    assert fsck(place.path).clean


@pytest.mark.parametrize("name", ["ffffffffffff", "1000000000003", "f" * 16, "0" + "f" * 15])
def test_a_strangers_name_is_counted_and_stops_nobody(place: Place, name: str):
    segment = min(place.path.glob("*.seg"))
    segment.rename(segment.with_stem(name))
    (place.path / "ledger").write_bytes(b"")
    serves_and_keeps_its_quota(place)
    with closing(Ledger(place.path, QUOTA_BYTES)) as ledger, ledger.locked():
        names = set(ledger.names())
        assert names == {path.name for path in place.path.glob("*.seg")}
        assert ledger.new_path().name not in names


def test_a_new_directory_is_clean_and_counts_from_zero(tmp_path: Path):
    (tmp_path / "ledger").touch()
    assert fsck(tmp_path).clean
    with closing(Ledger(tmp_path, QUOTA_BYTES)) as ledger:
        assert ledger.generation() == 0
        with ledger.locked():
            assert ledger.new_path().name == "000000000001.seg"
            ledger.changed()
        assert ledger.generation() == 1


def test_neither_a_generation_nor_a_name_comes_again_after_damage(place: Place):
    """Else a peer would take a new segment for one it knew, or not see that all was forgotten."""
    seen: set[int] = set()
    with closing(Ledger(place.path, QUOTA_BYTES)) as ledger:
        for _ in range(20):
            seen.add(ledger.generation())
            with ledger.locked():
                ledger.changed()
            seen.add(ledger.generation())
            flip(place.path / "ledger", 0)
    assert len(seen) == 40


def test_a_peer_sees_what_was_forgotten_while_the_ledger_was_damaged(place: Place):
    with (
        closing(place.open(quota_bytes=QUOTA_BYTES)) as one,
        closing(place.open(quota_bytes=QUOTA_BYTES)) as two,
    ):
        assert fetch(one, KEYS) == fetch(two, KEYS) == [HIT] * len(KEYS)
        flip(place.path / "ledger", 3)
        one.remove(Everything.EVERYTHING)
        flip(place.path / "ledger", 9)
        assert fetch(two, KEYS) == [MISS] * len(KEYS)


def test_a_ledger_that_cannot_be_mended_is_read_past(place: Place, monkeypatch: pytest.MonkeyPatch):
    def full(_fd: int, _data: bytes, _at: int) -> int:
        raise OSError(28, "No space left on device")

    flip(place.path / "ledger", 0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        serves(place)
        with pytest.raises(StorageError, match="No space left"):
            fsck(place.path, repair=True)
    assert fsck(place.path).bad_ledger == 1


def test_a_half_written_ledger_is_no_damage_while_its_writer_has_the_lock(
    place: Place, caplog: pytest.LogCaptureFixture
):
    """A reader waits for the lock, and then sees what was written."""
    answers: list[int] = []
    with (
        closing(Ledger(place.path, QUOTA_BYTES)) as writer,
        closing(Ledger(place.path, QUOTA_BYTES)) as reader,
    ):
        with writer.locked():
            flip(place.path / "ledger", 8)
            thread = threading.Thread(target=lambda: answers.append(reader.generation()))
            thread.start()
            thread.join(0.2)
            assert not answers
            flip(place.path / "ledger", 8)
            expected = writer.generation()
        thread.join(PATIENCE_S)
    assert answers == [expected]
    assert not caplog.records


def test_who_mends_the_ledger_inside_the_lock_keeps_the_lock(place: Place):
    flip(place.path / "ledger", 0)
    with closing(Ledger(place.path, QUOTA_BYTES)) as ledger, ledger.locked():
        assert ledger.generation() > 0
        with (place.path / "ledger").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_who_has_let_go_of_the_lock_takes_it_again_to_mend(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    with closing(Ledger(place.path, QUOTA_BYTES)) as ledger:
        with ledger.locked():
            ledger.changed()
        flip(place.path / "ledger", 8)
        asked: list[int] = []
        monkeypatch.setattr(fcntl, "flock", lambda _, how: asked.append(how))
        ledger.generation()
        assert asked == [fcntl.LOCK_EX, fcntl.LOCK_UN]
        ledger.generation()
        assert len(asked) == 2, "a sound ledger is read without it"


COUNT = """
import sys
from pathlib import Path
from stratakv.storage.file.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), 0)
last = -1
for _ in range(int(sys.argv[2])):
    with ledger.locked():
        ledger.changed()
        number = ledger.generation()
    assert number > last
    last = number
    ledger.generation()
"""


def test_two_processes_count_every_change_and_see_no_damage(place: Place):
    with closing(Ledger(place.path, QUOTA_BYTES)) as ledger:
        first, turns = ledger.generation(), 2000
        command = [sys.executable, "-c", COUNT, str(place.path), str(turns)]
        counting = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
        seen = [first]
        while any(process.poll() is None for process in counting):
            seen.append(ledger.generation())
        errors = [process.communicate()[1] for process in counting]
        assert errors == [b"", b""]
        assert seen == sorted(seen)
        assert ledger.generation() == first + 2 * turns


def test_a_process_that_is_killed_while_it_counts_leaves_a_sound_ledger(place: Place):
    for turn in range(5):
        command = [sys.executable, "-c", COUNT, str(place.path), "1000000"]
        process = subprocess.Popen(command)
        with closing(Ledger(place.path, QUOTA_BYTES)) as ledger:
            before = ledger.generation()
            while ledger.generation() < before + 50 + 17 * turn:
                assert process.poll() is None
        process.kill()
        process.wait()
        assert fsck(place.path).clean
    serves_and_keeps_its_quota(place)

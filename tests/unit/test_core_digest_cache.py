"""Digests kept for the next start: found whole, for the very same file, or not at all."""

import os
import time
from dataclasses import replace

import pytest

from stratakv.core.clock import ManualClock
from stratakv.core.identity.digest_cache import OLD_S, YOUNG_S, DigestCache, cache_directory
from stratakv.core.identity.file_stat import FileStat

NOW_S = 1_000_000.0
STAT = FileStat(
    device=1,
    inode=2,
    size=3,
    mtime_ns=4,
    ctime_ns=int((NOW_S - YOUNG_S) * 1e9),
    link=(1, 2, 4),
    trusted=True,
)
HEADER = bytes(range(32))
DIGESTS = [bytes([at]) * 16 for at in range(5)]


def cache(directory, boot="boot", now_s=None):
    return DigestCache(directory, boot, ManualClock(time.time() if now_s is None else now_s))


@pytest.fixture
def kept(tmp_path):
    """A directory with one entry."""
    directory = tmp_path / "cache" / "weights"
    cache(directory).keep(STAT, HEADER, DIGESTS)
    (entry,) = directory.iterdir()
    return directory, entry


def lookup(directory, file=STAT, header=HEADER, count=5, boot="boot"):
    return cache(directory, boot).lookup(file, header, count)


def test_what_was_kept_is_found(kept):
    directory, entry = kept
    assert lookup(directory) == DIGESTS
    assert entry.stat().st_mode & 0o077 == 0
    assert directory.stat().st_mode & 0o077 == 0


def test_a_file_without_tensors_is_found_too(tmp_path):
    cache(tmp_path).keep(STAT, HEADER, [])
    assert lookup(tmp_path, count=0) == []


@pytest.mark.parametrize("field", ["device", "inode", "size", "mtime_ns", "ctime_ns"])
def test_any_other_number_of_the_file_is_another_file(kept, field):
    assert lookup(kept[0], replace(STAT, **{field: STAT.ctime_ns + 1})) is None


def test_another_boot_header_or_count_finds_nothing(kept):
    directory, _ = kept
    assert lookup(directory, boot="another") is None
    assert lookup(directory, header=bytes(32)) is None
    assert lookup(directory, count=4) is None
    assert lookup(directory, count=6) is None
    assert lookup(directory, replace(STAT, trusted=False)) is None


def test_another_name_of_the_same_inode_finds_it(kept):
    assert lookup(kept[0], replace(STAT, link=(7, 8, 9))) == DIGESTS


def test_a_young_or_untrusted_file_is_not_kept(tmp_path):
    within = cache(tmp_path, now_s=NOW_S)
    assert within.may_keep(STAT)
    assert not within.may_keep(replace(STAT, ctime_ns=STAT.ctime_ns + 1_000_000))
    assert not within.may_keep(replace(STAT, trusted=False))
    assert not cache(tmp_path, now_s=0.0).may_keep(STAT)  # of a clock that was set back


def test_an_entry_with_any_wrong_bit_is_none(kept):
    directory, entry = kept
    data = entry.read_bytes()
    for at in range(len(data)):
        entry.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert lookup(directory) is None, at
    entry.write_bytes(data)
    assert lookup(directory) == DIGESTS


def test_an_entry_of_any_other_length_is_none(kept):
    directory, entry = kept
    data = entry.read_bytes()
    for other in (b"", *(data[:at] for at in range(len(data))), data + b"\0", data * 2):
        entry.write_bytes(other)
        assert lookup(directory) is None, len(other)


def test_an_entry_of_another_file_is_none_under_this_ones_name(kept):
    directory, entry = kept
    other = replace(STAT, inode=9)
    cache(directory).keep(other, HEADER, [bytes(16)] * 5)
    (stranger,) = set(directory.iterdir()) - {entry}
    stranger.replace(entry)
    assert lookup(directory) is None


def test_what_others_may_write_is_not_trusted(kept, monkeypatch):
    directory, entry = kept
    for mode in (0o620, 0o602):
        entry.chmod(mode)
        assert lookup(directory) is None
    entry.chmod(0o600)
    assert lookup(directory) == DIGESTS
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert lookup(directory) is None


def test_a_link_a_pipe_or_a_directory_is_no_entry(kept, tmp_path):
    directory, entry = kept
    moved = entry.replace(tmp_path / "moved")
    entry.symlink_to(moved)
    assert lookup(directory) is None
    entry.unlink()
    os.mkfifo(entry)
    assert lookup(directory) is None
    entry.unlink()
    entry.mkdir()
    assert lookup(directory) is None
    cache(directory).keep(STAT, HEADER, DIGESTS)  # cannot, and says nothing


@pytest.mark.parametrize("where", ["a file", "below a file", "nowhere"])
def test_a_directory_that_takes_nothing_costs_the_entry_alone(tmp_path, where):
    (tmp_path / "file").write_bytes(b"")
    directory = {
        "a file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "nowhere": None,
    }[where]  # fmt: skip
    cache(directory).keep(STAT, HEADER, DIGESTS)
    assert lookup(directory) is None


def test_an_entry_that_cannot_be_written_whole_leaves_nothing(kept, monkeypatch):
    directory, entry = kept

    def fails(*_):
        raise OSError("full")

    with monkeypatch.context() as patches:
        patches.setattr(os, "fdopen", fails)
        cache(directory).keep(replace(STAT, inode=5), HEADER, DIGESTS)
    assert list(directory.iterdir()) == [entry]


def test_old_entries_go(kept):
    directory, entry = kept
    past_s = time.time() - OLD_S - 60
    os.utime(entry, (past_s, past_s))
    cache(directory).keep(replace(STAT, inode=5), HEADER, DIGESTS)
    assert lookup(directory) is None
    assert lookup(directory, replace(STAT, inode=5)) == DIGESTS


def test_where_entries_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "stratakv" / "weights"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for none in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert cache_directory() == tmp_path / "home" / ".cache" / "stratakv" / "weights"

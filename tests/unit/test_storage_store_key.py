"""Which files are keys, and what a seal covers."""

import os
from pathlib import Path

import pytest

from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import ObjectKey
from stratakv.storage.store_key import StoreKey, read_key

SECRET = bytes(range(32, 96))
SPEC = bytes(16)
KEY = ObjectKey(PageKey(bytes(range(32))), GroupId(1), 3)
PAGE = memoryview(b"page" * 1000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "key"
    found.write_bytes(SECRET)
    found.chmod(0o600)
    return found


def test_a_key_is_what_the_file_holds_but_for_line_breaks_at_its_end(path: Path):
    wanted = StoreKey(SECRET).id
    for end in (b"", b"\n", b"\r\n"):
        path.write_bytes(SECRET + end)
        assert read_key(str(path)).id == wanted
    path.write_bytes(SECRET[:-1])
    assert read_key(str(path)).id != wanted


@pytest.mark.parametrize("size", [32, 4096])
def test_a_key_may_be_short_or_long(path: Path, size: int):
    path.write_bytes(b"k" * size)
    assert read_key(str(path)).id == StoreKey(b"k" * size).id


@pytest.mark.parametrize("size", [0, 1, 31, 4097, 1 << 20])
def test_a_key_of_another_length_is_refused(path: Path, size: int):
    path.write_bytes(b"k" * size + b"\n")
    shown = "more than 4096" if size > 4096 else str(size)
    with pytest.raises(ConfigError, match=rf"^--storage-key-file {path}: it holds {shown} bytes"):
        read_key(str(path))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_key_that_its_owner_and_group_may_read_is_taken(path: Path, mode: int):
    path.chmod(mode)
    assert read_key(str(path)).id == StoreKey(SECRET).id


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o660, 0o666, 0o601])
def test_a_key_that_others_may_read_or_change_is_refused(path: Path, mode: int):
    path.chmod(mode)
    with pytest.raises(ConfigError) as error:
        read_key(str(path))
    assert f"--storage-key-file {path}: others may have it, mode {mode:04o}" in str(error.value)
    assert "chmod 600" in str(error.value)


def test_a_key_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch):
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="others may have it"):
        read_key(str(path))


def test_what_is_no_file_is_no_key_and_keeps_nobody_waiting(path: Path, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in (
        ("", "no regular"), ("pipe", "no regular"), ("missing", "No such"), ("a\0b", "no path"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            read_key(f"{tmp_path}/{name}")
    (tmp_path / "link").symlink_to(path)
    assert read_key(str(tmp_path / "link")).id == StoreKey(SECRET).id


def test_a_key_never_shows(path: Path):
    key = read_key(str(path))
    for shown in (repr(key), str(key), repr(vars(key))):
        assert SECRET.decode() not in shown
        assert SECRET.hex() not in shown
    assert key.id not in SECRET
    path.write_bytes(SECRET[:31])
    with pytest.raises(ConfigError) as error:
        read_key(str(path))
    assert SECRET[:31].decode() not in str(error.value)


def test_a_seal_covers_the_key_the_format_the_identity_and_every_byte():
    seal = StoreKey(SECRET).seal(SPEC, KEY, PAGE)
    assert len(seal) == 32
    assert seal == StoreKey(SECRET).seal(SPEC, KEY, PAGE)
    changed = bytearray(PAGE)
    changed[-1] ^= 1
    others = [
        StoreKey(SECRET[:-1]).seal(SPEC, KEY, PAGE),
        StoreKey(SECRET).seal(b"x" * 16, KEY, PAGE),
        StoreKey(SECRET).seal(SPEC, KEY._replace(page=PageKey(bytes(32))), PAGE),
        StoreKey(SECRET).seal(SPEC, KEY._replace(group=GroupId(0)), PAGE),
        StoreKey(SECRET).seal(SPEC, KEY._replace(shard=4), PAGE),
        StoreKey(SECRET).seal(SPEC, KEY, PAGE[:-1]),
        StoreKey(SECRET).seal(SPEC, KEY, memoryview(changed)),
    ]
    assert seal not in others
    assert len(set(others)) == len(others)
    assert len({StoreKey(SECRET).form_of(SPEC), StoreKey(SECRET[:-1]).form_of(SPEC), SPEC}) == 3

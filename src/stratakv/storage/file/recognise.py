"""Which files of a directory are ours: recognised by what they hold, never by their names alone.

Owns the looks that come before a file is written to or deleted, and whether a directory may become
a store. Must not write.
"""

import os
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from stratakv.core.errors import StorageError
from stratakv.storage.file.disk import has_no_data, open_regular, open_writable
from stratakv.storage.file.segment import BLOCK_BYTES, MAGIC, MAKING
from stratakv.storage.header import HEADER, is_sound

LEDGER: Final = "ledger"
LEDGER_MAGIC: Final = b"SKVLEDGR"
LEDGER_MAGIC_AT: Final = 40
_LEDGER_BYTES: Final = LEDGER_MAGIC_AT + len(LEDGER_MAGIC)
_LEAST_TEXT: Final = 0x09
"""No file of text has a byte below, and every number of a ledger has some."""
_VOUCHED: Final = struct.Struct("<QQ")
_NAME: Final = re.compile(r"[0-9a-f]{12,16}\.seg")
_HEADERS: Final = 512
"""How many headers of a segment that has lost its first bytes are looked at."""
_NOT_A_FILE_OF_OURS: Final = frozenset({"lost+found"})
"""In the root of a file system that was just made."""
ALLOWED: Final = (
    "allowed is a directory that does not exist yet, an empty one, or a store of StrataKV"
)


class NotOursError(StorageError):
    """A directory, or a file under a name that a store would use, that somebody else has made."""


def is_segment_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def is_segment(path: Path) -> bool:
    """Whether a file is a segment of ours: whole, damaged, or never finished."""
    return _is(path, _is_segment)


def is_unmade(path: Path) -> bool:
    """Whether the making of a segment was cut short, or is under way."""
    return _is(path, _is_unmade)


def _is(path: Path, what: Callable[[int], bool]) -> bool:
    """False too where a file cannot be read."""
    try:
        fd = open_regular(path)
    except OSError:
        return False
    if fd is None:
        return False
    try:
        return what(fd)
    finally:
        os.close(fd)


def open_segment(path: Path) -> int | None:
    """A segment of ours, for writing; None for anything else, and where the system does not let us
    write. OSError as it comes from the system."""
    fd = open_regular(path)
    if fd is None:
        return None
    try:
        return open_writable(path, fd) if _is_segment(fd) else None
    finally:
        os.close(fd)


def open_ledger(directory: Path) -> int:
    """The ledger of a store, for writing; made where the directory is new. NotOursError, and
    nothing was written, where the directory or its ledger is somebody else's."""
    path = directory / LEDGER
    while True:
        if reason := _refusal(directory):
            raise NotOursError(f"{directory}: {reason}")
        try:
            seen = open_regular(path)
        except FileNotFoundError:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                return os.open(path, flags, 0o644)
            except FileExistsError:  # another was first
                continue
        if seen is None:  # something else since
            continue
        try:
            fd = open_writable(path, seen)
        except FileNotFoundError:  # as above
            continue
        finally:
            os.close(seen)
        if fd is None:
            raise StorageError(f"{path}: no right to write")
        return fd


def _refusal(directory: Path) -> str:
    """Why a directory can be no store; empty where it can."""
    names = _names(directory)
    others = [name for name in names if name != LEDGER and name not in _NOT_A_FILE_OF_OURS]
    ours = _has_segment(directory, others)
    if LEDGER in names:
        what = _ledger_at(directory / LEDGER)
        if what is None:
            return f"{LEDGER!r} in it is no regular file; {ALLOWED}"
        if not _is_ledger(what, beside_ours=ours) and (what or (others and not ours)):
            if not ours:
                return f"it holds no store, and {LEDGER!r} in it is not ours; {ALLOWED}"
            return (
                f"{LEDGER!r} in it is not ours and is left as it is; the store opens, and writes "
                "one anew, once it is moved away"
            )
    elif others and not ours:
        return f"it is not empty and holds no store; {ALLOWED}"
    return ""


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise NotOursError(f"{directory} is no directory; {ALLOWED}") from None


def _has_segment(directory: Path, names: Sequence[str]) -> bool:
    return any(is_segment_name(name) and is_segment(directory / name) for name in names)


def _ledger_at(path: Path) -> bytes | None:
    """How a ledger begins, or what has its name; None for what is no regular file."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return b""
    if fd is None:
        return None
    try:
        return os.pread(fd, BLOCK_BYTES, 0)
    finally:
        os.close(fd)


def _is_ledger(data: bytes, *, beside_ours: bool) -> bool:
    """By its magic; by its checksum, as all had it before the magic; or, beside segments of ours,
    as what is left of one: no longer than a ledger, and no text."""
    if data[LEDGER_MAGIC_AT:_LEDGER_BYTES] == LEDGER_MAGIC:
        return True
    if len(data) >= _VOUCHED.size:
        _, checksum = _VOUCHED.unpack_from(data)
        if checksum == xxh3_64_intdigest(data[: _VOUCHED.size // 2]):
            return True
    return beside_ours and len(data) <= _LEDGER_BYTES and min(data, default=0) < _LEAST_TEXT


def _is_segment(fd: int) -> bool:
    data = os.pread(fd, BLOCK_BYTES + _HEADERS * HEADER.itemsize, 0)
    if data.startswith((MAGIC, MAKING)):
        return True
    table = data[BLOCK_BYTES:]
    table = table[: len(table) // HEADER.itemsize * HEADER.itemsize]
    return bool(is_sound(np.frombuffer(table, HEADER)).any()) or _is_unmade(fd)


def _is_unmade(fd: int) -> bool:
    """Before there was a mark for it, such a file had blocks and nothing in them."""
    return os.pread(fd, len(MAKING), 0) == MAKING or has_no_data(fd)

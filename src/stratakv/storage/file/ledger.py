"""The quota of a directory, in physical bytes, and which segments there are.

Owns the directory: its one lock, its generation, names, creation and deletion of segment files.
Every process that shares the directory counts the same files, so there is no sum to get wrong.

    ledger    u64 generation, counts up with every segment made or deleted | u64 xxh3-64 of it |
              u64 who wants room | u64 bytes of segments it has | u64 since when, ns | magic
    *.seg     segments (``segment``)

A ledger whose checksum is wrong, or that is cut short, says nothing: whoever sees it rebuilds it
from the names of the segments. No file is written to or deleted that ``recognise`` does not know
for ours.
"""

import fcntl
import logging
import os
import struct
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_intdigest

from stratakv.storage.file.disk import give_back
from stratakv.storage.file.recognise import (
    LEDGER_MAGIC,
    LEDGER_MAGIC_AT,
    is_segment_name,
    open_ledger,
    open_segment,
)

_logger = logging.getLogger(__name__)

SUFFIX: Final = ".seg"
_GENERATION: Final = struct.Struct("<QQ")
_COUNT: Final = struct.Struct("<Q")
_COUNT_LIMIT: Final = 1 << 63
"""Of a generation. Nobody counts that far: a number above is damage, and never overflows a u64."""
_NAME_LIMIT: Final = 1 << 60
"""From here on a name is a stranger's: counting goes on below it, and so never reaches the limit of
a generation."""
_WANT: Final = struct.Struct("<QQQ")
_BLOCK: Final = 512


@dataclass(frozen=True, slots=True)
class Want:
    """A writer that has ``held_bytes`` of segments and got no more, because others hold them."""

    writer: int
    held_bytes: int
    since_ns: int


class Ledger:
    """``writer``: of this process's store, never 0, unlike any other's. NotOursError, and nothing
    was written, for a directory that is no store and not empty."""

    def __init__(self, directory: Path, quota_bytes: int) -> None:
        self.directory = directory
        self.quota_bytes = quota_bytes
        self.writer = int.from_bytes(os.urandom(7), "little") + 1
        self._fd = open_ledger(directory)
        self._holds = False

    def is_there(self) -> bool:
        """False once somebody deleted the ledger, or the directory with it: the lock is then not
        the one that others take."""
        return os.fstat(self._fd).st_nlink > 0

    def generation(self) -> int:
        """Changes whenever a segment was made or deleted. A damaged ledger is rebuilt first."""
        found = self._count()
        if found is not None:
            return found
        if self._holds:
            return self._rebuilt()
        with self.locked():  # it may have been read while it was written
            found = self._count()
            return self._rebuilt() if found is None else found

    def is_damaged(self) -> bool:
        """With the lock held. An empty ledger of a directory without segments is only new."""
        return self._count() is None and not self._is_new()

    def rebuild(self) -> int:
        """Write a generation above every segment's number, and nobody's want; with the lock held.
        Returns the new generation."""
        count = max(self._numbers(), default=0)
        damaged = not self._is_new()
        if damaged:
            # Others may know segments that are deleted since: neither a name nor a generation that
            # they saw comes again.
            count += 1 + int.from_bytes(os.urandom(4), "little")
        os.pwrite(self._fd, _pack(count) + bytes(_WANT.size) + LEDGER_MAGIC, 0)
        if damaged:
            _logger.warning("%s: the ledger was damaged and is rebuilt", self.directory)
        return count

    def _rebuilt(self) -> int:
        """A disk that takes nothing is read all the same."""
        try:
            return self.rebuild()
        except OSError:
            return max(self._numbers(), default=0)

    @contextmanager
    def locked(self) -> Generator[None, None, None]:
        """Hold the lock of the directory; nobody else makes, deletes or counts segments."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def names(self) -> list[str]:
        """Of every file that may be a segment, oldest first."""
        with os.scandir(self.directory) as entries:
            return sorted(
                entry.name
                for entry in entries
                if is_segment_name(entry.name) and entry.is_file(follow_symlinks=False)
            )

    def physical_bytes(self) -> int:
        """What all segments take on the disk, of any format and writer."""
        total = 0
        for name in self.names():
            with suppress(FileNotFoundError):
                total += (self.directory / name).stat().st_blocks * _BLOCK
        return total

    def fits(self, size_bytes: int) -> bool:
        """Whether the quota has room; ask with the lock held."""
        return self.physical_bytes() + size_bytes <= self.quota_bytes

    def new_path(self) -> Path:
        """Of a segment whose name was never used here, even if the ledger was lost; with the lock
        held."""
        return self.directory / f"{self._next_number():012x}{SUFFIX}"

    def changed(self) -> None:
        """A segment was made or deleted; with the lock held, after the fact."""
        os.pwrite(self._fd, _pack(self._next_number()), 0)
        if os.pread(self._fd, len(LEDGER_MAGIC), LEDGER_MAGIC_AT) != LEDGER_MAGIC:
            os.pwrite(self._fd, LEDGER_MAGIC, LEDGER_MAGIC_AT)  # of before there was one

    def oldest_first(self, names: set[str]) -> list[str]:
        """By when they were last written; uses are written too, so this is about the last use."""
        written: dict[str, int] = {}
        for name in names:
            with suppress(FileNotFoundError):
                written[name] = (self.directory / name).stat().st_mtime_ns
        return sorted(written, key=written.__getitem__)

    def delete(self, name: str) -> None:
        """With the lock held. Its blocks are free at once: who has it open reads zeros, which are
        misses, until it sees the new generation."""
        path = self.directory / name
        with suppress(FileNotFoundError):
            fd = open_segment(path)
            if fd is None:
                _logger.warning("%s is no segment of ours any more, and is left as it is", path)
            else:
                try:
                    _unlink(path, fd)
                finally:
                    os.close(fd)
        self.changed()

    def delete_idle(self, name: str) -> bool:
        """With the lock held: delete a segment unless some process writes it, it is another user's
        or not ours at all."""
        path = self.directory / name
        try:
            fd = open_segment(path)
        except FileNotFoundError:
            return True
        except PermissionError:
            return False
        if fd is None:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _unlink(path, fd)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        self.changed()
        return True

    def _next_number(self) -> int:
        names = set(os.listdir(self.directory))  # also of what is no file
        number = max(self.generation(), *self._numbers(), 0) + 1
        while f"{number:012x}{SUFFIX}" in names:
            number += 1
        return number

    def _numbers(self) -> list[int]:
        numbers = [int(name.removesuffix(SUFFIX), 16) for name in self.names()]
        return [number for number in numbers if number < _NAME_LIMIT]

    def _count(self) -> int | None:
        """The generation; None where the ledger does not vouch for it."""
        data = os.pread(self._fd, _GENERATION.size, 0)
        if len(data) < _GENERATION.size:
            return None
        count, checksum = _GENERATION.unpack(data)
        sound = checksum == xxh3_64_intdigest(data[: _COUNT.size]) and count < _COUNT_LIMIT
        return count if sound else None

    def _is_new(self) -> bool:
        return os.fstat(self._fd).st_size == 0 and not self.names()

    def want(self) -> Want | None:
        data = os.pread(self._fd, _WANT.size, _GENERATION.size)
        found = Want(*_WANT.unpack(data)) if len(data) == _WANT.size else None
        return found if found is not None and found.writer else None

    def set_want(self, want: Want | None) -> None:
        fields = (want.writer, want.held_bytes, want.since_ns) if want is not None else (0, 0, 0)
        os.pwrite(self._fd, _WANT.pack(*fields), _GENERATION.size)

    def sync(self) -> None:
        """Make names durable against a power loss."""
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        os.close(self._fd)


def _pack(generation: int) -> bytes:
    """One write of 16 bytes: no kill leaves half of it."""
    count = _COUNT.pack(generation)
    return count + _COUNT.pack(xxh3_64_intdigest(count))


def _unlink(path: Path, fd: int) -> None:
    """Delete a file that is open, and give its blocks back."""
    path.unlink()
    if not os.fstat(fd).st_nlink:  # else an operator has a second name for it
        with suppress(OSError):  # the blocks are then free once all have closed it
            give_back(fd)

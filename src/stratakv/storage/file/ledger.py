"""The quota of a directory, in physical bytes, and which segments there are.

Owns the directory: its one lock, its generation, names, creation and deletion of segment files.
Every process that shares the directory counts the same files, so there is no sum to get wrong.

    ledger    u64 generation, counts up with every segment made or deleted |
              u64 who wants room | u64 bytes of segments it has | u64 since when, ns
    *.seg     segments (``segment``)
"""

import fcntl
import os
import re
import struct
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SUFFIX: Final = ".seg"
_NAME: Final = re.compile(r"[0-9a-f]{12}\.seg")
_LEDGER: Final = "ledger"
_GENERATION: Final = struct.Struct("<Q")
_WANT: Final = struct.Struct("<QQQ")
_BLOCK: Final = 512


@dataclass(frozen=True, slots=True)
class Want:
    """A writer that has ``held_bytes`` of segments and got no more, because others hold them."""

    writer: int
    held_bytes: int
    since_ns: int


class Ledger:
    """``writer``: of this process's store, never 0, unlike any other's."""

    def __init__(self, directory: Path, quota_bytes: int) -> None:
        self.directory = directory
        self.quota_bytes = quota_bytes
        self.writer = int.from_bytes(os.urandom(7), "little") + 1
        self._fd = os.open(directory / _LEDGER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def is_there(self) -> bool:
        """False once somebody deleted the ledger, or the directory with it: the lock is then not
        the one that others take."""
        return os.fstat(self._fd).st_nlink > 0

    def generation(self) -> int:
        """Changes whenever a segment was made or deleted."""
        data = os.pread(self._fd, _GENERATION.size, 0)
        return _GENERATION.unpack(data)[0] if len(data) == _GENERATION.size else 0

    @contextmanager
    def locked(self) -> Generator[None, None, None]:
        """Hold the lock of the directory; nobody else makes, deletes or counts segments."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def names(self) -> list[str]:
        """Of every segment file, oldest first."""
        return sorted(filter(_is_segment, os.listdir(self.directory)))

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
        os.pwrite(self._fd, _GENERATION.pack(self._next_number()), 0)

    def oldest_first(self, names: set[str]) -> list[str]:
        """By when they were last written; uses are written too, so this is about the last use."""
        written: dict[str, int] = {}
        for name in names:
            with suppress(FileNotFoundError):
                written[name] = (self.directory / name).stat().st_mtime_ns
        return sorted(written, key=written.__getitem__)

    def delete(self, name: str) -> None:
        """With the lock held. Openers still read it until they see the new generation."""
        with suppress(FileNotFoundError):
            (self.directory / name).unlink()
        self.changed()

    def delete_idle(self, name: str) -> bool:
        """With the lock held: delete a segment unless some process writes it."""
        with suppress(FileNotFoundError):
            fd = os.open(self.directory / name, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.delete(name)
            except BlockingIOError:
                return False
            finally:
                os.close(fd)
        return True

    def _next_number(self) -> int:
        used = [int(name.removesuffix(SUFFIX), 16) for name in self.names()]
        return max([self.generation(), *used]) + 1

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


def _is_segment(name: str) -> bool:
    return _NAME.fullmatch(name) is not None

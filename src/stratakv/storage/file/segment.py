"""One segment file: slots of one size, preallocated, with one writer.

Owns the bytes of a segment and where they lie. Must not know keys' places (``index``), quotas
(``ledger``) or what to evict (``space``).

    block 0      what the segment is, sealed | u64 changes, counts up after each batch of headers |
                 what any process may write (``notes``)
    headers      ``HEADER`` per slot: zeros while the slot is free
    uses         u64 ns per slot: when the object was last used; any process may write there
    payloads     ``stride_bytes`` per slot, a multiple of a block

Headers lie together, so opening reads 136 bytes per page in one piece for each segment: the table
of headers is the compact index on disk, and no second copy can disagree with it. A header is
written after its payload, and zeroed before its slot is used again.
"""

import fcntl
import logging
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from stratakv.core.errors import StorageError
from stratakv.storage.file.disk import open_regular, open_writable
from stratakv.storage.file.page_io import PageIo, PayloadPlaces, PythonPageIo, write_all
from stratakv.storage.file.segment_notes import BLOCK_BYTES, NOTES_AT, SegmentNotes
from stratakv.storage.header import HEADER, HEADER_BYTES, Headers

_page_io: PageIo = PythonPageIo()
try:
    from stratakv.storage.file.compiled_page_io import CompiledPageIo

    _page_io = CompiledPageIo()
except ImportError as error:
    logging.getLogger(__name__).warning(
        "%s: stored pages are read and written in Python, more slowly beside busy threads", error
    )
PAGE_IO: Final[PageIo] = _page_io

FOLIO_BYTES: Final = 2 << 20
MAGIC: Final = b"SKVSEG\0"
"""At the front of every segment, of any version."""
MAKING: Final = b"SKVNEW\0\0"
"""In its place until all of a file is there; before, it has blocks and nothing in them."""
_MAGIC: Final = MAGIC + b"\1"
_FIELDS: Final = struct.Struct("<8sII16sQ")
_CHECKSUM: Final = struct.Struct("<Q")
_CHANGES_AT: Final = NOTES_AT - 8
_USE_BYTES: Final = 8

Uses: TypeAlias = npt.NDArray[np.uint64]
"""Wall-clock ns of the last use, by slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What a segment holds. ``slots`` pages of ``page_bytes`` of one group of one spec."""

    spec_digest: bytes
    group: int
    slots: int
    page_bytes: int

    @property
    def stride_bytes(self) -> int:
        return _blocks(self.page_bytes)

    @property
    def uses_at(self) -> int:
        return BLOCK_BYTES + _blocks(self.slots * HEADER_BYTES)

    @property
    def tables_bytes(self) -> int:
        return self.uses_at + _blocks(self.slots * _USE_BYTES)

    @property
    def data_at(self) -> int:
        """The kernel keeps a file in large folios only where writes are aligned; worth a tenth."""
        return -(-self.tables_bytes // FOLIO_BYTES) * FOLIO_BYTES

    @property
    def data_bytes(self) -> int:
        return self.slots * self.stride_bytes

    @property
    def physical_bytes(self) -> int:
        """What the file takes on the disk: between the tables and the payloads is a hole."""
        return self.tables_bytes + self.data_bytes

    @staticmethod
    def slots_in(size_bytes: int, page_bytes: int) -> int:
        """How many slots a segment of about ``size_bytes`` has; at least one."""
        return max(1, size_bytes // (_blocks(page_bytes) + HEADER_BYTES + _USE_BYTES))

    def pack(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, self.group, self.slots, self.spec_digest, self.page_bytes)
        return fields + _CHECKSUM.pack(xxh3_64_intdigest(fields))

    @classmethod
    def unpack(cls, block: bytes) -> "Geometry | None":
        """None for what is not a sealed segment of this version."""
        fields = block[: _FIELDS.size]
        sealed = block[_FIELDS.size : _FIELDS.size + _CHECKSUM.size]
        if len(sealed) < _CHECKSUM.size or _CHECKSUM.unpack(sealed)[0] != xxh3_64_intdigest(fields):
            return None
        magic, group, slots, digest, page_bytes = _FIELDS.unpack(fields)
        if magic != _MAGIC:
            return None
        return cls(spec_digest=digest, group=group, slots=slots, page_bytes=page_bytes)


class Segment:
    """An open segment file. Only who ``own``s it writes headers and payloads; it is not
    ``writable`` where another user made it, and the system lets this one only read. ``notes``: what
    others may write. OSError as it comes from the system."""

    def __init__(
        self, path: Path, fd: int, geometry: Geometry, *, owned: bool, writable: bool = True
    ) -> None:
        self.name = path.name
        self.geometry = geometry
        self.owned = owned
        self.writable = writable
        self.notes = SegmentNotes(fd, geometry.slots, writable=writable)
        self._fd = fd
        self._data_at = geometry.data_at
        self._stride = geometry.stride_bytes
        self._io = PAGE_IO
        # Twice the read-ahead: the disk works on while a page is hashed.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    @classmethod
    def create(cls, path: Path, geometry: Geometry) -> "Segment":
        """A new one, all its bytes taken from the disk, owned. OSError leaves no file behind."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, geometry.tables_bytes)
            os.pwrite(fd, MAKING, 0)
            os.posix_fallocate(fd, geometry.data_at, geometry.data_bytes)
            # What it is comes last: who dies before leaves a file that means nothing, but is ours.
            os.pwrite(fd, geometry.pack(), 0)
        except OSError:
            path.unlink()
            os.close(fd)
            raise
        return cls(path, fd, geometry, owned=True)

    @classmethod
    def open(cls, path: Path) -> "Segment | None":
        """For reading; None where the name is not a regular file's, block 0 does not say what the
        file is, or the file is short. Nothing is open for writing that was not read before."""
        seen = open_regular(path)
        if seen is None:
            return None
        try:
            geometry = Geometry.unpack(os.pread(seen, BLOCK_BYTES, 0))
            if geometry is None or os.fstat(seen).st_size < geometry.data_at:
                return None
            fd = open_writable(path, seen)
            writable = fd is not None
            fd = os.dup(seen) if fd is None else fd
        finally:
            os.close(seen)
        try:
            return cls(path, fd, geometry, owned=False, writable=writable)
        except OSError:
            os.close(fd)
            raise

    def own(self) -> bool:
        """Become the one writer, unless somebody is, or deleted it since it was opened."""
        if not self.owned and self.writable:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self.owned = True
            if not os.fstat(self._fd).st_nlink:
                self.disown()
        return self.owned

    def disown(self) -> None:
        """Let another become its writer."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.owned = False

    def changes(self) -> int:
        """Counts up after each batch of headers."""
        return int.from_bytes(os.pread(self._fd, 8, _CHANGES_AT), "little")

    def count_change(self) -> int:
        changes = self.changes() + 1
        os.pwrite(self._fd, changes.to_bytes(8, "little"), _CHANGES_AT)
        return changes

    def headers(self, first: int = 0, count: int | None = None) -> Headers:
        """Headers of ``count`` slots from ``first`` on; all of them where nothing is given."""
        wanted = self.geometry.slots if count is None else count
        return np.frombuffer(self.header_bytes(first, wanted), HEADER)

    def header_bytes(self, first: int, count: int) -> bytes:
        """The same as they lie on the disk."""
        return _read_all(self._fd, count * HEADER_BYTES, BLOCK_BYTES + first * HEADER_BYTES)

    def put_headers(self, first: int, table: Headers) -> None:
        assert self.owned, f"{self.name} has another writer"
        write_all(self._fd, [memoryview(table.tobytes())], BLOCK_BYTES + first * HEADER_BYTES)

    def uses(self) -> Uses:
        size = self.geometry.slots * _USE_BYTES
        return np.frombuffer(_read_all(self._fd, size, self.geometry.uses_at), np.uint64)

    def put_uses(self, uses: Uses) -> None:
        """Another user's segment does not learn of ours."""
        if self.writable:
            write_all(self._fd, [memoryview(uses.tobytes())], self.geometry.uses_at)

    def read_page(self, slot: int, into: memoryview) -> int:
        """Fill ``into``; returns the hash of what is there now, or ``SHORT``."""
        return self.read_pages([slot], [into])[0]

    def read_pages(self, slots: Sequence[int], into: Sequence[memoryview]) -> list[int]:
        """``read_page`` of several, those that follow one another together. OSError where any of
        them cannot be read."""
        return self._io.read(self._at(slots), into)

    def write_pages(
        self, slots: Sequence[int], pages: Sequence[memoryview]
    ) -> tuple[list[int], OSError | None]:
        """Write payloads; the hash of each that is there, which are all before an error."""
        assert self.owned, f"{self.name} has another writer"
        return self._io.write(self._at(slots), pages)

    def _at(self, slots: Sequence[int]) -> PayloadPlaces:
        base, stride = self._data_at, self._stride
        return PayloadPlaces(self._fd, stride, [base + slot * stride for slot in slots])

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Gives the lock back too."""
        os.close(self._fd)


def _blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _read_all(fd: int, size: int, at: int) -> bytes:
    data = os.pread(fd, size, at)
    if len(data) != size:
        raise StorageError(f"a segment ends at {at + len(data)}, inside its tables")
    return data

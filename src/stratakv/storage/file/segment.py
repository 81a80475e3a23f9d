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
import os
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from stratakv.core.errors import StorageError
from stratakv.storage.file.disk import open_regular, open_writable
from stratakv.storage.file.segment_notes import BLOCK_BYTES, NOTES_AT, SegmentNotes
from stratakv.storage.header import HEADER, HEADER_BYTES, PIECE_BYTES, Headers

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
_ZEROS: Final = memoryview(bytes(BLOCK_BYTES))
SHORT: Final = -1
"""In place of a hash: the file ends inside the page."""

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
        self._padding = self._stride - geometry.page_bytes
        self._together = max(1, PIECE_BYTES // self._stride)
        self._sink = memoryview(bytearray(self._padding))  # for padding that is read
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
        _write_all(self._fd, [memoryview(table.tobytes())], BLOCK_BYTES + first * HEADER_BYTES)

    def uses(self) -> Uses:
        size = self.geometry.slots * _USE_BYTES
        return np.frombuffer(_read_all(self._fd, size, self.geometry.uses_at), np.uint64)

    def put_uses(self, uses: Uses) -> None:
        """Another user's segment does not learn of ours."""
        if self.writable:
            _write_all(self._fd, [memoryview(uses.tobytes())], self.geometry.uses_at)

    def read_page(self, slot: int, into: memoryview) -> int:
        """Fill ``into``; returns the hash of what is there now, or ``SHORT``."""
        fd, at, size = self._fd, self._at(slot), len(into)
        if size <= PIECE_BYTES:
            return xxh3_64_intdigest(into) if _fill(fd, into, at) else SHORT
        state = xxh3_64()
        for start in range(0, size, PIECE_BYTES):
            piece = into[start : start + PIECE_BYTES]
            if not _fill(fd, piece, at + start):
                return SHORT
            state.update(piece)
        return state.intdigest()

    def read_pages(self, first: int, into: Sequence[memoryview]) -> list[int]:
        """``read_page`` of neighbouring slots from ``first`` on, small ones together. OSError where
        any of them cannot be read."""
        if self._together == 1:
            return [self.read_page(slot, page) for slot, page in enumerate(into, first)]
        hashes: list[int] = []
        for start in range(0, len(into), self._together):
            some, slot = into[start : start + self._together], first + start
            size = len(some) * self._stride - self._padding
            if os.preadv(self._fd, self._padded(some, self._sink), self._at(slot)) == size:
                hashes += map(xxh3_64_intdigest, some)
            else:  # the file ends here, or a signal came: see which of them are whole
                hashes += [self.read_page(at, page) for at, page in enumerate(some, slot)]
        return hashes

    def write_pages(self, first: int, pages: Sequence[memoryview]) -> Generator[int, None, None]:
        """Write payloads into neighbouring slots from ``first`` on, small ones together; yields the
        hash of each once it is written. OSError: what was yielded before is there.

        Payloads are padded to whole blocks, which spares the kernel a read of the last one. The
        copy into the kernel brings a page into the cache; before it, hashing costs twice as much.
        """
        assert self.owned, f"{self.name} has another writer"
        for start in range(0, len(pages), self._together):
            some, at = pages[start : start + self._together], self._at(first + start)
            if self._stride > PIECE_BYTES:
                yield self._write_large(at, some[0])
            else:
                _write_all(self._fd, [*self._padded(some, _ZEROS), _ZEROS[: self._padding]], at)
                yield from map(xxh3_64_intdigest, some)

    def _write_large(self, at: int, page: memoryview) -> int:
        state = xxh3_64()
        for start in range(0, len(page), PIECE_BYTES):
            piece = page[start : start + PIECE_BYTES]
            ends = start + PIECE_BYTES >= len(page)
            padding = _ZEROS[: self._padding if ends else 0]
            _write_all(self._fd, [piece, padding], at + start)
            state.update(piece)
        return state.intdigest()

    def _at(self, slot: int) -> int:
        return self._data_at + slot * self._stride

    def _padded(self, pages: Sequence[memoryview], padding: memoryview) -> Sequence[memoryview]:
        """What lies on the disk from the first byte of the first page to the last of the last."""
        if not self._padding:
            return pages
        between = padding[: self._padding]
        return [part for page in pages for part in (page, between)][:-1]

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


def _fill(fd: int, into: memoryview, at: int) -> bool:
    """Read until ``into`` is full; False where the file ends before. A signal cuts reads short."""
    done = os.preadv(fd, [into], at)
    while done < len(into):
        more = os.preadv(fd, [into[done:]], at + done)
        if not more:
            return False
        done += more
    return True


def _write_all(fd: int, parts: Sequence[memoryview], at: int) -> None:
    """pwritev until everything is there; a disk that is full stops it with an OSError."""
    size = sum(map(len, parts))
    done = os.pwritev(fd, parts, at)
    while done < size:
        rest = memoryview(b"".join(parts))[done:]
        written = os.pwrite(fd, rest, at + done)
        if written == 0:
            raise OSError(5, "nothing was written")
        done += written

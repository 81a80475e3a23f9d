"""Stored tensors, read by threads beside whatever else happens: hashed, kept in memory, or both.

Owns the threads, the order of reading, and the memory. What is kept is what was hashed: the bytes
are read once. Must not know what a digest is for.
"""

import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xxhash import xxh3_128

from stratakv.core.identity.file_stat import FileStat, open_file
from stratakv.core.identity.safetensors_layout import StoredTensor
from stratakv.core.units import format_bytes

CHUNK_BYTES: Final = 2 << 20
"""What one read asks for: still in the processor's cache when it is hashed, which lets other
threads run."""
PIECE_BYTES: Final = 256 << 20
"""What one thread reads in a row: several have work within one file, and disks still see runs."""
DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tensors of the checkpoint's ``file``th file, which was as ``stat`` says when it was
    laid out."""

    file: int
    path: Path
    stat: FileStat
    tensors: Sequence[StoredTensor]

    @property
    def count_bytes(self) -> int:
        return self.tensors[-1].end - self.tensors[0].begin

    @property
    def whole(self) -> frozenset[int]:
        """Numbers of all its tensors."""
        return frozenset(range(len(self.tensors)))


def pieces(
    file: int, path: Path, stat: FileStat, tensors: Sequence[StoredTensor]
) -> Iterator[Piece]:
    """``tensors``, in the order of their bytes, in runs of about ``PIECE_BYTES``."""
    first = 0
    for at, tensor in enumerate(tensors):
        last = at == len(tensors) - 1
        if last or tensor.end - tensors[first].begin >= PIECE_BYTES:
            yield Piece(file, path, stat, tensors[first : at + 1])
            first = at + 1


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Numbers of the tensors of a piece that are wanted: their digests, and they themselves in
    memory. What is wanted for neither is not read."""

    piece: Piece
    hashed: frozenset[int]
    kept: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class ReadPiece:
    """By the tensor's number. ``digests``: xxh3-128."""

    digests: Mapping[int, bytes]
    buffers: Mapping[int, memoryview]


class TensorReader:
    """Under way from the start on."""

    def __init__(self, tasks: Sequence[ReadTask], threads: int) -> None:
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="stratakv-identity")
        self._futures: list[Future[ReadPiece]] = [
            self._pool.submit(self.read, task) for task in tasks
        ]
        self._pool.shutdown(wait=False)

    def pause(self) -> None:
        """Wait until all have been read, whatever came of it."""
        wait(self._futures)

    def wait(self) -> list[ReadPiece]:
        """By task. OSError or ValueError where a file could not be read as it was laid out,
        MemoryError where there is no memory to keep it."""
        return [future.result() for future in self._futures]

    def close(self) -> None:
        """Stop; waits for reads that have begun."""
        self._over.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def read(self, task: ReadTask) -> ReadPiece:
        """One of the tasks, on the thread that calls."""
        piece = task.piece
        scratch = memoryview(bytearray(min(CHUNK_BYTES, max(1, piece.count_bytes))))
        fd = open_file(piece.path)
        try:
            found = os.fstat(fd)
            same = (found.st_dev, found.st_ino) == (piece.stat.device, piece.stat.inode)
            if piece.stat.trusted and not same:
                raise ValueError(f"{piece.path.name} was replaced while it was read")
            begin = piece.tensors[0].begin
            os.posix_fadvise(fd, begin, piece.count_bytes, os.POSIX_FADV_SEQUENTIAL)
            digests: dict[int, bytes] = {}
            buffers: dict[int, memoryview] = {}
            for number in sorted(task.hashed | task.kept):
                tensor = piece.tensors[number]
                buffer = _memory(tensor) if number in task.kept else None
                digest = xxh3_128()
                for chunk in self._chunks(fd, piece.path, tensor, buffer or scratch):
                    if number in task.hashed:
                        digest.update(chunk)
                if number in task.hashed:
                    digests[number] = digest.digest()
                if buffer is not None:
                    buffers[number] = buffer
            return ReadPiece(digests, buffers)
        finally:
            os.close(fd)

    def _chunks(
        self, fd: int, path: Path, tensor: StoredTensor, into: memoryview
    ) -> Iterator[memoryview]:
        """Of a tensor, one after another in ``into``; all at its beginning where it is short."""
        at = tensor.begin
        while at < tensor.end:
            if self._over.is_set():
                raise ValueError("nobody waits for it any more")
            first = at - tensor.begin if len(into) >= tensor.size else 0
            chunk = into[first : first + min(CHUNK_BYTES, tensor.end - at)]
            count = os.preadv(fd, [chunk], at)
            if not count:
                raise ValueError(f"{path.name} became shorter while it was read")
            yield chunk[:count]
            at += count


def _memory(tensor: StoredTensor) -> memoryview:
    """Of our own, from the beginning of a page. MemoryError where there is none. Huge pages are not
    asked for (ADR 33): to whom the host gives memory as it is touched, they cost more."""
    size = tensor.size
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{format_bytes(size)} for {tensor.name}: {error.strerror}") from None
    return memoryview(memory)

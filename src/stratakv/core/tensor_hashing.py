"""Stored tensors, read by threads beside whatever else happens: digested, kept, or both.

Owns the threads and the order of reading. What is kept is what was digested: the bytes are read
once. Must not know what a digest is for.
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

from stratakv.core.file_looks import FileLook, open_file
from stratakv.core.tensor_files import StoredTensor

CHUNK_BYTES: Final = 2 << 20
"""What one read asks for: still in the processor's cache when it is hashed, which lets other
threads run."""
PIECE_BYTES: Final = 256 << 20
"""What one thread reads in a row: several have work within one file, and disks still see runs."""
DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tensors of one file, which was as ``look`` says when it was laid out."""

    path: Path
    look: FileLook
    tensors: Sequence[StoredTensor]

    @property
    def count_bytes(self) -> int:
        return self.tensors[-1].end - self.tensors[0].begin


def pieces(path: Path, look: FileLook, tensors: Sequence[StoredTensor]) -> list[Piece]:
    """``tensors``, in the order of their bytes, in runs of about ``PIECE_BYTES``."""
    found: list[Piece] = []
    first = 0
    for at, tensor in enumerate(tensors):
        last = at == len(tensors) - 1
        if last or tensor.end - tensors[first].begin >= PIECE_BYTES:
            found.append(Piece(path, look, tensors[first : at + 1]))
            first = at + 1
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """``rooms``: what to read tensors of the piece into, by their number in it. ``hashed``: whether
    digests are wanted; without, only tensors that have a room are read."""

    piece: Piece
    hashed: bool
    rooms: Mapping[int, memoryview]


def room_for(tensor: StoredTensor) -> memoryview:
    """Memory of our own, at the beginning of a page. Not huge pages: where memory is full of other
    files' pages, making room for them took ten times as long as reading."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, tensor.end - tensor.begin, private))


class Hashing:
    """Under way from the start on."""

    def __init__(self, work: Sequence[Task], threads: int) -> None:
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="stratakv-identity")
        self._futures: list[Future[list[bytes]]] = [
            self._pool.submit(self._digests, task) for task in work
        ]
        self._pool.shutdown(wait=False)

    def pause(self) -> None:
        """Wait until all have been read, whatever came of it."""
        wait(self._futures)

    def wait(self) -> list[list[bytes]]:
        """By task and tensor, xxh3-128; nothing of a task without. OSError or ValueError where a
        file could not be read as it was laid out."""
        return [future.result() for future in self._futures]

    def close(self) -> None:
        """Stop; waits for reads that have begun."""
        self._over.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _digests(self, task: Task) -> list[bytes]:
        piece = task.piece
        scratch = memoryview(bytearray(min(CHUNK_BYTES, max(1, piece.count_bytes))))
        fd = open_file(piece.path)
        try:
            found = os.fstat(fd)
            same = (found.st_dev, found.st_ino) == (piece.look.device, piece.look.inode)
            if piece.look.believed and not same:
                raise ValueError(f"{piece.path.name} was replaced while it was read")
            begin = piece.tensors[0].begin
            os.posix_fadvise(fd, begin, piece.count_bytes, os.POSIX_FADV_SEQUENTIAL)
            digests: list[bytes] = []
            for number, tensor in enumerate(piece.tensors):
                room = task.rooms.get(number)
                digest = xxh3_128() if task.hashed else None
                if digest is not None or room is not None:
                    for chunk in self._chunks(fd, piece.path, tensor, room, scratch):
                        if digest is not None:
                            digest.update(chunk)
                if digest is not None:
                    digests.append(digest.digest())
            return digests
        finally:
            os.close(fd)

    def _chunks(
        self,
        fd: int,
        path: Path,
        tensor: StoredTensor,
        room: memoryview | None,
        scratch: memoryview,
    ) -> Iterator[memoryview]:
        at = tensor.begin
        while at < tensor.end:
            if self._over.is_set():
                raise ValueError("nobody waits for it any more")
            most = min(CHUNK_BYTES, tensor.end - at)
            first = at - tensor.begin
            chunk = scratch[:most] if room is None else room[first : first + most]
            count = os.preadv(fd, [chunk], at)
            if not count:
                raise ValueError(f"{path.name} became shorter while it was read")
            yield chunk[:count]
            at += count

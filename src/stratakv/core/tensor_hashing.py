"""Digests of stored tensors, every byte of them, found by threads beside whatever else happens.

Owns the threads and the order of reading. Must not know what a digest is for.
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xxhash import xxh3_128

from stratakv.core.file_looks import FileLook, open_file
from stratakv.core.tensor_files import StoredTensor

CHUNK_BYTES: Final = 8 << 20
"""What one read asks for; xxhash lets other threads run while it is hashed."""
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


class Hashing:
    """Under way from the start on."""

    def __init__(self, work: Sequence[Piece], threads: int) -> None:
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="stratakv-identity")
        self._futures: list[Future[list[bytes]]] = [
            self._pool.submit(self._digests, piece) for piece in work
        ]
        self._pool.shutdown(wait=False)

    def pause(self, numbers: Sequence[int]) -> None:
        """Wait until these pieces have been read, whatever came of it."""
        wait([self._futures[number] for number in numbers])

    def wait(self) -> list[list[bytes]]:
        """By piece and tensor, xxh3-128. OSError or ValueError where a file could not be read as
        it was laid out."""
        return [future.result() for future in self._futures]

    def close(self) -> None:
        """Stop; waits for reads that have begun."""
        self._over.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _digests(self, piece: Piece) -> list[bytes]:
        room = memoryview(bytearray(min(CHUNK_BYTES, max(1, piece.count_bytes))))
        fd = open_file(piece.path)
        try:
            found = os.fstat(fd)
            same = (found.st_dev, found.st_ino) == (piece.look.device, piece.look.inode)
            if piece.look.believed and not same:
                raise ValueError(f"{piece.path.name} was replaced while it was read")
            begin = piece.tensors[0].begin
            os.posix_fadvise(fd, begin, piece.count_bytes, os.POSIX_FADV_SEQUENTIAL)
            return [self._digest(fd, piece.path, tensor, room) for tensor in piece.tensors]
        finally:
            os.close(fd)

    def _digest(self, fd: int, path: Path, tensor: StoredTensor, room: memoryview) -> bytes:
        digest = xxh3_128()
        at = tensor.begin
        while at < tensor.end:
            if self._over.is_set():
                raise ValueError("nobody waits for it any more")
            count = os.preadv(fd, [room[: tensor.end - at]], at)
            if not count:
                raise ValueError(f"{path.name} became shorter while it was read")
            digest.update(room[:count])
            at += count
        return digest.digest()

"""What the disk has, and how a file gives its blocks back while others have it open.

Owns the calls to the kernel for both. Must not know what a file holds.
"""

import ctypes
import os
from pathlib import Path
from typing import Final

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
FIRST_BYTES: Final = 2 << 20
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


def free_bytes(directory: Path) -> int:
    """Bytes that the file system of ``directory`` has left."""
    status = os.statvfs(directory)
    return status.f_bfree * status.f_frsize


def give_back(fd: int) -> None:
    """Give all blocks of a file back to the disk; its size stays, and whoever has it open reads
    zeros. From the front on, in steps that double from ``FIRST_BYTES``: what stands twice as far
    back as something else, and beyond the first step, leaves after it. OSError where neither holes
    nor truncation are possible."""
    size = os.fstat(fd).st_size
    try:
        at, step = 0, FIRST_BYTES
        while at < size:
            _punch(fd, at, step)
            at += step
            step = at
    except OSError:  # a file system without holes; for a moment the file is short
        os.ftruncate(fd, 0)
        os.ftruncate(fd, size)


def _punch(fd: int, at: int, size: int) -> None:
    if _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, at, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

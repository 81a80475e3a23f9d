"""What the disk has, how a file is opened without following a link, and how it gives its blocks
back while others have it open.

Owns the calls to the kernel for these. Must not know what a file holds.
"""

import ctypes
import errno
import os
import stat
from pathlib import Path
from typing import Final

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
FIRST_BYTES: Final = 2 << 20
_CAREFULLY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A name may be somebody else's by now: no link is followed, and no pipe is waited for."""
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


def free_bytes(directory: Path) -> int:
    """Bytes that the file system of ``directory`` has left."""
    status = os.statvfs(directory)
    return status.f_bfree * status.f_frsize


def open_regular(path: Path) -> int | None:
    """A regular file, for reading only; None where the name is that of something else: a directory,
    a link wherever it leads, a pipe, a device. OSError where it cannot be read."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return None
    try:
        fd = os.open(path, os.O_RDONLY | _CAREFULLY)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link since
            return None
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def open_writable(path: Path, fd: int) -> int | None:
    """The file that ``fd`` is, which was read and is ours, for writing too; None where the system
    does not let us. FileNotFoundError where its name is another file's by now."""
    try:
        writable = os.open(path, os.O_RDWR | _CAREFULLY)
    except PermissionError:
        return None
    if os.path.samestat(os.fstat(fd), os.fstat(writable)):
        return writable
    os.close(writable)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def has_no_data(fd: int) -> bool:
    """Whether nobody ever wrote into a file that takes blocks of the disk; False also where the
    file system cannot report it."""
    status = os.fstat(fd)
    if not status.st_size or not status.st_blocks:
        return False
    # What was only read is in the kernel's cache, and counts as data there.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        os.lseek(fd, 0, os.SEEK_DATA)
    except OSError as error:
        return error.errno == errno.ENXIO
    return False


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

"""Whether a file is the one that was seen before, and untouched since: what its inode says.

Owns the reading of inodes, and the judgement whether any write would show there. Must not know what
is in a file.

A write gives an inode the kernel's coarse time. So once that clock has gone past a file's ctime,
any later write shows, however quick, and whatever it does to mtime. Two things break this, and both
are dealt with here. A store through a mapping that is already dirty sets no time: so a file is
synced before it is looked at, after which the first such store does. And file systems whose times
or inodes are somebody else's (FUSE, network, overlay), or that set no time for stores through
mappings (tmpfs), are not trusted.
"""

import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TRUSTED: Final = frozenset({"ext4", "xfs", "btrfs"})
"""File systems in which every write, through a mapping too, sets ctime by this kernel's clock."""
_COARSE: Final = 5
"""CLOCK_REALTIME_COARSE, by which Linux dates inodes."""
_WHOLE_SECOND_NS: Final = 1_000_000_000
_LONGEST_WAIT_NS: Final = 2 * _WHOLE_SECOND_NS
_TICK_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class FileStat:
    """``link``: device, inode and ctime of the directory entry, which may be a symbolic link.
    ``trusted``: whether an equal look later means that nobody has written meanwhile; without it,
    only bytes can show it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    link: tuple[int, int, int]
    trusted: bool

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        return (self.device, self.inode, self.size, self.mtime_ns, self.ctime_ns)

    def may_match(self, later: "FileStat") -> bool:
        """Whether a later look may be at the same bytes; surely, where it is trusted."""
        if self.trusted:
            return self == later
        return self.size == later.size and not later.trusted


def coarse_ns() -> int:
    return time.clock_gettime_ns(_COARSE)


def file_system_of(fd: int) -> str:
    """The type of what an open file lies on, as mount shows it; empty where that is not known."""
    with suppress(OSError):
        mount = re.search(r"(?m)^mnt_id:\s*(\d+)$", Path(f"/proc/self/fdinfo/{fd}").read_text())
        for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines():
            fields = line.split()
            if mount and fields[0] == mount[1]:
                return fields[fields.index("-", 6) + 1]
    return ""


def boot_of_this_machine() -> str:
    """What this kernel has called itself since it started; empty where it does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What is asked of the machine. ``boot``: names it from one start to the next; a device and an
    inode mean something only within. ``sleep``: seconds."""

    boot: str
    file_system: Callable[[int], str] = file_system_of
    coarse_ns: Callable[[], int] = coarse_ns
    sleep: Callable[[float], None] = time.sleep


def open_file(path: Path) -> int:
    """A descriptor to read a regular file by, its owner's to close. OSError, ValueError for other
    kinds; a pipe is never waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{path.name} is no regular file")
    return fd


def stat_file(path: Path, fd: int, kernel: Kernel) -> FileStat:
    """At an open file. Waits for a tick of the clock where it was written within the last one."""
    trusted = bool(kernel.boot) and kernel.file_system(fd) in TRUSTED
    if trusted:
        try:
            os.fsync(fd)
        except OSError:
            trusted = False
    while True:
        now_ns = kernel.coarse_ns()
        inode, entry = os.fstat(fd), os.lstat(path)
        newest_ns = max(inode.st_ctime_ns, entry.st_ctime_ns)
        # No fraction: a file system that counts whole seconds.
        whole = not inode.st_ctime_ns % _WHOLE_SECOND_NS or not entry.st_ctime_ns % _WHOLE_SECOND_NS
        ahead_ns = newest_ns + (_WHOLE_SECOND_NS if whole else 1) - now_ns
        if not trusted or ahead_ns <= 0:
            break
        if ahead_ns > _LONGEST_WAIT_NS:
            trusted = False  # the clock was set back, and will be there again
        else:
            kernel.sleep(_TICK_S)
    return FileStat(
        device=inode.st_dev,
        inode=inode.st_ino,
        size=inode.st_size,
        mtime_ns=inode.st_mtime_ns,
        ctime_ns=inode.st_ctime_ns,
        link=(entry.st_dev, entry.st_ino, entry.st_ctime_ns),
        trusted=trusted,
    )

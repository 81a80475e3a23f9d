"""Digests of the tensors of files that were hashed before, in the user's cache directory.

Owns the entries. One is found only under the boot, device, inode, size, mtime and ctime of its file
and the header in it, and only whole: whatever else lies there costs a rehash and nothing more. Must
not decide which files may be cached by their inode (``file_stat``), nor what a digest is for.

An entry is as good as its inode's times. Across a boot these may lie: after a power loss new bytes
can stand under an old time. So an entry counts until the machine starts again, and one in a home
directory that machines share counts on the one that has written it.
"""

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from stratakv.core.clock import Clock
from stratakv.core.identity.file_stat import FileStat
from stratakv.core.identity.tensor_reader import DIGEST_BYTES

log = logging.getLogger(__name__)

YOUNG_S: Final = 2.0
"""A file that was written within that time is not kept."""
OLD_S: Final = 30 * 86400.0
"""Entries are removed after that time."""
_MAGIC: Final = b"stratakv-tensor-digests-1\n"
_CHECKSUM: Final = hashlib.sha256
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def cache_directory() -> Path | None:
    """``stratakv/weights`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; None without a home."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():
        try:
            home = Path.home() / ".cache"
        except RuntimeError:
            return None
    return home / "stratakv" / "weights"


class DigestCache:
    """Entries of one machine, as long as it runs. ``directory``: made when it is needed; None:
    nothing is kept. ``clock``: wall time."""

    def __init__(self, directory: Path | None, boot: str, clock: Clock) -> None:
        self._directory = directory
        self._boot = boot.encode()
        self._clock = clock

    def may_keep(self, file: FileStat) -> bool:
        """Whether a file that has just been looked at is one whose digests are kept."""
        return file.trusted and self._clock.now_s() - file.ctime_ns / 1e9 >= YOUNG_S

    def lookup(self, file: FileStat, header: bytes, count: int) -> Sequence[bytes] | None:
        """Digests of the ``count`` tensors of a file; None where there is no sound entry.
        ``header``: 32 bytes that stand for the header that they were laid out by."""
        if self._directory is None or not file.trusted:
            return None
        head = self._head(file, header)
        length = len(head) + DIGEST_BYTES * count + _CHECKSUM().digest_size
        data = _own_bytes(self._path(self._directory, file), length)
        body = data[len(head) : length - _CHECKSUM().digest_size]
        if data != head + body + _CHECKSUM(head + body).digest() or len(data) != length:
            return None
        return [body[at : at + DIGEST_BYTES] for at in range(0, len(body), DIGEST_BYTES)]

    def keep(self, file: FileStat, header: bytes, digests: Sequence[bytes]) -> None:
        """Of a file of which ``may_keep`` was true when it was looked at."""
        if self._directory is None:
            return
        data = self._head(file, header) + b"".join(digests)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._forget_old(self._directory)
            fd, name = tempfile.mkstemp(dir=self._directory)
            try:
                with os.fdopen(fd, "wb") as entry:
                    entry.write(data + _CHECKSUM(data).digest())
                Path(name).replace(self._path(self._directory, file))
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            log.info("no digests are kept in %s: %s", self._directory, error)

    def _head(self, file: FileStat, header: bytes) -> bytes:
        return b"".join((_MAGIC, self._name(file), header))

    def _path(self, directory: Path, file: FileStat) -> Path:
        return directory / self._name(file).hex()

    def _name(self, file: FileStat) -> bytes:
        return hashlib.sha256(b"%s\n%d %d %d %d %d" % (self._boot, *file.key)).digest()

    def _forget_old(self, directory: Path) -> None:
        for entry in directory.iterdir():
            with suppress(FileNotFoundError):  # another server was first
                if self._clock.now_s() - entry.stat().st_mtime > OLD_S:
                    entry.unlink()


def _own_bytes(path: Path, length: int) -> bytes:
    """What a file of ours holds, of one byte more than ``length`` at most; nothing of one that
    others may have written."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as entry:
            found = os.fstat(fd)
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if not ours or found.st_mode & _WRITABLE_BY_OTHERS:
                return b""
            return entry.read(length + 1)
    except OSError:
        return b""

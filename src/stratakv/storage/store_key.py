"""The secret that servers share who trust each other's pages: read from a file, never shown.

Owns the check of ``--storage-key-file`` and the seals that are made with it. Must not know
backends.
"""

import hashlib
import hmac
import os
import stat
import struct
from typing import Final

from stratakv.core.errors import ConfigError
from stratakv.storage.backend import ObjectKey

KEY_FLAG: Final = "--storage-key-file"
LEAST_BYTES: Final = 32
MOST_BYTES: Final = 4096
SEAL_BYTES: Final = 32
_ALLOWED: Final = (
    f"allowed is a regular file of {LEAST_BYTES} to {MOST_BYTES} bytes (openssl rand -hex 32), of "
    "this user or root, that others cannot read and its group cannot write (chmod 600)"
)
_TOO_OPEN: Final = stat.S_IRWXO | stat.S_IWGRP
_IDENTITY: Final = struct.Struct("<16s32sIIQ")


class StoreKey:
    """``id``: 16 bytes that tell keys apart and say nothing of them."""

    def __init__(self, secret: bytes) -> None:
        self.id: Final = hmac.digest(secret, b"stratakv-key-id-1", "sha256")[:16]
        self._pages = hmac.new(
            hmac.digest(secret, b"stratakv-page-seal-1", "sha256"), digestmod="sha256"
        )

    def __repr__(self) -> str:
        return f"StoreKey({self.id.hex()})"

    def form_of(self, spec_digest: bytes) -> bytes:
        """Instead of the digest of a format, 16 bytes: pages under another key, or under none, are
        of another format."""
        return hashlib.sha256(b"stratakv-sealed-1" + spec_digest + self.id).digest()[:16]

    def seal(self, spec_digest: bytes, key: ObjectKey, page: memoryview) -> bytes:
        """HMAC-SHA256, 32 bytes, of what an object is and of what it holds. ``spec_digest``: of its
        format, 16 bytes."""
        mac = self._pages.copy()
        mac.update(_IDENTITY.pack(spec_digest, key.page, key.group, key.shard, len(page)))
        mac.update(page)
        return mac.digest()


def read_key(path: str) -> StoreKey:
    """The key in a file, of which line breaks at the end are no part. ConfigError where it is not
    one, or not only ours."""
    try:
        # A link may lead there, as where secrets are mounted; a pipe must not keep us waiting.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "that is no path"
        raise _refused(path, f"{why}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(path, "it is no regular file")
        if status.st_mode & _TOO_OPEN or status.st_uid not in {0, os.geteuid()}:
            raise _refused(path, f"others may have it, mode {stat.S_IMODE(status.st_mode):04o}")
        secret = os.read(fd, MOST_BYTES + 2).rstrip(b"\r\n")
    finally:
        os.close(fd)
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        size = f"more than {MOST_BYTES}" if len(secret) > MOST_BYTES else str(len(secret))
        raise _refused(path, f"it holds {size} bytes")
    return StoreKey(secret)


def _refused(path: str, why: str) -> ConfigError:
    return ConfigError(f"{KEY_FLAG} {path}: {why}; {_ALLOWED}")

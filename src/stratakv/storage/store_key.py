"""The secret that servers share who trust each other's pages: read from a file, never shown.

Owns the check of ``--storage-key-file`` and the seals that are made with it. Must not know
backends.
"""

import hashlib
import hmac
import struct
from typing import Final

from stratakv.core.errors import ConfigError
from stratakv.core.secret_file import ALLOWED, read_secret
from stratakv.storage.backend import ObjectKey

KEY_FLAG: Final = "--storage-key-file"
LEAST_BYTES: Final = 32
MOST_BYTES: Final = 4096
SEAL_BYTES: Final = 32
_ALLOWED: Final = (
    f"allowed is a regular file of {LEAST_BYTES} to {MOST_BYTES} bytes (openssl rand -hex 32), "
    f"{ALLOWED} (chmod 600)"
)
_IDENTITY: Final = struct.Struct("<16s32sIIQ")


class StoreKey:
    """``id``: 16 bytes that distinguish keys and reveal nothing of them."""

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
        secret = read_secret(path, MOST_BYTES).rstrip(b"\r\n")
    except ValueError as error:
        raise _refused(path, str(error)) from None
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        size = f"more than {MOST_BYTES}" if len(secret) > MOST_BYTES else str(len(secret))
        raise _refused(path, f"it holds {size} bytes")
    return StoreKey(secret)


def _refused(path: str, why: str) -> ConfigError:
    return ConfigError(f"{KEY_FLAG} {path}: {why}; {_ALLOWED}")

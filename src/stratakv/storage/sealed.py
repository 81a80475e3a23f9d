"""Pages that only who has the key can have written, in any store.

Owns the seal behind each page: it is made before a store gets the page and checked before anybody
sees it. Checksums find what was damaged; this finds what was forged, or moved under another name.
Must not know how objects are kept.
"""

import hmac
import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stratakv.core.errors import StorageError
from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StorageBackend,
    StoreFormat,
    WriteStatus,
)
from stratakv.storage.store_key import SEAL_BYTES, StoreKey

_logger = logging.getLogger(__name__)


def sealed_form(form: StoreFormat, key: StoreKey) -> StoreFormat:
    """Of the objects that hold sealed pages of ``form``: unlike that of any other key, or of none,
    so that servers with different keys have different objects."""
    return StoreFormat(
        spec_digest=key.form_of(form.spec_digest),
        page_bytes=tuple(size + SEAL_BYTES for size in form.page_bytes),
    )


class SealedBackend:
    """``inner``: of ``form``, which is a ``sealed_form``. Pages pass through memory of its own, as
    much as one batch has. ``forged``: objects so far whose seal was wrong."""

    def __init__(self, inner: StorageBackend, form: StoreFormat, key: StoreKey) -> None:
        self.inner = inner
        self.key = key
        self.forged = 0
        self._form = form
        self._memory = np.empty(0, np.uint8)

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        return self.inner.contains(keys)

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        sealed = self._room(keys)
        statuses = list(self.inner.read(keys, sealed))
        forged: list[ObjectKey] = []
        for at, status in enumerate(statuses):
            if status is not ReadStatus.HIT:
                continue
            page, seal = sealed[at][:-SEAL_BYTES], sealed[at][-SEAL_BYTES:]
            if hmac.compare_digest(self._seal(keys[at], page), seal):
                into[at][:] = page
            else:
                statuses[at] = ReadStatus.CORRUPT
                forged.append(keys[at])
        if forged:
            self._put_aside(forged)
        return statuses

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        sealed = self._room(keys)
        for key, page, room in zip(keys, pages, sealed, strict=True):
            # Of the copy, which nobody else can change between the two.
            room[:-SEAL_BYTES] = page
            room[-SEAL_BYTES:] = self._seal(key, room[:-SEAL_BYTES])
        return self.inner.write(keys, sealed)

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        self.inner.touch(keys)

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        return self.inner.remove(keys)

    def close(self) -> None:
        self.inner.close()
        self._memory = np.empty(0, np.uint8)

    def _seal(self, key: ObjectKey, page: memoryview) -> bytes:
        return self.key.seal(self._form.spec_digest, key, page)

    def _put_aside(self, forged: list[ObjectKey]) -> None:
        """What stays would be refused as present when it is written anew."""
        if not self.forged:
            _logger.warning(
                "the store has objects that were not sealed with this server's key: somebody else "
                "writes there; they are not used, removed, and counted"
            )
        self.forged += len(forged)
        with suppress(StorageError):
            self.inner.remove(forged)

    def _room(self, keys: Sequence[ObjectKey]) -> list[memoryview]:
        """A place for each object of a batch, in one piece of memory, which stays where it is: some
        stores register it."""
        ends = np.cumsum([self._form.page_bytes[key.group] for key in keys], dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        if total > len(self._memory):
            self._memory = np.empty(total, np.uint8)
        view = self._memory.data
        return [view[start:end] for start, end in pairwise([0, *ends.tolist()])]

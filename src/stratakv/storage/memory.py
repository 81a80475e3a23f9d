"""Storage in this process's own memory: for tests, and for trying the tier without a disk.

Owns the bytes and their order of use. Must not outlive the process, nor share with another one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.errors import StorageError
from stratakv.storage.backend import Everything, ObjectKey, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.header import payload_hash

DEFAULT_QUOTA_BYTES: Final = 1 << 30


class MemoryBackend:
    """A ``StorageBackend`` over a dict, oldest use first. ``quota_bytes`` counts payloads."""

    def __init__(self, form: StoreFormat, quota_bytes: int = DEFAULT_QUOTA_BYTES) -> None:
        self._page_bytes = form.page_bytes
        self._quota_bytes = quota_bytes
        self._used_bytes = 0
        self._objects: OrderedDict[ObjectKey, tuple[bytearray, int]] | None = OrderedDict()

    def snapshot(self) -> dict[ObjectKey, bytes]:
        """What it has, oldest use first."""
        return {key: bytes(data) for key, (data, _) in list(self._open().items())}

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        return np.fromiter(map(self._open().__contains__, keys), np.bool_, len(keys))

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        return [self._read(key, buffer) for key, buffer in zip(keys, into, strict=True)]

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        objects = self._open()
        there = [key for key in keys if key in objects]
        # What stands is not evicted for what comes with it: it is the head of the same chain.
        self.touch(there[::-1])
        fresh: list[ObjectKey] = []
        kept = set(keys)
        statuses: list[WriteStatus] = []
        for key, page in zip(keys, pages, strict=True):
            assert len(page) == self._page_bytes[key.group], f"{len(page)} bytes for {key.group}"
            if key in objects:
                statuses.append(WriteStatus.PRESENT)
            elif self._make_room(len(page), kept):
                objects[key] = (bytearray(page), payload_hash(page))
                self._used_bytes += len(page)
                fresh.append(key)
                statuses.append(WriteStatus.STORED)
            else:
                statuses.append(WriteStatus.REFUSED)
        # A batch comes from the head of a chain down: its deepest page is its oldest.
        self.touch(fresh[::-1])
        return statuses

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        objects = self._objects
        if objects is not None:
            for key in keys:
                if key in objects:
                    objects.move_to_end(key)

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        gone = list(self._open()) if isinstance(keys, Everything) else keys
        return sum(map(self._remove, gone))

    def close(self) -> None:
        self._objects = None

    def damage(self, key: ObjectKey, at: int) -> None:
        """Flip one bit of the stored bytes, for tests of what reads them."""
        self._open()[key][0][at] ^= 1

    def _open(self) -> OrderedDict[ObjectKey, tuple[bytearray, int]]:
        if self._objects is None:
            raise StorageError("the memory store is closed")
        return self._objects

    def _read(self, key: ObjectKey, buffer: memoryview) -> ReadStatus:
        found = self._open().get(key)
        if found is None:
            return ReadStatus.MISS
        data, digest = found
        buffer[:] = data
        if payload_hash(buffer) == digest:
            return ReadStatus.HIT
        self._remove(key)
        return ReadStatus.CORRUPT

    def _make_room(self, size: int, kept: set[ObjectKey]) -> bool:
        """Evict the oldest objects until ``size`` bytes fit; False where only ``kept`` are left."""
        objects = self._open()
        while self._used_bytes + size > self._quota_bytes:
            oldest = next(iter(objects), None)
            if oldest is None or oldest in kept:
                return False
            self._remove(oldest)
        return True

    def _remove(self, key: ObjectKey) -> bool:
        found = self._open().pop(key, None)
        if found is not None:
            self._used_bytes -= len(found[0])
        return found is not None

"""A backend that is opened by its first call, for those who may not wait before.

Owns when it is opened. Must not bound that: whoever bounds the calls does.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StorageBackend,
    WriteStatus,
)


class OpenedOnUse:
    """For one thread at a time, as any backend is. What ``opening`` raises, a call does."""

    def __init__(self, opening: Callable[[], StorageBackend]) -> None:
        self._opening = opening
        self._backend: StorageBackend | None = None

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        return self._opened().contains(keys)

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        return list(self._opened().read(keys, into))

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        return list(self._opened().write(keys, pages))

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        self._opened().touch(keys)

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        return self._opened().remove(keys)

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    def _opened(self) -> StorageBackend:
        if self._backend is None:
            self._backend = self._opening()
        return self._backend

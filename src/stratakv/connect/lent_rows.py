"""Rows of another engine's host tier that a job has, and that can be taken back from a store which
does not come back.

Owns the loans, and the memory through which their bytes pass: a store reads into that and writes
from it, never into a row. So a read that ends late changes no row, and a write that ends late
writes what was lent. Must not choose when to take back.
"""

from collections.abc import Sequence
from threading import Lock
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StorageBackend,
    WriteStatus,
)
from stratakv.storage.io_worker import Backends

Bytes: TypeAlias = npt.NDArray[np.uint8]


class Loan:
    """Rows ``at`` of ``rows``, [n, bytes of a page]: the job's until they are taken back."""

    def __init__(self, rows: Bytes, at: Sequence[int]) -> None:
        self._rows: Bytes | None = rows
        self._at = np.asarray(at, np.int64)
        self.page_bytes = int(rows.shape[1])
        self._filled: list[int] = []
        self._lock = Lock()

    @property
    def pages(self) -> "LentPages":
        """All of them, for a job."""
        return LentPages(self, range(len(self._at)))

    def take_back(self) -> Sequence[int]:
        """Whose rows were filled, by their places in the loan; nobody touches any from now on.
        Waits for a copy of a batch at most."""
        with self._lock:
            self._rows = None
            return self._filled

    def fill(self, places: Sequence[int], pages: Bytes) -> bool:
        """Copy pages to rows; False, and nothing done, where they were taken back."""
        with self._lock:
            if self._rows is None:
                return False
            self._rows[self._at[places]] = pages
            self._filled += places
            return True

    def copy(self, places: Sequence[int], into: "Staging") -> Bytes | None:
        """Pages of rows; None where they were taken back."""
        with self._lock:
            if self._rows is None:
                return None
            pages = into.pages(len(places), self.page_bytes)
            np.take(self._rows, self._at[places], axis=0, out=pages, mode="clip")
            return pages


class LentPages(Sequence[memoryview]):
    """Some pages of a loan, in place of buffers: a job's batches are slices of it. It shows
    nobody a row."""

    def __init__(self, loan: Loan, places: range) -> None:
        self.loan = loan
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, at: int) -> memoryview: ...
    @overload
    def __getitem__(self, at: slice) -> "LentPages": ...
    def __getitem__(self, at: int | slice) -> "memoryview | LentPages":
        assert isinstance(at, slice), "a row that is lent is copied, and never shown"
        return LentPages(self.loan, self.places[at])


class Staging:
    """Memory that batches pass through, one at a time, of one thread: made once, since a page that
    was never touched costs more to touch than to copy."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)

    def pages(self, count: int, page_bytes: int) -> Bytes:
        if self._memory.size < count * page_bytes:
            self._memory = np.empty(count * page_bytes, np.uint8)
        return self._memory[: count * page_bytes].reshape(count, page_bytes)


class StagedBackend:
    """A backend whose jobs have ``LentPages`` for buffers."""

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self._staging = Staging()

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        return self._backend.contains(keys)

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        assert isinstance(into, LentPages), "rows come as a loan"
        pages = self._staging.pages(len(keys), into.loan.page_bytes)
        statuses = self._backend.read(keys, [page.data for page in pages])
        hits = [at for at, status in enumerate(statuses) if status is ReadStatus.HIT]
        found = pages if len(hits) == len(pages) else pages[hits]
        if not into.loan.fill([into.places[at] for at in hits], found):
            return [ReadStatus.FAILED] * len(keys)
        return list(statuses)

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        assert isinstance(pages, LentPages), "rows come as a loan"
        copies = pages.loan.copy(pages.places, self._staging)
        if copies is None:
            return [WriteStatus.FAILED] * len(keys)
        return list(self._backend.write(keys, [page.data for page in copies]))

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        self._backend.touch(keys)

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        return self._backend.remove(keys)

    def close(self) -> None:
        self._backend.close()


def staged(ends: Backends) -> Backends:
    """Each end with memory of its own, since each has a thread of its own."""
    reading = StagedBackend(ends.reading)
    if ends.writing is ends.reading:
        return Backends(reading, reading)
    return Backends(reading, StagedBackend(ends.writing))

"""Pages of an engine that asks on threads of its own and waits for the answer.

Owns the counts, and the memory that pages pass through: an engine uses its own again once a call
has returned, and a store that hangs may still write then. Its own is copied on the store's thread,
while it is lent: each time that one thread waits for another it waits for the interpreter too,
which whoever computes has. Must not raise what a store does: it costs hits, and is counted.
"""

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from stratakv.connect.bounded_calls import BoundedCalls, NoAnswer
from stratakv.connect.lent_rows import Staging
from stratakv.connect.page_counts import PageCounts, PageEvent
from stratakv.core.clock import Clock
from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StorageBackend,
    WriteStatus,
)
from stratakv.storage.io_worker import Backends

Bytes: TypeAlias = npt.NDArray[np.uint8]
SERVED: Final = frozenset({WriteStatus.STORED, WriteStatus.PRESENT})
COPIED_BYTES: Final = 8 << 20
"""Read at a time: pages are still in the processor's cache when they are copied."""
CALLED_BYTES: Final = 32 << 20
"""In one call of the store: who asks it something else waits for as much."""
S = TypeVar("S")
PageCopy: TypeAlias = Callable[[int, Bytes], None]
"""Between an engine's page, by its place in the call, and a row of bytes."""


class _Loan(Generic[S]):
    """Of an engine's memory to one call of the store."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open = True
        self._done: list[S] = []
        self._error: Exception | None = None

    @property
    def done(self) -> int:
        """How many pages have been tried."""
        return len(self._done)

    def copy(self, one: PageCopy, places: Iterable[int], pages: Bytes, done: Sequence[S]) -> bool:
        """``one`` after another, and ``done`` of pages then; False where that was not to be."""
        with self._lock:
            try:
                if self._open:
                    for at, page in zip(places, pages, strict=True):
                        one(at, page)
                    self._done += done
            except Exception as error:  # noqa: BLE001 - it is the engine's, and not the store's
                self._open, self._error = False, error
            return self._open

    def end(self, done: Sequence[S]) -> None:
        """Of pages that were copied before."""
        with self._lock:
            if self._open:
                self._done += done

    def take_back(self) -> list[S]:
        """What became of pages, the first ones; nobody touches any from now on. Waits for a copy of
        a batch at most; raises what that did."""
        with self._lock:
            self._open = False
            if self._error is not None:
                raise self._error
            return self._done


class BlockingPages:
    """Of one open store; from any thread, each of which waits for its own answer alone.
    ``patience_s``: what the store has not answered by then is a miss."""

    def __init__(self, ends: Backends, clock: Clock, patience_s: float) -> None:
        self._reading = BoundedCalls(ends.reading, clock, patience_s)
        self._writing = self._reading
        if ends.writing is not ends.reading:
            self._writing = BoundedCalls(ends.writing, clock, patience_s)
        self._counting = Lock()
        self._read_into, self._written_from = Staging(), Staging()
        self._counts = PageCounts()

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        """Which are there, bool [n]."""
        found = self._reading.call(lambda backend: backend.contains(keys))
        present = np.zeros(len(keys), np.bool_) if isinstance(found, NoAnswer) else found
        with self._counting:
            self._counts.add("asked", len(keys))
            self._counts.add("present", int(present.sum()))
            if found is NoAnswer.LATE:
                self._counts.add("late", len(keys))
        return present

    def read(self, keys: Sequence[ObjectKey], page_bytes: int, put: PageCopy) -> list[bool]:
        """Which pages have come, each of which is given to ``put`` on another thread, to be copied
        at once. Say ``touch`` then."""
        hit: list[bool] = []
        for part in _parts(range(len(keys)), page_bytes, CALLED_BYTES):
            hit += self._read(keys, part, page_bytes, put)
        return hit

    def touch(self, keys: Sequence[ObjectKey], hit: Sequence[bool]) -> None:
        """Of a chain, its head first, the pages that were read are of use to somebody. Nobody waits
        for that."""
        used = [key for key, there in zip(keys, hit, strict=True) if there]
        if used:
            self._writing.post(lambda backend: backend.touch(used[::-1]))

    def write_from(self, keys: Sequence[ObjectKey], page_bytes: int, take: PageCopy) -> list[bool]:
        """Which are stored now, the head of a chain first. ``take`` copies a page to a row, on
        another thread and before the end of this call."""
        served: list[bool] = []
        parts = _parts(range(len(keys)), page_bytes, CALLED_BYTES)
        for part in parts:
            served += self._write_from(keys, part, page_bytes, take)
        if len(parts) > 1:  # each part is younger than the one before, which has the head
            self.touch(keys, served)
        return served

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[bool]:
        """Which are stored now, the head of a chain first. Nobody may change ``pages`` any more:
        a store that hangs writes them later."""
        answer = self._writing.call(lambda backend: backend.write(keys, pages))
        return self._served([] if isinstance(answer, NoAnswer) else answer, len(keys))

    def clear(self) -> bool:
        """Forget every page; whether that could be done."""
        gone = self._writing.call(lambda backend: backend.remove(Everything.EVERYTHING))
        return not isinstance(gone, NoAnswer)

    def close(self) -> None:
        """Write out what is known."""
        for end in {self._reading, self._writing}:
            end.close()

    @property
    def totals(self) -> dict[PageEvent, int]:
        """What became of pages since the start."""
        with self._counting:
            return dict(self._counts.total)

    def take_counts(self) -> dict[PageEvent, int]:
        """What became of pages since the last call."""
        with self._counting:
            return dict(self._counts.take())

    @property
    def off(self) -> bool:
        """Whether the store has failed or hung lately and is left alone for now."""
        return self._reading.off or self._writing.off

    def _read(
        self, keys: Sequence[ObjectKey], part: range, page_bytes: int, put: PageCopy
    ) -> list[bool]:
        loan, staging = _Loan[ReadStatus](), self._read_into

        def work(backend: StorageBackend) -> None:
            for places in _parts(part, page_bytes, COPIED_BYTES):
                pages = staging.pages(len(places), page_bytes)
                names = keys[places.start : places.stop]
                statuses = backend.read(names, [page.data for page in pages])
                hits = [at for at, status in enumerate(statuses) if status is ReadStatus.HIT]
                found = pages if len(hits) == len(pages) else pages[hits]
                if not loan.copy(put, [places[at] for at in hits], found, statuses):
                    return

        answer = self._reading.call(work, lambda: loan.done)
        statuses = loan.take_back()
        with self._counting:
            if answer is NoAnswer.LATE:
                self._counts.add_reads(statuses, len(statuses))
                self._counts.add("late", len(part) - len(statuses))
            else:
                self._counts.add_reads(statuses, len(part))
        hit = [status is ReadStatus.HIT for status in statuses]
        return hit + [False] * (len(part) - len(hit))

    def _write_from(
        self, keys: Sequence[ObjectKey], part: range, page_bytes: int, take: PageCopy
    ) -> list[bool]:
        loan, staging = _Loan[WriteStatus](), self._written_from

        def work(backend: StorageBackend) -> None:
            pages = staging.pages(len(part), page_bytes)
            if loan.copy(take, part, pages, ()):
                names = keys[part.start : part.stop]
                loan.end(backend.write(names, [page.data for page in pages]))

        self._writing.call(work)
        return self._served(loan.take_back(), len(part))

    def _served(self, statuses: Sequence[WriteStatus], wanted: int) -> list[bool]:
        with self._counting:
            self._counts.add_writes(statuses, wanted)
        served = [status in SERVED for status in statuses]
        return served + [False] * (wanted - len(served))


def _parts(places: range, page_bytes: int, most_bytes: int) -> list[range]:
    some = max(1, most_bytes // page_bytes)
    return [places[start : start + some] for start in range(0, len(places), some)]

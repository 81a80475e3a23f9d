"""Pages of an engine that asks on threads of its own and waits for the answer.

Owns the counts, and the memory that pages are read into: an engine uses its own again once a call
has returned, and a store that hangs may still write then. Must not raise what a store does: it
costs hits, and is counted.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.connect.bounded_calls import BoundedCalls, NoAnswer
from stratakv.connect.page_counts import PageCounts, PageEvent
from stratakv.core.clock import Clock
from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    WriteStatus,
)
from stratakv.storage.io_worker import Backends

Bytes: TypeAlias = npt.NDArray[np.uint8]
SERVED: Final = frozenset({WriteStatus.STORED, WriteStatus.PRESENT})
COPIED_BYTES: Final = 8 << 20
"""Read at a time: pages are still in the processor's cache when they are copied, and the memory
that they pass through is made once."""


class BlockingPages:
    """Of one open store; from any thread, each of which waits for its own answer alone.
    ``patience_s``: what the store has not answered by then is a miss."""

    def __init__(self, ends: Backends, clock: Clock, patience_s: float) -> None:
        self._reading = BoundedCalls(ends.reading, clock, patience_s)
        self._writing = self._reading
        if ends.writing is not ends.reading:
            self._writing = BoundedCalls(ends.writing, clock, patience_s)
        self._counting = Lock()
        self._spare: list[Bytes] = []
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

    def read(
        self, keys: Sequence[ObjectKey], page_bytes: int, put: Callable[[int, Bytes], None]
    ) -> list[bool]:
        """Which pages have come, each of which is given to ``put`` with its place in ``keys``, to
        be copied at once. Say ``touch`` then."""
        some = max(1, COPIED_BYTES // page_bytes)
        hit: list[bool] = []
        for start in range(0, len(keys), some):
            part = keys[start : start + some]
            memory = self._memory(len(part) * page_bytes)
            pages = memory[: len(part) * page_bytes].reshape(len(part), page_bytes)
            for at, there in enumerate(self._read(part, pages)):
                hit.append(there)
                if there:
                    put(start + at, pages[at])
            # A store that hangs may write there still: it begins nothing else until that ends.
            self._spare.append(memory)
        return hit

    def touch(self, keys: Sequence[ObjectKey], hit: Sequence[bool]) -> None:
        """Of a chain, its head first, the pages that were read are of use to somebody."""
        used = [key for key, there in zip(keys, hit, strict=True) if there]
        if used:
            self._writing.call(lambda backend: backend.touch(used[::-1]))

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[bool]:
        """Which are stored now, the head of a chain first. Nobody may change ``pages`` any more:
        a store that hangs writes them later."""
        answer = self._writing.call(lambda backend: backend.write(keys, pages))
        statuses = [] if isinstance(answer, NoAnswer) else answer
        with self._counting:
            self._counts.add_writes(statuses, len(keys))
        served = [status in SERVED for status in statuses]
        return served + [False] * (len(keys) - len(served))

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

    def _read(self, keys: Sequence[ObjectKey], pages: Bytes) -> list[bool]:
        into = [page.data for page in pages]
        answer = self._reading.call(lambda backend: backend.read(keys, into))
        statuses = [] if isinstance(answer, NoAnswer) else answer
        with self._counting:
            if answer is NoAnswer.LATE:
                self._counts.add("late", len(keys))
            else:
                self._counts.add_reads(statuses, len(keys))
        hit = [status is ReadStatus.HIT for status in statuses]
        return hit + [False] * (len(keys) - len(hit))

    def _memory(self, size_bytes: int) -> Bytes:
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = np.empty(0, np.uint8)
        return memory if len(memory) >= size_bytes else np.empty(size_bytes, np.uint8)

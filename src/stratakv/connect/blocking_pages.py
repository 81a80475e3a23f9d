"""Pages of an engine that asks on threads of its own and waits for the answer.

Owns the turns at each open backend, and the back-off: a store that fails is left alone for a while,
and then has nothing. Must not raise what a store does: it costs hits, and is counted.
"""

import logging
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from stratakv.connect.page_counts import PageCounts
from stratakv.core.clock import Clock
from stratakv.core.errors import StorageError
from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StorageBackend,
    WriteStatus,
)
from stratakv.storage.breaker import Breaker
from stratakv.storage.io_worker import Backends

log = logging.getLogger(__name__)
T = TypeVar("T")
SERVED: Final = frozenset({WriteStatus.STORED, WriteStatus.PRESENT})


class _End:
    """One open backend, which one thread at a time may call."""

    def __init__(self, backend: StorageBackend, clock: Clock) -> None:
        self.backend = backend
        self._breaker = Breaker(clock)
        self._turn = Lock()

    def call(self, work: Callable[[StorageBackend], T]) -> T | None:
        """None where the store failed, or is left alone."""
        with self._turn:
            if not self._breaker.closed:
                return None
            try:
                answer = work(self.backend)
            except Exception as error:  # noqa: BLE001 - a client library may raise anything
                self._breaker.failed()
                log.warning("the store failed: %s: %s", type(error).__name__, error)
                return None
            self._breaker.worked()
            return answer


class BlockingPages:
    """Of one open store; from any thread, each of which waits for its own answer alone."""

    def __init__(self, ends: Backends, clock: Clock) -> None:
        self._reading = _End(ends.reading, clock)
        self._writing = self._reading
        if ends.writing is not ends.reading:
            self._writing = _End(ends.writing, clock)
        self._counting = Lock()
        self.counts = PageCounts()

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        """Which are there, bool [n]."""
        found = self._reading.call(lambda backend: backend.contains(keys))
        present = np.zeros(len(keys), np.bool_) if found is None else found
        with self._counting:
            self.counts.add("asked", len(keys))
            self.counts.add("present", int(present.sum()))
        return present

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[bool]:
        """Which buffers hold their page; what the others hold is undefined. Say ``touch`` then."""
        statuses = self._reading.call(lambda backend: backend.read(keys, into)) or []
        hit = [status is ReadStatus.HIT for status in statuses]
        with self._counting:
            self.counts.add_reads(statuses, len(keys))
        return hit + [False] * (len(keys) - len(hit))

    def touch(self, keys: Sequence[ObjectKey], hit: Sequence[bool]) -> None:
        """Of a chain, its head first, the pages that were read are of use to somebody."""
        used = [key for key, there in zip(keys, hit, strict=True) if there]
        if used:
            self._writing.call(lambda backend: backend.touch(used[::-1]))

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[bool]:
        """Which are stored now, the head of a chain first."""
        statuses = self._writing.call(lambda backend: backend.write(keys, pages)) or []
        with self._counting:
            self.counts.add_writes(statuses, len(keys))
        served = [status in SERVED for status in statuses]
        return served + [False] * (len(keys) - len(served))

    def clear(self) -> bool:
        """Forget every page; whether that could be done."""
        gone = self._writing.call(lambda backend: backend.remove(Everything.EVERYTHING))
        return gone is not None

    def close(self) -> None:
        """Write out what is known."""
        for end in {self._reading, self._writing}:
            try:
                end.backend.close()
            except StorageError as error:
                log.warning("the store could not be closed: %s", error)

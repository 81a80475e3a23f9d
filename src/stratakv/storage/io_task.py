"""One job under way: its next batch, what has come back so far, its answer.

Owns the calls of a backend. Must not wait, nor know threads or other jobs.
"""

from collections.abc import Sequence
from typing import TypeVar, assert_never

import numpy as np

from stratakv.core.errors import StorageError
from stratakv.core.ids import TicketId
from stratakv.storage.backend import (
    Everything,
    ReadStatus,
    StorageBackend,
    StoreFormat,
    WriteStatus,
)
from stratakv.storage.io_jobs import (
    Answer,
    Ending,
    Fetch,
    Fetched,
    Job,
    Queried,
    Query,
    Remove,
    Removed,
    Store,
    Stored,
    Touch,
    Touched,
    kind_of,
    pages_of,
)


class Batching:
    """How much of a job is done at a time: at most ``pages`` objects, and at most ``size_bytes`` of
    them where bytes move, but always one."""

    def __init__(self, form: StoreFormat, pages: int, size_bytes: int) -> None:
        assert pages > 0, f"a batch of {pages} pages"
        self._page_bytes = form.page_bytes
        self._pages = pages
        self._size_bytes = size_bytes

    def stop(self, job: Job, start: int) -> int:
        """Where the batch that begins at key ``start`` ends."""
        stop = min(start + self._pages, pages_of(job))
        match job:
            case Query() | Touch() | Remove():
                return stop
            case Fetch(keys=keys) | Store(keys=keys):
                sizes = np.cumsum([self._page_bytes[key.group] for key in keys[start:stop]])
                fitting = int(np.searchsorted(sizes, self._size_bytes, side="right"))
                return min(start + max(fitting, 1), stop)
            case _:
                assert_never(job)


class IoTask:
    """``done``: keys that were tried. ``cancel`` is for the owner's thread, all else for the
    lane's. It holds the buffers until it is answered."""

    def __init__(self, ticket: TicketId, job: Job) -> None:
        self.ticket = ticket
        self.job = job
        self.kind = kind_of(job)
        self.done = 0
        self.cancelled = False
        self._present = np.zeros(pages_of(job), np.bool_)
        self._read: list[ReadStatus] = []
        self._written: list[WriteStatus] = []
        self._removed = 0

    @property
    def weight(self) -> int:
        """What it counts for in a queue; a job without a key takes a place too."""
        return max(1, pages_of(self.job))

    @property
    def whole(self) -> bool:
        return self.left == 0

    @property
    def left(self) -> int:
        """Keys that were not tried."""
        return pages_of(self.job) - self.done

    def cancel(self) -> None:
        """Begin no more of it."""
        self.cancelled = True

    def advance(self, backend: StorageBackend, stop: int) -> None:
        """Try keys [done, stop). What the backend raises comes through, and then none counts."""
        some = slice(self.done, stop)
        count = stop - self.done
        match self.job:
            case Query(keys):
                self._present[some] = _all(backend.contains(keys[some]), count)
            case Fetch(keys, into):
                self._read += _all(backend.read(keys[some], into[some]), count)
            case Store(keys, pages):
                self._written += _all(backend.write(keys[some], pages[some]), count)
            case Touch(keys):
                backend.touch(keys[some])
            case Remove(keys):
                gone = keys if isinstance(keys, Everything) else keys[some]
                self._removed += backend.remove(gone)
            case _:
                assert_never(self.job)
        self.done = stop

    def answer(self, ending: Ending) -> Answer:
        match self.job:
            case Query():
                return Queried(self.ticket, ending, self._present)
            case Fetch():
                return Fetched(self.ticket, ending, self._read)
            case Store():
                return Stored(self.ticket, ending, self._written)
            case Touch():
                return Touched(self.ticket, ending)
            case Remove():
                return Removed(self.ticket, ending, self._removed)
            case _:
                assert_never(self.job)


_Items = TypeVar("_Items", bound=Sequence[object] | np.ndarray)


def _all(found: _Items, count: int) -> _Items:
    """StorageError where a backend does not answer for every key."""
    if len(found) != count:
        raise StorageError(f"the backend answered {len(found)} of {count} keys")
    return found

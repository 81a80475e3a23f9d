"""The embedded store: a ``StorageBackend`` over preallocated segments in one directory.

Owns the protocol's promises: what is a hit, when a page counts as stored, what an error means. Must
not choose what leaves (``space``), nor know where bytes lie (``segment``).

A page is stored once its header is written, which is after its payload: it then survives the death
of this process, and with ``power_safe`` a power loss too. Whoever reads it checks the hash of what
was read, and then that the header is still the one the index has.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.clock import Clock
from stratakv.core.errors import StorageError
from stratakv.storage.backend import Everything, ObjectKey, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.breaker import Breaker
from stratakv.storage.file.catalog import Catalog
from stratakv.storage.file.counters import FileStats
from stratakv.storage.file.index import NOWHERE, RowIds
from stratakv.storage.file.ledger import Ledger
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.reader import PageReader
from stratakv.storage.file.space import SpaceManager
from stratakv.storage.header import (
    HEADER,
    Headers,
    KeyWords,
    headers_of,
    is_blank,
    is_sound,
    key_words,
    seal,
)

_logger = logging.getLogger(__name__)

TICK_S: Final = 1.0
"""How often uses are written out, time to live is looked at, and peers are listened to."""


class FileStore:
    """``clock``: wall-clock seconds, since uses outlive the process and are shared by several.
    NotOursError, and nothing was written, for a directory that holds something else."""

    def __init__(
        self, directory: Path, form: StoreFormat, limits: StoreLimits, clock: Clock
    ) -> None:
        self._form, self._limits, self._clock = form, limits, clock
        self._writes = Breaker(clock)
        self._last_ns = 0
        self._ticked_s = clock.now_s()
        self._used_since: set[int] = set()
        self._closed = False
        with _as_storage_error():
            if not directory.exists():
                directory.mkdir(parents=True, exist_ok=True)
            self._ledger = Ledger(directory, limits.quota_bytes)
            self._catalog = Catalog(self._ledger, form, clock)
            self._catalog.refresh()
        self._index = self._catalog.index
        self._space = SpaceManager(self._ledger, self._catalog, form, limits, clock)
        self._slots, self._maintenance = self._space.slots, self._space.maintenance
        self._counters = self._space.counters
        self._reader = PageReader(self._catalog, self._counters)

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        with self._working():
            return self._rows_of(key_words(keys)) != NOWHERE

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        with self._working():
            rows = self._rows_of(key_words(keys))
            statuses = [ReadStatus.MISS] * len(keys)
            at = np.flatnonzero(rows != NOWHERE)
            hashes: list[int] = self._index.headers["payload_hash"][rows[at]].tolist()
            buffers = [into[i] for i in at.tolist()]
            seen = self._reader.read(rows[at], buffers)
            unchanged = self._reader.unchanged(rows[at])
            for i, digest, expected, buffer, same in zip(
                at.tolist(), seen, hashes, buffers, unchanged, strict=True
            ):
                hit = digest == expected and same
                statuses[i] = ReadStatus.HIT if hit else self._judge(int(rows[i]), digest, buffer)
            self._count_reads(statuses)
            return statuses

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        with self._working():
            self._refresh()
            wanted = headers_of(keys, self._form.spec_digest)
            now_ns = self._stamps(1)[0]
            rows = self._index.lookup(wanted)
            there = rows != NOWHERE
            self._use(rows[there][::-1])
            statuses = [
                WriteStatus.PRESENT if there[i] else WriteStatus.REFUSED for i in range(len(keys))
            ]
            fresh = _first_of_each(keys, np.flatnonzero(~there).tolist(), statuses)
            if fresh and self._writes.closed:
                for group in sorted({keys[i].group for i in fresh}):
                    of_group = [i for i in fresh if keys[i].group == group]
                    self._store(group, of_group, pages, wanted, statuses, int(now_ns))
            self._counters.add(stored=statuses.count(WriteStatus.STORED))
            self._counters.add(refused=statuses.count(WriteStatus.REFUSED))
            return statuses

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        if not self._closed:
            rows = self._index.rows_of(key_words(keys))
            self._use(rows[rows != NOWHERE])

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        """A page by its key, in the segment of another live process, is only forgotten here.
        Everything is forgotten by all who have the directory open, when next they are called; the
        disk has the room of a live process's segments back after its next call."""
        with self._working():
            if isinstance(keys, Everything):
                self._refresh()
                return self._maintenance.mark_all_deleted()
            rows = self._rows_of(key_words(keys))
            rows = np.unique(rows[rows != NOWHERE])
            with self._slots.borrowed(set(self._index.segment[rows].tolist())):
                rows = rows[self._index.present[rows]]
                ours = self._index.writable[rows] >= 0
                self._slots.clear(rows[ours])
                self._index.drop(rows[~ours])
            return len(rows)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                self._put_uses()
                self._space.close()
            except (OSError, StorageError) as error:
                _logger.warning("uses were not written: %s", error)
            self._catalog.close()
            self._ledger.close()

    def stats(self) -> FileStats:
        """Counts and sizes, at this moment."""
        return FileStats(
            pages=len(self._index),
            segments=len(self._catalog.placed),
            physical_bytes=self._ledger.physical_bytes(),
            quota_bytes=self._limits.quota_bytes,
            writing=self._writes.closed,
            growing=self._space.growing,
            damaged_headers=self._catalog.damaged_headers,
            counters=replace(self._counters),
        )

    def _rows_of(self, wanted: KeyWords) -> RowIds:
        """Rows of what may be served; a peer may have stored what is not known yet."""
        rows = self._index.rows_of(wanted)
        if (rows == NOWHERE).any():
            self._refresh()
            rows = self._index.rows_of(wanted)
        limit_ns = self._expiry_ns()
        if limit_ns is not None:
            found = np.flatnonzero(rows != NOWHERE)  # a new store's index has no last row to ask
            rows[found[self._index.used[rows[found]] < limit_ns]] = NOWHERE
        return rows

    def _expiry_ns(self) -> int | None:
        """What was last used before has expired; None: nothing ever does."""
        if self._limits.ttl_s is None:
            return None
        return max(0, int((self._clock.now_s() - self._limits.ttl_s) * 1e9))

    def _judge(self, row: int, digest: int | None, buffer: memoryview) -> ReadStatus:
        """What it means that a page did not come back as it was stored."""
        if digest is None:
            return ReadStatus.FAILED
        rows = np.array([row])
        if self._reader.unchanged(rows)[0]:
            # Its writer may have put it there again while it was read: look once more.
            again = self._reader.read(rows, [buffer])[0]
            if (
                again == self._index.headers["payload_hash"][row]
                and self._reader.unchanged(rows)[0]
            ):
                return ReadStatus.HIT
        header = np.frombuffer(self._reader.headers_on_disk(rows)[0], HEADER)
        damaged = not is_sound(header)[0] and not is_blank(header)[0]
        if not damaged and header.tobytes() != self._index.headers[rows].tobytes():
            return ReadStatus.MISS  # its writer evicted it; the next refresh sees what came instead
        try:
            self._slots.quarantine(row)
            self._counters.add(quarantined=1)
        except OSError as error:  # it is hidden here, and the next one to open it sees for itself
            self._write_failed(error)
        return ReadStatus.CORRUPT

    def _count_reads(self, statuses: list[ReadStatus]) -> None:
        self._counters.add(hits=statuses.count(ReadStatus.HIT))
        self._counters.add(misses=statuses.count(ReadStatus.MISS))
        self._counters.add(corrupt=statuses.count(ReadStatus.CORRUPT))

    def _store(
        self,
        group: int,
        wanted_at: list[int],
        pages: Sequence[memoryview],
        wanted: Headers,
        statuses: list[WriteStatus],
        now_ns: int,
    ) -> None:
        """Write the pages at ``wanted_at``, all of ``group``; sets their statuses."""
        size = self._form.page_bytes[group]
        assert all(len(pages[i]) == size for i in wanted_at), (
            f"pages of group {group}: {size} bytes"
        )
        try:
            rows = self._space.take(group, len(wanted_at), now_ns)
        except OSError as error:
            self._write_failed(error)
            statuses[wanted_at[0]] = WriteStatus.FAILED
            return
        hashes, error = self._write_pages(rows, [pages[i] for i in wanted_at])
        done = len(hashes)
        self._slots.give_back(group, rows[done:])
        if done < len(rows):
            statuses[wanted_at[done]] = WriteStatus.FAILED
        if done:
            self._publish(list(zip(wanted_at, rows, hashes, strict=False)), wanted, statuses)
        if error is not None:  # last: what was published before does not turn writes on again
            self._write_failed(error)

    def _write_pages(
        self, rows: list[int], pages: Sequence[memoryview]
    ) -> tuple[list[int], OSError | None]:
        """Write payloads up to the first error; the hashes of those that are written."""
        hashes: list[int] = []
        for placed, slots in self._catalog.by_segment(rows):
            some = pages[len(hashes) : len(hashes) + len(slots)]
            done, error = placed.segment.write_pages(slots, some)
            hashes += done
            if error is not None:
                return hashes, error
        return hashes, None

    def _publish(
        self, filled: list[tuple[int, int, int]], wanted: Headers, statuses: list[WriteStatus]
    ) -> None:
        """Write the headers of (place in the batch, row, hash), all of one group: from here on the
        pages exist."""
        places, into, hashes = zip(*filled, strict=True)
        table = wanted[list(places)] if len(places) < len(wanted) else wanted
        rows = list(into)
        table["payload_bytes"] = self._form.page_bytes[int(table["group"][0])]
        table["payload_hash"] = hashes
        # A batch comes from the head of a chain down: its deepest page is its oldest.
        table["stored_ns"] = self._stamps(len(rows))[::-1]
        try:
            self._slots.fill(rows, seal(table))
            if self._limits.power_safe:
                for number in set(self._index.segment[rows].tolist()):
                    self._catalog.placed[number].segment.sync()
        except OSError as error:
            # Whether they are there is unknown, and nobody will count on it.
            self._write_failed(error)
            for i in places:
                statuses[i] = WriteStatus.FAILED
        else:
            self._writes.worked()
            for i in places:
                statuses[i] = WriteStatus.STORED

    def _write_failed(self, error: OSError) -> None:
        _logger.warning("writes are off for a while: %s", error)
        self._counters.add(write_errors=1)
        if self._writes.closed:  # one call may meet several
            self._writes.failed()

    def _use(self, rows: RowIds) -> None:
        """Stamp rows in this order, the last one youngest."""
        if len(rows):
            self._index.used[rows] = self._stamps(len(rows))
            self._used_since.update(set(self._index.segment[rows].tolist()))

    def _stamps(self, count: int) -> npt.NDArray[np.uint64]:
        """``count`` moments, ns, each after all that were given before."""
        seen_ns = max(self._last_ns, self._index.newest_ns)  # the clock may have been set back
        first = max(seen_ns + 1, int(self._clock.now_s() * 1e9))
        self._last_ns = first + max(count, 1) - 1
        return np.arange(first, first + count, dtype=np.uint64)

    @contextmanager
    def _working(self) -> Generator[None, None, None]:
        """Around every call: what is due once a second, and errors in the caller's terms."""
        if self._closed:
            raise StorageError("the file store is closed")
        with _as_storage_error():
            if not self._ledger.is_there():
                raise StorageError(f"{self._ledger.directory} was deleted under the file store")
            due = not 0 <= self._clock.now_s() - self._ticked_s < TICK_S
            if due or not self._catalog.is_current():
                self._refresh()
            if due:
                self._ticked_s = self._clock.now_s()
                self._keep_up()
            yield

    def _keep_up(self) -> None:
        """What needs writing from time to time. A disk that takes nothing is read all the same."""
        if self._writes.closed:
            try:
                self._put_uses()
                limit_ns = self._expiry_ns()
                if limit_ns is not None:
                    self._maintenance.expire(limit_ns)
                self._maintenance.yield_to_others()
            except OSError as error:
                self._write_failed(error)

    def _refresh(self) -> None:
        """See what other processes did, and what they ask of this one."""
        self._catalog.refresh()
        self._maintenance.reap()
        if self._writes.closed:
            try:
                self._maintenance.apply_damage_reports()
            except OSError as error:
                self._write_failed(error)

    def _put_uses(self) -> None:
        for number in self._used_since & self._catalog.placed.keys():
            self._catalog.put_uses(number)
        self._used_since.clear()


@contextmanager
def _as_storage_error() -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"the file store: {error}") from error


def _first_of_each(
    keys: Sequence[ObjectKey], places: list[int], statuses: list[WriteStatus]
) -> list[int]:
    """``places`` without repeats of a key, which are PRESENT once the first is there."""
    first = {keys[i]: i for i in reversed(places)}
    for i in places:
        if first[keys[i]] != i:
            statuses[i] = WriteStatus.PRESENT
    return sorted(first.values())

"""A storage tier below the host tier of another engine, whose scheduler it must never hold up.

Owns what is under way for that engine: questions, and jobs that copy between rows of its host tier
and a store. Rows are the job's from ``store`` or ``load`` until it is reported. Must not know an
engine's classes, nor choose what is kept: the engine does.

A page that is damaged, gone or not answered for is a miss, and counted; no error of a store ever
reaches the engine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from stratakv.connect.lookups import LookupTable
from stratakv.connect.page_counts import PageCounts
from stratakv.core.clock import Clock
from stratakv.core.errors import StorageError
from stratakv.core.ids import TicketId
from stratakv.storage.backend import ObjectKey, ReadStatus, WriteStatus
from stratakv.storage.io_jobs import (
    Answer,
    Fetch,
    Fetched,
    Kind,
    Queried,
    Query,
    Removed,
    Store,
    Stored,
    Touch,
    Touched,
)
from stratakv.storage.io_worker import IoWorker

POLL_S: Final = 0.0005
CLOSE_S: Final = 30.0
"""How long what is queued may take to be written, when the engine ends."""
SERVED: Final = frozenset({WriteStatus.STORED, WriteStatus.PRESENT})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """A job that has ended. ``done``: the keys that were copied, and nothing of the others may be
    used. ``loading``: from the store."""

    job: int
    loading: bool
    whole: bool
    done: Sequence[bytes]
    took_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    number: int
    loading: bool
    keys: Sequence[bytes]
    begun_s: float


class ChunkTier:
    """``rows``: the engine's host tier, each row ``row_bytes`` of it; ``used_bytes`` of a row hold
    a page. ``name``: of the engine's key, that of the object. ``patience_s``: what the store has
    not answered by then is a miss. ``wait``: how ``drain`` does, for so many seconds at a time. For
    one owner thread."""

    def __init__(
        self,
        worker: IoWorker,
        name: Callable[[bytes], ObjectKey],
        rows: memoryview,
        page: tuple[int, int],
        clock: Clock,
        patience_s: float,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._worker = worker
        self._name = name
        self._rows = rows
        self._row_bytes, self._used_bytes = page
        self._clock = clock
        self._patience_s = patience_s
        self._wait = wait
        self._lookups = LookupTable(clock, patience_s)
        self._asked: dict[TicketId, Sequence[bytes]] = {}
        self._jobs: dict[TicketId, _Job] = {}
        self._reports: list[JobReport] = []
        self.counts = PageCounts()

    def lookup(self, key: bytes, request: str) -> bool | None:
        """Whether the store has a page; None: not known yet, ask in the next step."""
        return self._lookups.lookup(key, request)

    def end_step(self) -> None:
        """Take the store's answers and ask it what the engine's step has asked, all at once."""
        self._take_answers()
        self.counts.add("late", self._lookups.give_up_late())
        self._stop_late_loads()
        keys = self._lookups.take_unasked()
        if keys:
            self.counts.add("asked", len(keys))
            ticket = self._worker.submit(Query([self._name(key) for key in keys]))
            if ticket is None:
                self.counts.add("dropped", len(keys))
                self._lookups.answer(keys, [False] * len(keys))
            else:
                self._asked[ticket] = keys

    def store(self, job: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Copy rows to the store, the head of each chain first."""
        pages = self._pages(rows)
        self._submit(self._job(job, keys, loading=False), Store(self._names(keys), pages))

    def load(self, job: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Copy pages of the store to rows."""
        pages = self._pages(rows)
        self._submit(self._job(job, keys, loading=True), Fetch(self._names(keys), pages))

    def take_reports(self) -> Sequence[JobReport]:
        """Jobs that have ended since the last call."""
        self._take_answers()
        reports, self._reports = self._reports, []
        return reports

    @property
    def busy(self) -> bool:
        """Whether a job is under way, or has ended and is not reported."""
        return bool(self._jobs or self._reports)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Pages of a chain, its head first, are of use to somebody."""
        self._worker.submit(Touch(self._names(keys)[::-1]))

    def release(self, request: str) -> None:
        """A request has ended."""
        self._lookups.release(request)

    def drain(self) -> None:
        """Begin nothing more, and return once no job touches a row. Waits as long as the store
        takes over what it has begun."""
        for ticket in self._jobs:
            self._worker.cancel(ticket)
        while self._jobs:
            self._wait(POLL_S)
            self._take_answers()

    def rename(self, name: Callable[[bytes], ObjectKey]) -> None:
        """Pages have other names from now on: nothing that was stored before is of use."""
        assert not self._jobs, "pages are renamed while jobs are under way"
        self._name = name
        self._lookups.forget()

    def close(self) -> None:
        """Write what is queued, for ``CLOSE_S`` at most, and let go of the rows.

        StorageError where the store has not come back: it may still touch them.
        """
        if not self._worker.close(CLOSE_S):
            raise StorageError(
                "the store has not come back; rows of the host tier are in its hands"
            )
        self._take_answers()
        self._rows.release()

    @property
    def off(self) -> bool:
        """Whether the store has failed lately and is left alone for now."""
        stats = self._worker.stats
        return stats.reading_off or stats.writing_off

    def _job(self, number: int, keys: Sequence[bytes], *, loading: bool) -> _Job:
        return _Job(number, loading, keys, self._clock.now_s())

    def _names(self, keys: Sequence[bytes]) -> list[ObjectKey]:
        return [self._name(key) for key in keys]

    def _pages(self, rows: Sequence[int]) -> list[memoryview]:
        starts = [row * self._row_bytes for row in rows]
        return [self._rows[start : start + self._used_bytes] for start in starts]

    def _submit(self, job: _Job, work: Fetch | Store) -> None:
        ticket = self._worker.submit(work)
        if ticket is None:
            self.counts.add("dropped", len(job.keys))
            if job.loading:
                self._lookups.mark_missing(job.keys)
            self._report(job, [])
        else:
            self._jobs[ticket] = job

    def _stop_late_loads(self) -> None:
        """A request waits for them: what has not begun by now is a miss."""
        oldest_s = self._clock.now_s() - self._patience_s
        for ticket, job in self._jobs.items():
            if job.loading and job.begun_s <= oldest_s:
                self._worker.cancel(ticket)

    def _take_answers(self) -> None:
        for kind in Kind:
            for answer in self._worker.take(kind, self._worker.ready(kind)):
                self._settle(answer)

    def _settle(self, answer: Answer) -> None:
        match answer:
            case Queried():
                keys = self._asked.pop(answer.ticket)
                self.counts.add("present", int(answer.present.sum()))
                self._lookups.answer(keys, answer.present.tolist())
            case Fetched():
                self._settle_load(self._jobs.pop(answer.ticket), answer)
            case Stored():
                self._settle_store(self._jobs.pop(answer.ticket), answer)
            case Touched() | Removed():
                pass
            case _:
                assert_never(answer)

    def _settle_load(self, job: _Job, answer: Fetched) -> None:
        hit = [status is ReadStatus.HIT for status in answer.statuses]
        done = [key for key, there in zip(job.keys, hit, strict=False) if there]
        self.counts.add_reads(answer.statuses, len(job.keys))
        if len(done) < len(job.keys):
            kept = set(done)
            self._lookups.mark_missing([key for key in job.keys if key not in kept])
        if done:
            self.touch(done)
        self._report(job, done)

    def _settle_store(self, job: _Job, answer: Stored) -> None:
        served = [status in SERVED for status in answer.statuses]
        self.counts.add_writes(answer.statuses, len(job.keys))
        done = [key for key, there in zip(job.keys, served, strict=False) if there]
        self._lookups.mark_present(done)
        self._report(job, done)

    def _report(self, job: _Job, done: Sequence[bytes]) -> None:
        took_s = self._clock.now_s() - job.begun_s
        whole = len(done) == len(job.keys)
        self._reports.append(
            JobReport(job=job.number, loading=job.loading, whole=whole, done=done, took_s=took_s)
        )

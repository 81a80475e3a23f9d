"""A storage tier below the host tier of another engine, whose scheduler it must never hold up.

Owns what is under way for that engine: questions, and jobs that copy between rows of its host tier
and a store. Rows are the job's from ``store`` or ``load`` until it is reported. Must not know an
engine's classes, nor choose what is kept: the engine does.

A page that is damaged, gone or not answered for is a miss, and counted; no error of a store ever
reaches the engine. Rows are lent to the store, and taken back from one that hangs (``lent_rows``).
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

import numpy as np

from stratakv.connect.lent_rows import Loan
from stratakv.connect.lookups import LookupTable
from stratakv.connect.page_counts import PageCounts, PageEvent
from stratakv.core.clock import Clock
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

log = logging.getLogger(__name__)

POLL_S: Final = 0.0005
CLOSE_S: Final = 30.0
"""How long what is queued may take to be written when the engine ends, and after that once more
what has begun."""
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
    loan: Loan
    begun_s: float


class ChunkTier:
    """``worker``: over ends that are ``staged``. ``rows``: the engine's host tier, each row
    ``row_bytes`` of it; ``used_bytes`` of a row hold a page. ``name``: of the engine's key, that of
    the object. ``patience_s``: what the store has not answered by then is a miss, and a store of
    which nothing was written for as long gets nothing more. ``wait``: how ``drain`` does, for so
    many seconds at a time. For one owner thread."""

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
        row_bytes, used_bytes = page
        count = len(rows) // row_bytes
        self._rows = np.frombuffer(rows, np.uint8, count * row_bytes).reshape(count, row_bytes)
        self._rows = self._rows[:, :used_bytes]
        self._clock = clock
        self._patience_s = patience_s
        self._wait = wait
        self._lookups = LookupTable(clock, patience_s)
        self._asked: dict[TicketId, tuple[float, Sequence[bytes]]] = {}
        self._jobs: dict[TicketId, _Job] = {}
        self._late: dict[TicketId, _Job] = {}
        """Reported, and still in the store's hands."""
        self._writing: tuple[TicketId, int] | None = None
        """The first job that is being stored, and how many of its pages were tried."""
        self._written_s = clock.now_s()
        self._reports: list[JobReport] = []
        self.counts = PageCounts()

    def lookup(self, key: bytes, request: str) -> bool | None:
        """Whether the store has a page; None: not known yet, ask in the next step."""
        return self._lookups.lookup(key, request)

    def end_step(self) -> None:
        """Take the store's answers and ask it what the engine's step has asked, all at once."""
        self._take_answers()
        self.counts.add("late", self._lookups.give_up_late())
        self._give_up_late_loads()
        self._give_up_stuck_stores()
        keys = self._lookups.take_unasked()
        if not keys:
            return
        if self._reading_stuck:
            self._answer_no(keys, "late")
            return
        self.counts.add("asked", len(keys))
        ticket = self._worker.submit(Query([self._name(key) for key in keys]))
        if ticket is None:
            self._answer_no(keys, "dropped")
        else:
            self._asked[ticket] = self._clock.now_s(), keys

    def store(self, job: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Copy rows to the store, the head of each chain first."""
        made = self._job(job, keys, rows, loading=False)
        if self._writing_stuck:
            self.counts.add("unwritten", len(keys))
            self._report(made, [])
        else:
            self._submit(made, Store(self._names(keys), made.loan.pages))

    def load(self, job: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Copy pages of the store to rows."""
        made = self._job(job, keys, rows, loading=True)
        if self._reading_stuck:
            self._miss(made, [])
        else:
            self._submit(made, Fetch(self._names(keys), made.loan.pages))

    def take_reports(self) -> Sequence[JobReport]:
        """Jobs that have ended since the last call."""
        self._take_answers()
        reports, self._reports = self._reports, []
        return reports

    @property
    def busy(self) -> bool:
        """Whether a job is under way, or has ended and is not reported."""
        return bool(self._jobs or self._reports)

    @property
    def awaited(self) -> bool:
        """Whether a request waits for the store."""
        return bool(self._asked) or any(job.loading for job in self._jobs.values())

    def touch(self, keys: Sequence[bytes]) -> None:
        """Pages of a chain, its head first, are of use to somebody."""
        self._worker.submit(Touch(self._names(keys)[::-1]))

    def release(self, request: str) -> None:
        """A request has ended."""
        self._lookups.release(request)

    def drain(self) -> None:
        """Begin nothing more, and return once no job touches a row: after ``patience_s`` those of
        a store that hangs are taken back."""
        for ticket in self._jobs:
            self._worker.cancel(ticket)
        latest_s = self._clock.now_s() + self._patience_s
        while self._jobs and self._clock.now_s() < latest_s:
            self._wait(POLL_S)
            self._take_answers()
        self._give_up([*self._jobs])

    def rename(self, name: Callable[[bytes], ObjectKey]) -> None:
        """Pages have other names from now on: nothing that was stored before is of use."""
        assert not self._jobs, "pages are renamed while jobs are under way"
        self._name = name
        self._lookups.forget()

    def close(self) -> None:
        """Write what is queued, for ``CLOSE_S`` and as long again at most, and let go of the rows,
        also where the store has not come back."""
        ended = self._worker.close(CLOSE_S)
        self._take_answers()
        self._give_up([*self._jobs])
        self._rows = np.empty((0, 0), np.uint8)
        if not ended:
            log.warning("the store has not come back: its thread is left behind")

    @property
    def off(self) -> bool:
        """Whether the store has failed or hung lately and is left alone for now."""
        stats = self._worker.stats
        stuck = self._reading_stuck or self._writing_stuck
        return stats.reading_off or stats.writing_off or stuck

    @property
    def _reading_stuck(self) -> bool:
        """Whether the store owes an answer that nobody waits for any more: then it is asked for
        nothing, since whoever asked would wait as long."""
        first_s, _ = next(iter(self._asked.values()), (math.inf, ()))
        owes = first_s <= self._clock.now_s() - self._patience_s
        return owes or any(job.loading for job in self._late.values())

    @property
    def _writing_stuck(self) -> bool:
        return any(not job.loading for job in self._late.values())

    def _job(
        self, number: int, keys: Sequence[bytes], rows: Sequence[int], *, loading: bool
    ) -> _Job:
        return _Job(number, loading, keys, Loan(self._rows, rows), self._clock.now_s())

    def _names(self, keys: Sequence[bytes]) -> list[ObjectKey]:
        return [self._name(key) for key in keys]

    def _submit(self, job: _Job, work: Fetch | Store) -> None:
        ticket = self._worker.submit(work)
        if ticket is None:
            self.counts.add("dropped", len(job.keys))
            if job.loading:
                self._lookups.mark_missing(job.keys)
            self._report(job, [])
        else:
            self._jobs[ticket] = job

    def _answer_no(self, keys: Sequence[bytes], event: PageEvent) -> None:
        self.counts.add(event, len(keys))
        self._lookups.answer(keys, [False] * len(keys))

    def _give_up_late_loads(self) -> None:
        """A request waits for them."""
        oldest_s = self._clock.now_s() - self._patience_s
        self._give_up(
            [at for at, job in self._jobs.items() if job.loading and job.begun_s <= oldest_s]
        )

    def _give_up_stuck_stores(self) -> None:
        """However much is queued, something is written now and then: else the engine could never
        use their rows again."""
        storing = [at for at, job in self._jobs.items() if not job.loading]
        writing = (storing[0], self._worker.progress(storing[0])) if storing else None
        now_s = self._clock.now_s()
        if writing != self._writing or writing is None:
            self._writing, self._written_s = writing, now_s
        elif self._written_s <= now_s - self._patience_s:
            self._give_up(storing)

    def _give_up(self, tickets: Sequence[TicketId]) -> None:
        """Report jobs now, with what was done by now; their rows are the engine's."""
        for ticket in tickets:
            self._worker.cancel(ticket)
            job = self._late[ticket] = self._jobs.pop(ticket)
            filled = job.loan.take_back()
            if job.loading:
                self._miss(job, [job.keys[at] for at in filled])
            else:
                self.counts.add("unwritten", len(job.keys))
                self._report(job, [])

    def _miss(self, job: _Job, done: Sequence[bytes]) -> None:
        """A load that has come too late but for ``done``."""
        self.counts.add("loaded", len(done))
        self.counts.add("late", len(job.keys) - len(done))
        self._end_load(job, done)

    def _take_answers(self) -> None:
        for kind in Kind:
            for answer in self._worker.take(kind, self._worker.ready(kind)):
                self._settle(answer)

    def _settle(self, answer: Answer) -> None:
        if self._late.pop(answer.ticket, None) is not None:
            return
        match answer:
            case Queried():
                _, keys = self._asked.pop(answer.ticket)
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
        self._end_load(job, done)

    def _end_load(self, job: _Job, done: Sequence[bytes]) -> None:
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

"""The I/O worker for a long time, over a file store that is too small and fails now and then."""

import gc
import logging
import os
import random
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from stratakv.core.clock import ManualClock, WallClock
from stratakv.storage.backend import Everything, ReadStatus, StoreFormat
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore
from stratakv.storage.io_jobs import Ending, Fetch, Kind, Query, Remove, Store, Touch
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.testing.storage_faults import Faults, FaultyBackend
from tests.io_gate import keys_of

PAGE = 3000
FORM = StoreFormat(spec_digest=b"soak soak soak !", page_bytes=(PAGE,))
JOBS, ROUNDS = 200_000, 10
GROWTH_BYTES = 4 << 20
FAULTS = Faults(
    call_fails=0.002,
    call_breaks=0.002,
    read_misses=0.02,
    read_corrupt=0.01,
    read_fails=0.01,
    write_refused=0.01,
    write_fails=0.01,
    write_lost=0.01,
    contains_lies=0.01,
)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def content(key) -> bytes:
    return key.page[-4:] * (PAGE // 4)


class Load:
    """Jobs at random, and a look at every answer. Each fetch has buffers of its own, so that a job
    that is kept shows as memory."""

    def __init__(self, directory, seed):
        self.rng = random.Random(seed)
        keeping = StoreLimits(quota_bytes=4 << 20)
        stores = (FileStore(directory, FORM, keeping, WallClock()) for _ in range(2))
        faulty = [FaultyBackend(store, FAULTS) for store in stores]
        self.clock = ManualClock()
        limits = IoLimits(queue_pages=256, batch_pages=5)
        self.worker = IoWorker(Backends(*faulty), FORM, limits, self.clock)
        self.jobs, self.seen = {}, Counter()

    def job(self):
        keys = keys_of(self.rng.randint(1, 4), self.rng.randint(0, 3000))
        draw = self.rng.random()
        if draw < 0.4:
            return Store(keys, [memoryview(content(key)) for key in keys])
        if draw < 0.7:
            return Fetch(keys, [memoryview(bytearray(PAGE)) for _ in keys])
        if draw < 0.85:
            return Query(keys)
        if draw < 0.95:
            return Touch(keys)
        return Remove(keys if draw < 0.9999 else Everything.EVERYTHING)

    def submit(self):
        job = self.job()
        wait_until(lambda: self.offer(job), "room in the queue")
        ticket = max(self.jobs)
        if self.rng.random() < 0.02:
            self.worker.cancel(ticket)
        self.clock.advance(0.05)

    def offer(self, job):
        """Whether the queue had room for it."""
        self.take()
        ticket = self.worker.submit(job)
        if ticket is not None:
            self.jobs[ticket] = job
        return ticket is not None

    def take(self):
        for kind in Kind:
            for answered in self.worker.take(kind, self.worker.ready(kind)):
                self.look(self.jobs.pop(answered.ticket), answered)

    def look(self, job, answered):
        self.seen[answered.ending] += 1
        if isinstance(job, Fetch):
            self.seen.update(answered.statuses)
            for key, page, status in zip(job.keys, job.into, answered.statuses, strict=False):
                assert status is not ReadStatus.HIT or page == content(key)

    def close(self):
        assert self.worker.close(PATIENCE_S)
        self.take()
        assert not self.jobs


@pytest.mark.long
def test_200_000_jobs_leave_memory_files_and_threads_as_they_were(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)  # pytest keeps what is logged
    threads, files = threading.active_count(), open_files()
    seen, resident = Counter(), []
    for turn in range(ROUNDS):
        load = Load(tmp_path / "store", turn)
        try:
            for _ in range(JOBS // ROUNDS):
                load.submit()
            within = (threading.active_count() - threads, open_files() - files)
            load.close()
        finally:
            with suppress(AssertionError):
                load.worker.close(PATIENCE_S)
        seen += load.seen
        del load
        assert within[0] == 2
        assert within[1] <= 2 * 64  # a file for each segment that the quota has room for
        assert (threading.active_count(), open_files()) == (threads, files)
        resident.append(resident_bytes())
    assert sum(seen[ending] for ending in Ending) == JOBS
    assert min(seen[ending] for ending in Ending) > 100
    assert min(seen[status] for status in ReadStatus) > 100
    # What a first round allocates is kept for the next ones.
    assert max(resident[3:]) - min(resident[:3]) < GROWTH_BYTES, resident

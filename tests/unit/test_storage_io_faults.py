"""The I/O worker: what a failing store costs, and how it all ends."""

import random
import threading
from collections import Counter, deque

import numpy as np
import pytest

from stratakv.core.clock import ManualClock
from stratakv.core.errors import StorageError
from stratakv.storage.backend import Everything, ReadStatus, WriteStatus
from stratakv.storage.io_jobs import (
    Ending,
    Fetch,
    Fetched,
    Kind,
    Queried,
    Query,
    Remove,
    Removed,
    Store,
    Stored,
    Touch,
    Touched,
    kind_of,
)
from stratakv.storage.io_lane import IoLane
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker, thread_for
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.io_gate import (
    FORM,
    PAGE,
    Gate,
    Workers,
    answer,
    buffers,
    keys_of,
    stored,
)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def made(clock):
    workers = Workers(clock)
    yield workers
    workers.close()


# -- a store that fails --------------------------------------------------------------------------


def test_a_failure_ends_the_job_and_says_what_was_done(made):
    gate = Gate("read")
    worker = made(gate, batch_pages=2)
    stored(worker, 4)
    worker.submit(Fetch(keys_of(4), buffers(4)))
    gate.wait_entered()
    gate.let("read")
    gate.wait_entered()
    gate.failing["read"] = StorageError("the link is down")
    gate.let("read")
    fetched = answer(worker, Kind.FETCH)
    assert fetched.ending is Ending.FAILED
    assert fetched.statuses == [ReadStatus.HIT] * 2
    assert worker.stats.failed[Kind.FETCH] == 2


def failing(clock, made, verb="contains"):
    gate = Gate()
    gate.failing[verb] = StorageError("the link is down")
    return gate, made(gate)


def ending_of_a_query(worker):
    worker.submit(Query(keys_of(1)))
    return answer(worker, Kind.QUERY).ending


def test_after_a_failure_jobs_end_at_once_until_a_probe_succeeds(made, clock):
    gate, worker = failing(clock, made)
    assert ending_of_a_query(worker) is Ending.FAILED
    assert worker.stats.reading_off
    assert [ending_of_a_query(worker) for _ in range(3)] == [Ending.OFF] * 3
    assert gate.calls == [("contains", 1)]
    gate.failing.clear()
    assert ending_of_a_query(worker) is Ending.OFF  # it is not asked before its time
    clock.advance(1.0)
    assert ending_of_a_query(worker) is Ending.DONE
    assert not worker.stats.reading_off
    assert worker.stats.failed[Kind.QUERY] == 5


def test_back_off_doubles_and_starts_again_after_a_success(made, clock):
    gate, worker = failing(clock, made)
    for wait_s in (1, 2, 4, 8, 16, 32, 64, 64):
        assert ending_of_a_query(worker) is Ending.FAILED
        clock.advance(wait_s - 0.125)
        assert ending_of_a_query(worker) is Ending.OFF
        clock.advance(0.125)
    gate.failing.clear()
    assert ending_of_a_query(worker) is Ending.DONE
    gate.failing["contains"] = StorageError("again")
    assert ending_of_a_query(worker) is Ending.FAILED
    clock.advance(1.0)
    assert ending_of_a_query(worker) is Ending.FAILED
    assert worker.stats.trips == 10


def test_a_verb_that_works_does_not_end_the_back_off_of_one_that_fails(made, clock):
    gate, worker = failing(clock, made, "read")

    def ending_of_a_fetch():
        worker.submit(Fetch(keys_of(1), buffers(1)))
        return answer(worker, Kind.FETCH).ending

    assert ending_of_a_fetch() is Ending.FAILED
    clock.advance(1.0)
    assert ending_of_a_query(worker) is Ending.DONE
    assert ending_of_a_fetch() is Ending.FAILED
    clock.advance(1.0)
    assert ending_of_a_fetch() is Ending.OFF  # two seconds by now
    assert gate.calls == [("read", 1), ("contains", 1), ("read", 1)]


def test_a_disk_that_takes_no_writes_can_still_be_read(made, clock):
    writing = Gate()
    writing.failing["write"] = StorageError("no space left")
    worker = made(Gate(), writing)
    assert stored(worker, 1).ending is Ending.FAILED
    assert ending_of_a_query(worker) is Ending.DONE
    assert worker.stats.writing_off
    assert not worker.stats.reading_off


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError(5, "io"), AssertionError("theirs")])
def test_whatever_a_backend_raises_is_a_failure_and_the_thread_lives(made, clock, error):
    gate = Gate()
    gate.failing["contains"] = error
    worker = made(gate)
    assert ending_of_a_query(worker) is Ending.FAILED
    gate.failing.clear()
    clock.advance(1.0)
    assert ending_of_a_query(worker) is Ending.DONE


def test_a_backend_that_does_not_answer_for_every_key_has_failed(made):
    class Short(Gate):
        def contains(self, keys):
            return np.ones(len(keys) - 1, np.bool_)

    worker = made(Short())
    worker.submit(Query(keys_of(3)))
    queried = answer(worker, Kind.QUERY)
    assert queried.ending is Ending.FAILED
    assert not queried.present.any()


def test_a_read_that_does_not_answer_for_every_key_has_failed(made):
    class Short(Gate):
        def read(self, keys, into):
            return super().read(keys, into)[1:]

    worker = made(Short())
    stored(worker, 3)
    worker.submit(Fetch(keys_of(3), buffers(3)))
    fetched = answer(worker, Kind.FETCH)
    assert fetched.ending is Ending.FAILED
    assert fetched.statuses == []


def test_to_remove_everything_fails_as_one_page(made):
    gate = Gate()
    gate.failing["remove"] = StorageError("the link is down")
    worker = made(gate)
    worker.submit(Remove(Everything.EVERYTHING))
    assert answer(worker, Kind.REMOVE).ending is Ending.FAILED
    assert worker.stats.failed[Kind.REMOVE] == 1


def test_a_dead_thread_is_loud(made, clock):
    class Fatal(Gate):
        def contains(self, keys):
            raise SystemExit

    hands = []

    def hand_for(lane, name):
        hands.append(thread_for(lane, name))
        return hands[-1]

    worker = IoWorker(Backends(gate := Fatal(), gate), FORM, IoLimits(), clock, hand_for)
    worker.submit(Query(keys_of(1)))
    hands[0].join(PATIENCE_S)
    for call in (lambda: worker.ready(Kind.QUERY), lambda: worker.submit(Query(()))):
        with pytest.raises(AssertionError, match="storage tier failed"):
            call()


# -- the end -------------------------------------------------------------------------------------


def test_close_finishes_writes_and_cancels_reads(made, monkeypatch):
    reading, writing = Gate("read"), Gate("write")
    close = IoLane.close

    def closing(lane, cancelled):
        close(lane, cancelled)
        reading.let("read")
        writing.let("write", 3)

    worker = made(reading, writing, batch_pages=1)
    worker.submit(Store(keys_of(3), buffers(3)))
    worker.submit(Fetch(keys_of(3), buffers(3)))
    reading.wait_entered()
    monkeypatch.setattr(IoLane, "close", closing)  # nobody goes on before that
    assert worker.close(PATIENCE_S)
    assert answer(worker, Kind.STORE).statuses == [WriteStatus.STORED] * 3
    fetched = answer(worker, Kind.FETCH)
    assert (fetched.ending, len(fetched.statuses)) == (Ending.CANCELLED, 1)
    assert reading.closed
    assert writing.closed
    assert not any(thread.is_alive() for thread in reading.threads | writing.threads)


def test_close_cancels_writes_that_take_too_long(made):
    gate = Gate("write")
    worker = made(gate, batch_pages=1)
    worker.submit(Store(keys_of(100), buffers(100)))
    gate.wait_entered()
    assert not worker.close(0.06)
    gate.let("write")
    assert worker.close(PATIENCE_S)
    ended = answer(worker, Kind.STORE)
    assert (ended.ending, len(ended.statuses)) == (Ending.CANCELLED, 1)


def test_close_gives_up_on_a_backend_that_hangs_and_leaves_it_its_buffers(made):
    gate = Gate("read")
    worker = made(gate)
    worker.submit(Fetch(keys_of(1), buffers(1)))
    gate.wait_entered()
    assert not worker.close(0.02)
    assert not gate.closed
    assert worker.ready(Kind.FETCH) == 0
    gate.let("read")
    assert worker.close(PATIENCE_S)
    assert gate.closed
    assert worker.ready(Kind.FETCH) == 1


def test_nothing_can_be_submitted_after_close(made):
    worker = made(Gate())
    assert worker.close(PATIENCE_S)
    with pytest.raises(AssertionError, match="after close"):
        worker.submit(Query(keys_of(1)))


def test_a_backend_that_cannot_be_closed_is_only_logged(made, caplog):
    class Stuck(Gate):
        def close(self):
            raise StorageError("cannot flush")

    assert made(Stuck()).close(PATIENCE_S)
    assert "cannot flush" in caplog.text


def test_many_jobs_leave_no_threads_and_no_tasks(made):
    before = {*threading.enumerate()}  # others may end meanwhile
    worker = made(Gate(), Gate())
    for i in range(500):
        worker.submit(Store(keys_of(2, i), buffers(2)))
        worker.submit(Query(keys_of(3, i)))
        worker.submit(Touch(keys_of(1, i)))
        for kind in (Kind.STORE, Kind.QUERY, Kind.TOUCH):
            worker.take(kind, worker.ready(kind))
    assert worker.close(PATIENCE_S)
    for kind in Kind:
        worker.take(kind, worker.ready(kind))
    assert worker.idle
    assert set(worker.stats.queued.values()) == {0}
    assert {*threading.enumerate()} <= before


class Moody(MemoryBackend):
    """Fails at random, in every way that a backend may."""

    def __init__(self, rng):
        super().__init__(FORM)
        self._rng = rng

    def _mood(self):
        if self._rng.random() < 0.1:
            raise self._rng.choice((StorageError("no"), OSError(5, "io"), ValueError("bug")))

    def contains(self, keys):
        self._mood()
        return super().contains(keys)

    def read(self, keys, into):
        self._mood()
        return super().read(keys, into)

    def write(self, keys, pages):
        self._mood()
        return super().write(keys, pages)

    def remove(self, keys):
        self._mood()
        return super().remove(keys)


def random_job(rng):
    keys = keys_of(rng.randint(0, 9), rng.randint(0, 20))
    match rng.choice(list(Kind)):
        case Kind.QUERY:
            return Query(keys)
        case Kind.FETCH:
            return Fetch(keys, buffers(len(keys)))
        case Kind.STORE:
            return Store(keys, buffers(len(keys), fill=5))
        case Kind.TOUCH:
            return Touch(keys)
        case Kind.REMOVE:
            return Remove(keys if rng.random() < 0.9 else Everything.EVERYTHING)


def check_answer(job, answered):
    """Whole where it says DONE, and no byte of another page in a buffer that hit."""
    match answered:
        case Fetched(_, ending, statuses):
            hit = [job.into[i] for i, s in enumerate(statuses) if s is ReadStatus.HIT]
            assert all(bytes(page) == b"\5" * PAGE for page in hit)
        case Stored(_, ending, statuses):
            pass
        case Queried(_, ending, present):
            statuses = present if ending is Ending.DONE else ()
        case Touched() | Removed():
            return
    assert len(statuses) <= len(job.keys)
    assert ending is not Ending.DONE or len(statuses) == len(job.keys)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_every_job_is_answered_once_and_in_order(clock, seed):
    rng = random.Random(seed)
    reading = Moody(random.Random(seed + 100))
    writing = reading if seed % 2 else Moody(random.Random(seed + 200))
    limits = IoLimits(queue_pages=40, batch_pages=3)
    worker = IoWorker(Backends(reading, writing), FORM, limits, clock)
    jobs, waiting = {}, {kind: deque() for kind in Kind}
    endings = Counter()

    def take():
        for kind in Kind:
            for answered in worker.take(kind, worker.ready(kind)):
                assert answered.ticket == waiting[kind].popleft()
                check_answer(jobs.pop(answered.ticket), answered)
                endings[answered.ending] += 1

    for _ in range(600):
        job = random_job(rng)
        ticket = worker.submit(job)
        if ticket is not None:
            jobs[ticket] = job
            waiting[kind_of(job)].append(ticket)
        if jobs and rng.random() < 0.1:
            worker.cancel(rng.choice(list(jobs)))
        if rng.random() < 0.3:
            clock.advance(rng.choice((0.5, 5, 50)))
        if rng.random() < 0.3:
            wait_until(lambda: not jobs or any(map(worker.ready, Kind)), "an answer")
            take()
    assert worker.close(PATIENCE_S)
    take()
    assert not jobs
    assert set(worker.stats.queued.values()) == {0}
    assert min(endings[ending] for ending in (Ending.DONE, Ending.FAILED, Ending.OFF)) > 0

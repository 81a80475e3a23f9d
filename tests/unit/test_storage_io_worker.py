"""The I/O worker: what its jobs do, who owns a buffer, what waits for what, full queues."""

from contextlib import suppress

import pytest

from stratakv.core.clock import ManualClock
from stratakv.storage.backend import Everything, ReadStatus, WriteStatus
from stratakv.storage.io_jobs import Ending, Fetch, Kind, Query, Remove, Store, Touch
from stratakv.testing.patience import wait_until
from tests.io_gate import (
    PAGE,
    Gate,
    Workers,
    answer,
    answers,
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


# -- what jobs do --------------------------------------------------------------------------------


def test_what_was_stored_is_found_read_and_removed(made):
    worker = made(Gate())
    assert stored(worker, 3).statuses == [WriteStatus.STORED] * 3
    worker.submit(Query(keys_of(4)))
    assert answer(worker, Kind.QUERY).present.tolist() == [True, True, True, False]
    into = buffers(4)
    ticket = worker.submit(Fetch(keys_of(4), into))
    fetched = answer(worker, Kind.FETCH)
    assert fetched.ticket == ticket
    assert fetched.ending is Ending.DONE
    assert fetched.statuses == [ReadStatus.HIT] * 3 + [ReadStatus.MISS]
    assert [bytes(page) for page in into] == [b"\7" * PAGE] * 3 + [bytes(PAGE)]
    worker.submit(Remove(keys_of(4)))
    assert answer(worker, Kind.REMOVE).removed == 3


def test_to_remove_everything_is_one_page_and_one_batch(made):
    gate = Gate("remove")
    worker = made(gate, queue_pages=5, batch_pages=2)
    stored(worker, 5)
    assert worker.submit(Remove(Everything.EVERYTHING)) is not None
    gate.wait_entered()
    assert worker.stats.queued[Kind.REMOVE] == 1
    gate.let("remove")
    removed = answer(worker, Kind.REMOVE)
    assert (removed.ending, removed.removed) == (Ending.DONE, 5)
    assert [call for call in gate.calls if call[0] == "remove"] == [("remove", 1)]


def test_to_remove_everything_waits_for_the_writes_before_it_and_can_be_cancelled(made):
    gate = Gate("write")
    worker = made(gate)
    worker.submit(Store(keys_of(3), buffers(3)))
    gate.wait_entered()
    first = worker.submit(Remove(Everything.EVERYTHING))
    second = worker.submit(Remove(Everything.EVERYTHING))
    worker.cancel(second)
    gate.let("write")
    done, cancelled = answers(worker, Kind.REMOVE, 2)
    assert (done.ticket, done.ending, done.removed) == (first, Ending.DONE, 3)
    assert (cancelled.ending, cancelled.removed) == (Ending.CANCELLED, 0)


def test_a_corrupt_page_is_one_status_and_not_a_failure(made):
    gate = Gate()
    worker = made(gate)
    stored(worker, 2)
    gate.damage(keys_of(1)[0], 3)
    worker.submit(Fetch(keys_of(2), buffers(2)))
    fetched = answer(worker, Kind.FETCH)
    assert fetched.statuses == [ReadStatus.CORRUPT, ReadStatus.HIT]
    assert fetched.ending is Ending.DONE
    assert worker.stats.trips == 0


def test_a_touch_changes_the_order_of_eviction(made):
    worker = made(Gate(quota_bytes=2 * PAGE))
    stored(worker, 1, first=0)
    stored(worker, 1, first=1)
    worker.submit(Touch(keys_of(1, 0)))
    assert answer(worker, Kind.TOUCH).ending is Ending.DONE
    stored(worker, 1, first=2)
    worker.submit(Query(keys_of(3)))
    assert answer(worker, Kind.QUERY).present.tolist() == [True, False, True]


def test_a_job_without_a_key_is_answered_too(made):
    gate = Gate()
    worker = made(gate)
    for job, kind in (
        (Query(()), Kind.QUERY),
        (Fetch((), ()), Kind.FETCH),
        (Touch(()), Kind.TOUCH),
    ):
        worker.submit(job)
        assert answer(worker, kind).ending is Ending.DONE
    assert not gate.calls


# -- batches, order, lanes -----------------------------------------------------------------------


def test_batches_are_bounded_in_pages(made):
    gate = Gate()
    worker = made(gate, batch_pages=4)
    worker.submit(Query(keys_of(10)))
    answer(worker, Kind.QUERY)
    assert gate.calls == [("contains", 4), ("contains", 4), ("contains", 2)]


def test_batches_that_move_bytes_are_bounded_in_bytes_but_never_empty(made):
    gate = Gate()
    worker = made(gate, batch_bytes=5 * PAGE)
    big = keys_of(2, group=1)  # four times PAGE each
    worker.submit(Fetch((*keys_of(2), *big, *keys_of(1)), (*buffers(2), *buffers(3))))
    answer(worker, Kind.FETCH)
    assert gate.calls == [("read", 2), ("read", 1), ("read", 2)]
    gate.calls.clear()
    tight = made(gate := Gate(), batch_bytes=1)
    tight.submit(Fetch(keys_of(2), buffers(2)))
    answer(tight, Kind.FETCH)
    assert gate.calls == [("read", 1), ("read", 1)]


def test_every_batch_has_its_own_buffers(made):
    worker = made(Gate(), batch_pages=2)
    pages = tuple(memoryview(bytes([i] * PAGE)) for i in range(5))
    worker.submit(Store(keys_of(5), pages))
    assert len(answer(worker, Kind.STORE).statuses) == 5
    into = buffers(5, fill=99)
    worker.submit(Fetch(keys_of(5), into))
    assert answer(worker, Kind.FETCH).statuses == [ReadStatus.HIT] * 5
    assert into == pages


def test_progress_is_seen_while_a_job_runs(made):
    gate = Gate("read")
    worker = made(gate, batch_pages=2)
    ticket = worker.submit(Fetch(keys_of(6), buffers(6)))
    for done in (0, 2, 4):
        gate.wait_entered()
        assert worker.progress(ticket) == done
        gate.let("read")
    assert len(answer(worker, Kind.FETCH).statuses) == 6


def test_answers_of_a_kind_come_in_order(made):
    worker = made(Gate(), Gate())
    tickets = [worker.submit(Query(keys_of(i % 3))) for i in range(50)]
    assert [a.ticket for a in answers(worker, Kind.QUERY, 50)] == tickets


@pytest.mark.parametrize("job", [Query(keys_of(1)), Fetch(keys_of(1), buffers(1))])
def test_a_read_does_not_wait_behind_a_write(made, job):
    writing = Gate("write")
    worker = made(Gate(), writing)
    worker.submit(Store(keys_of(1), buffers(1)))
    writing.wait_entered()
    kind = Kind.QUERY if isinstance(job, Query) else Kind.FETCH
    worker.submit(job)
    assert answer(worker, kind).ending is Ending.DONE
    assert worker.ready(Kind.STORE) == 0


def test_a_query_waits_for_one_batch_of_a_fetch(made):
    gate = Gate("read")
    worker = made(gate, batch_pages=1)
    worker.submit(Fetch(keys_of(9), buffers(9)))
    gate.wait_entered()
    worker.submit(Query(keys_of(1)))
    gate.let("read")
    answer(worker, Kind.QUERY)
    assert gate.calls[:2] == [("read", 1), ("contains", 1)]


def test_one_backend_has_one_thread_and_fetches_and_writes_take_turns(made):
    gate = Gate("write", "read")
    worker = made(gate, batch_pages=1)
    worker.submit(Store(keys_of(3), buffers(3)))
    gate.wait_entered()
    worker.submit(Fetch(keys_of(3), buffers(3)))
    gate.let("read", 3)
    gate.let("write", 3)
    answer(worker, Kind.STORE)
    answer(worker, Kind.FETCH)
    assert [verb for verb, _ in gate.calls] == ["write", "read"] * 3
    assert len(gate.threads) == 1


def test_two_backends_each_have_one_thread(made):
    reading, writing = Gate(), Gate()
    worker = made(reading, writing)
    stored(worker, 1)
    worker.submit(Remove(keys_of(1)))
    answer(worker, Kind.REMOVE)
    for job, kind in ((Query(keys_of(1)), Kind.QUERY), (Fetch(keys_of(1), buffers(1)), Kind.FETCH)):
        worker.submit(job)
        answer(worker, kind)
    assert len(reading.threads) == len(writing.threads) == 1
    assert reading.threads != writing.threads
    assert {verb for verb, _ in writing.calls} == {"write", "remove"}


def test_changes_of_the_store_stay_in_order_over_kinds(made):
    gate = Gate("write")
    worker = made(gate, batch_pages=1)
    worker.submit(Store(keys_of(2), buffers(2)))
    gate.wait_entered()
    worker.submit(Remove(keys_of(2)))  # must not overtake what it is to remove
    gate.let("write", 2)
    assert answer(worker, Kind.REMOVE).removed == 2


# -- who owns a buffer ---------------------------------------------------------------------------


def test_a_cancelled_fetch_is_answered_only_when_the_backend_has_let_go(made):
    gate = Gate("read")
    worker = made(gate, Gate(), batch_pages=2)
    ticket = worker.submit(Fetch(keys_of(6), buffers(6)))
    gate.wait_entered()
    worker.cancel(ticket)
    stored(worker, 1)  # so the worker has gone on since
    assert worker.ready(Kind.FETCH) == 0
    gate.let("read")
    fetched = answer(worker, Kind.FETCH)
    assert fetched.ending is Ending.CANCELLED
    assert len(fetched.statuses) == 2  # what had begun counts, and nothing else was begun
    assert gate.calls == [("read", 2)]


def test_a_job_cancelled_in_the_queue_never_reaches_the_backend(made):
    gate = Gate("read")
    worker = made(gate)
    worker.submit(Fetch(keys_of(1), buffers(1)))
    gate.wait_entered()
    second = worker.submit(Fetch(keys_of(5), buffers(5)))
    worker.cancel(second)
    gate.let("read")
    first, cancelled = answers(worker, Kind.FETCH, 2)
    assert first.ending is Ending.DONE
    assert (cancelled.ticket, cancelled.ending, len(cancelled.statuses)) == (
        second,
        Ending.CANCELLED,
        0,
    )
    assert gate.calls == [("read", 1)]


def test_cancelling_what_is_done_changes_nothing(made):
    gate = Gate("read")
    worker = made(gate)
    ticket = worker.submit(Fetch(keys_of(1), buffers(1)))
    gate.wait_entered()
    worker.cancel(ticket)
    gate.let("read")
    assert answer(worker, Kind.FETCH).ending is Ending.DONE


def test_a_ticket_that_was_taken_is_unknown(made):
    worker = made(Gate())
    ticket = worker.submit(Query(keys_of(1)))
    answer(worker, Kind.QUERY)
    with pytest.raises(AssertionError, match="no job under way"):
        worker.cancel(ticket)
    with pytest.raises(AssertionError, match="no job under way"):
        worker.progress(ticket)


def test_the_worker_lets_go_of_buffers_when_the_answer_is_taken(made):
    worker = made(Gate())
    memory = bytearray(PAGE)
    worker.submit(Fetch(keys_of(1), (memoryview(memory),)))
    answer(worker, Kind.FETCH)

    def nobody_looks() -> bool:
        with suppress(BufferError):  # while anybody holds a view of it
            memory.append(0)
            return True
        return False

    wait_until(nobody_looks, "the last view's end")


def test_more_than_is_ready_cannot_be_taken(made):
    worker = made(Gate())
    with pytest.raises(AssertionError, match="with 0 jobs"):
        worker.take(Kind.FETCH, 1)


# -- full queues ---------------------------------------------------------------------------------


def test_a_store_is_dropped_and_counted_when_the_queue_is_full(made):
    gate = Gate("write")
    worker = made(gate, queue_pages=4)
    assert worker.submit(Store(keys_of(3), buffers(3))) is not None
    gate.wait_entered()
    assert worker.submit(Store(keys_of(2, 9), buffers(2))) is None
    assert worker.submit(Store(keys_of(1, 3), buffers(1))) is not None
    assert worker.stats.dropped[Kind.STORE] == 2
    assert worker.stats.queued[Kind.STORE] == 4
    gate.let("write", 2)
    assert len(answers(worker, Kind.STORE, 2)) == 2
    assert worker.submit(Store(keys_of(2, 9), buffers(2))) is not None
    gate.let("write")


def test_a_full_queue_of_one_kind_does_not_refuse_another(made):
    gate = Gate("write")
    worker = made(gate, Gate("write"), queue_pages=1)
    worker.submit(Store(keys_of(1), buffers(1)))
    assert worker.submit(Store(keys_of(1, 5), buffers(1))) is None
    assert worker.submit(Touch(keys_of(1))) is not None
    assert worker.submit(Query(keys_of(1))) is not None


def test_answers_that_nobody_takes_fill_the_queue_too(made):
    worker = made(Gate(), queue_pages=3)
    for _ in range(3):
        worker.submit(Touch(()))
    assert worker.submit(Touch(())) is None
    answers(worker, Kind.TOUCH, 3)
    assert worker.submit(Touch(())) is not None


def test_a_job_larger_than_the_queue_goes_alone_rather_than_never(made):
    worker = made(Gate(), queue_pages=2)
    assert worker.submit(Query(keys_of(5))) is not None
    assert worker.submit(Query(keys_of(1))) is None
    assert len(answer(worker, Kind.QUERY).present) == 5

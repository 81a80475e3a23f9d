"""What opens beside its owner is taken, or closed; it is never both, and never forgotten."""

import threading

import pytest

from stratakv.core.errors import StorageError
from stratakv.storage.opening import Background
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.storage_threads import StorageThreads


class Door:
    def __init__(self):
        self.gate = threading.Event()
        self.closed = []
        self.failure = None

    def open(self):
        assert self.gate.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        return "a store"


@pytest.fixture
def door():
    return Door()


@pytest.fixture(autouse=True)
def no_thread_stays(door):
    threads = StorageThreads()
    yield
    door.gate.set()
    wait_until(lambda: not threads.names, "the end of what opens a store")


def opening(door):
    return Background(door.open, door.closed.append)


def test_nobody_waits_and_what_has_opened_is_taken(door):
    found = opening(door)
    assert not found.done
    door.gate.set()
    wait_until(lambda: found.done)
    assert found.failure is None
    assert found.take() == "a store"
    found.abandon()
    assert door.closed == []
    with pytest.raises(AssertionError):
        found.take()


def test_a_failure_is_reported(door):
    door.failure = StorageError("down")
    door.gate.set()
    found = opening(door)
    wait_until(lambda: found.done)
    assert found.failure is door.failure
    found.abandon()
    assert door.closed == []


def test_what_was_given_up_closes_when_it_opens(door):
    found = opening(door)
    found.abandon()
    found.abandon()
    assert door.closed == []
    door.gate.set()
    wait_until(lambda: door.closed == ["a store"])
    assert not found.done


def test_what_has_opened_is_closed_when_it_is_given_up(door):
    found = opening(door)
    door.gate.set()
    wait_until(lambda: found.done)
    found.abandon()
    wait_until(lambda: door.closed == ["a store"])
    found.abandon()
    assert door.closed == ["a store"]


def test_without_a_thread_it_is_done_at_once_and_so_is_what_follows(door):
    door.gate.set()
    found = Background(door.open, door.closed.append, begin=lambda work: work())
    assert found.done
    found.abandon()
    assert door.closed == ["a store"]


def test_its_end_is_awaited_no_longer_than_it_may_be(door):
    found = opening(door)
    found.wait(0.0)
    assert not found.done
    door.gate.set()
    found.wait(PATIENCE_S)
    assert found.done

"""A store is attached on every rank in one step, or on none, and no step waits while it opens."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from stratakv.agreement.agreement import Agreement
from stratakv.agreement.ballot import Ballot
from stratakv.core.clock import BroadcastClock, MonotonicClock
from stratakv.core.errors import ConfigError, StorageError
from stratakv.engine.attachment import StorageCall, Verb
from stratakv.engine.ranks.ranked import RankedEngine
from stratakv.engine.ranks.step_messages import StepSync
from stratakv.engine.storage_control import BackgroundStores, StorageControl
from stratakv.serve.admin import OpenStore, StorageAdmin
from stratakv.serve.driver import EngineDriver
from stratakv.serve.errors import ApiError
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.memory import MemoryBackend
from stratakv.storage.urls import hidden
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.serving import STORAGE_STATS, STORE_FORM
from tests.storage_threads import StorageThreads

RANKS = 3
URL = "redis://user:secret@host:1/0"


class Table:
    """Where ranks that are threads meet. ``gathers`` counts what is no part of a step."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS)
        self.votes = [None] * RANKS
        self.gathers = 0

    def meet(self, rank, value):
        self.votes[rank] = value
        self.barrier.wait(PATIENCE_S)
        everyone = list(self.votes)
        self.barrier.wait(PATIENCE_S)
        return everyone


class OneRank:
    size = RANKS

    def __init__(self, table, rank):
        self._table = table
        self.rank = rank

    def all_reduce_min(self, lanes, meanwhile=lambda: None):
        meanwhile()
        return np.minimum.reduce(self._table.meet(self.rank, lanes.copy()))

    def broadcast(self, message):
        return self._table.meet(self.rank, message)[0]

    def gather(self, text):
        self._table.gathers += self.rank == 0
        return self._table.meet(self.rank, text)


class Inner:
    """What a rank's engine does of a step, and with a store."""

    def __init__(self, agreement, sync, opener):
        self.control = StorageControl(self, BackgroundStores(opener))
        self.agreement = agreement
        self.sync = sync
        self.steps = 0
        self.worker = None
        self.history = []

    def figures(self):
        return {"steps": self.steps, "attached": self.worker is not None}

    def description(self):
        return [f"{name} {value}" for name, value in self.figures().items()]

    def step(self):
        self.steps += 1
        self.sync.idle()
        self.agreement.agree(Ballot())
        return []

    def has_work(self):
        return False

    def call_storage(self, call):
        return (self.control.call(call),)

    @property
    def store(self):
        return self.control.store

    def attach(self, worker):
        assert self.worker is None
        self.worker = worker
        self.history.append(("attach", self.steps))

    def detach(self, *, force):
        del force
        worker, self.worker = self.worker, None
        self.history.append(("detach", self.steps))
        return worker

    def storage_stats(self):
        return None if self.worker is None else STORAGE_STATS

    def close(self, timeout_s):
        if self.worker is not None:
            self.worker.close(timeout_s)
        self.control.close(timeout_s)


class Backend(MemoryBackend):
    def __init__(self):
        super().__init__(STORE_FORM)
        self.closed = False

    def close(self):
        self.closed = True
        super().close()


class RankOpener:
    """A rank's; ``gate`` holds it back, and ``failure`` is what it raises."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.asked = []
        self.failure = None
        self.backends = []

    def __call__(self, url):
        self.asked.append(url)
        assert self.gate.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        backend = Backend()
        self.backends.append(backend)
        clock, limits = MonotonicClock(), IoLimits()
        worker = IoWorker(Backends(backend, backend), STORE_FORM, limits, clock)
        return OpenStore(worker=worker, shown=hidden(url), figures=dict)


class Skipping(MonotonicClock):
    """A clock that a test puts forward."""

    ahead_s = 0.0

    def now_s(self):
        return super().now_s() + self.ahead_s


class House:
    """A server of several ranks, but for HTTP and a model."""

    def __init__(self):
        self.table = Table()
        self.clock = Skipping()
        self.openers = [RankOpener() for _ in range(RANKS)]
        self.inner, self.engines = [], []
        for rank in range(RANKS):
            agreement = Agreement(OneRank(self.table, rank))
            sync = StepSync(agreement, MonotonicClock(), BroadcastClock())
            self.inner.append(Inner(agreement, sync, self.openers[rank]))
            agreement.watch("requests", self.inner[rank].figures, self.inner[rank].description)
            self.engines.append(RankedEngine(self.inner[rank], sync))
        self.checked = []
        self.driver = EngineDriver(
            self.engines[0], max_waiting=8, clock=MonotonicClock(), heartbeat_s=0.005
        )
        self.admin = StorageAdmin(
            self.driver, self.engines[0], self.clock, self.check, open_s=PATIENCE_S
        )

    def check(self, url):
        self.checked.append(url)
        if url.startswith("memory:"):
            raise ConfigError(f"--storage {url}: it is one process's own")

    def all_are(self, attached):
        """Ranks are at the end of the same step at about the same time."""
        wait_until(lambda: [i.worker is not None for i in self.inner] == [attached] * RANKS)

    @property
    def open(self):
        return [sum(not b.closed for b in opener.backends) for opener in self.openers]

    def follow(self, rank):
        self.engines[rank].follow()


@contextmanager
def living():
    threads = StorageThreads()
    house = House()
    with ThreadPoolExecutor(RANKS) as pool:
        following = [pool.submit(house.follow, rank) for rank in range(1, RANKS)]
        house.driver.start()
        try:
            yield house
        finally:
            for opener in house.openers:
                opener.gate.set()
            assert house.driver.stop(PATIENCE_S)
            house.engines[0].close(PATIENCE_S)
            house.admin.close()
            for future in following:
                future.result(PATIENCE_S)
            wait_until(lambda: house.open == [0] * RANKS)
            wait_until(lambda: not threads.names)


@pytest.fixture
def house():
    with living() as found:
        yield found


def refused(status, call, *args):
    with pytest.raises(ApiError) as caught:
        call(*args)
    assert caught.value.status == status, caught.value.message
    return caught.value


def test_all_ranks_attach_and_detach_in_the_same_steps_again_and_again(house):
    for _ in range(3):
        assert house.admin.attach(URL) == hidden(URL)
        house.all_are(attached=True)
        assert house.admin.inspect()["url"] == hidden(URL)
        assert refused(409, house.admin.attach, URL).code == "storage_attached"
        house.admin.detach(5, force=False)
        house.all_are(attached=False)
        wait_until(lambda: house.open == [0] * RANKS)
    histories = [inner.history for inner in house.inner]
    assert histories[0] == histories[1] == histories[2]
    assert len(histories[0]) == 6
    assert [opener.asked for opener in house.openers] == [[URL] * 3] * RANKS


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [(ConfigError, 400, "invalid_value"), (StorageError, 502, "storage_unreachable")],
)
def test_one_rank_that_cannot_keeps_all_from_it_and_its_error_is_reported(
    house, rank, kind, status, code
):
    house.openers[rank].failure = kind(f"no answer at {URL}")
    error = refused(status, house.admin.attach, URL)
    assert error.code == code
    assert error.message == ("" if rank == 0 else f"rank {rank}: ") + f"no answer at {hidden(URL)}"
    house.all_are(attached=False)
    wait_until(lambda: house.open == [0] * RANKS)
    house.openers[rank].failure = None
    house.admin.attach(URL)
    house.all_are(attached=True)


def test_a_strange_failure_is_a_store_that_does_not_open(house, caplog):
    house.openers[1].failure = KeyError(URL)
    assert refused(502, house.admin.attach, URL).message == "rank 1: KeyError while it was opened"
    assert hidden(URL) in caplog.text


def test_steps_go_on_while_a_rank_opens_its_store(house):
    house.openers[1].gate.clear()
    with ThreadPoolExecutor(1) as pool:
        attach = pool.submit(house.admin.attach, URL)
        wait_until(lambda: house.openers[1].asked)
        begun = house.inner[0].steps
        wait_until(lambda: house.inner[0].steps > begun + 20)
        assert house.admin.inspect() == {"attached": False}
        house.all_are(attached=False)
        assert not attach.done()
        house.openers[1].gate.set()
        assert attach.result(PATIENCE_S) == hidden(URL)
    house.all_are(attached=True)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_hangs_fails_it_in_time_and_what_opens_later_is_closed(rank):
    with living() as house, ThreadPoolExecutor(1) as pool:
        slow = house.openers[rank]
        slow.gate.clear()
        attach = pool.submit(refused, 502, house.admin.attach, URL)
        wait_until(lambda: sum(house.open) == RANKS - 1)
        steps = house.inner[0].steps
        wait_until(lambda: house.inner[0].steps > steps + 5)  # the others have said so
        house.clock.ahead_s = PATIENCE_S
        error = attach.result(PATIENCE_S)
        assert error.message.startswith(f"after {PATIENCE_S:g} s, rank {rank} has not opened it")
        house.all_are(attached=False)
        assert slow.backends == []
        slow.gate.set()
        wait_until(lambda: [b.closed for b in slow.backends] == [True])
        house.admin.attach(URL)
        house.all_are(attached=True)


def test_a_url_that_no_rank_need_try_costs_no_message(house):
    refused(400, house.admin.attach, "memory://")
    assert [opener.asked for opener in house.openers] == [[]] * RANKS


def test_a_server_that_drains_attaches_nothing(house):
    house.openers[2].gate.clear()
    with ThreadPoolExecutor(1) as pool:
        attach = pool.submit(house.admin.attach, URL)
        wait_until(lambda: house.openers[2].asked)
        house.driver.drain()
        with pytest.raises(ApiError) as caught:
            attach.result(PATIENCE_S)
    assert caught.value.status == 503
    house.all_are(attached=False)


def test_the_end_of_the_server_closes_what_others_have_opened():
    with living() as house:
        house.driver.ask(
            lambda: house.engines[0].call_storage(StorageCall(Verb.OPEN, url=URL))
        ).result(PATIENCE_S)
        wait_until(lambda: house.open == [1] * RANKS)
    assert house.open == [0] * RANKS


def test_other_steps_have_one_message_one_ballot_and_nothing_more(house):
    house.admin.attach(URL)
    seen = house.driver.ask(lambda: counts(house)).result(PATIENCE_S)
    wait_until(lambda: house.inner[0].steps > seen[0] + 20)
    now = house.driver.ask(lambda: counts(house)).result(PATIENCE_S)
    grown = [after - before for before, after in zip(seen, now, strict=True)]
    assert grown == [grown[0], grown[0], grown[0], 0]


def counts(house):
    agreement = house.inner[0].agreement
    return house.inner[0].steps, agreement.ballots, agreement.broadcasts, house.table.gathers


def test_a_url_does_not_show_in_a_message_that_is_printed():
    assert "secret" not in repr(StorageCall(Verb.OPEN, url=URL))

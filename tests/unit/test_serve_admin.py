"""Attach and detach at run time: whatever happens, the storage ends attached or closed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from stratakv.core.clock import MonotonicClock
from stratakv.core.errors import ConfigError, StorageError
from stratakv.serve.admin import OpenStore, StorageAdmin
from stratakv.serve.driver import EngineDriver
from stratakv.serve.errors import ApiError
from stratakv.storage.io_jobs import Kind
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.serving import STORE_FORM, EchoEngine
from tests.storage_threads import StorageThreads


class HeldBackend(MemoryBackend):
    """Writes wait for ``gate``; ``writing`` tells that one does."""

    def __init__(self):
        super().__init__(STORE_FORM)
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()
        self.written = 0
        self.closed = False

    def write(self, keys, pages):
        self.writing.set()
        assert self.gate.wait(PATIENCE_S)
        self.written += len(keys)
        return super().write(keys, pages)

    def close(self):
        self.closed = True
        super().close()


class Stores:
    """Opens stores and keeps what it opened. ``failure`` is raised by the next one; ``gate`` holds
    an opening up, of which ``opening`` tells."""

    def __init__(self):
        self.backends = []
        self.failure = None
        self.gate = threading.Event()
        self.gate.set()
        self.opening = threading.Event()

    def __call__(self, url):
        self.opening.set()
        assert self.gate.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        backend = HeldBackend()
        self.backends.append(backend)
        limits = IoLimits(batch_pages=1)
        worker = IoWorker(Backends(backend, backend), STORE_FORM, limits, MonotonicClock())
        return OpenStore(worker=worker, shown=f"shown {url}", figures=lambda: {"pages": 3})


@contextmanager
def administering(engine, stores, *, start=True):
    driver = EngineDriver(engine, max_waiting=8, clock=MonotonicClock())
    check = stores if isinstance(stores, str) else lambda url: None
    admin = StorageAdmin(driver, engine, MonotonicClock(), check)
    threads = StorageThreads()
    if start:
        driver.start()
    try:
        yield admin, driver
    finally:
        opened = [] if isinstance(stores, str) else stores.backends
        for backend in opened:
            backend.gate.set()
        admin.settle(PATIENCE_S)
        assert driver.stop(PATIENCE_S)
        admin.close()
        assert all(backend.closed for backend in opened)
        wait_until(lambda: not threads.names)


@pytest.fixture
def stores():
    return Stores()


@pytest.fixture
def engine(stores):
    return EchoEngine(opener=stores)


@pytest.fixture
def admin(engine, stores):
    with administering(engine, stores) as (found, _):
        yield found


def refused(status, call, *args, **kwargs):
    with pytest.raises(ApiError) as caught:
        call(*args, **kwargs)
    assert caught.value.status == status, caught.value.message
    return caught.value


def on_engine(driver, work):
    return driver.ask(work).result(PATIENCE_S)


def test_what_is_attached_is_used_shown_and_closed_by_a_detach(admin, engine, stores):
    threads = StorageThreads()
    assert admin.inspect() == {"attached": False}
    assert admin.attach("a") == "shown a"
    found = admin.inspect()
    assert (found["attached"], found["url"]) == (True, "shown a")
    assert found["lost_tokens"] == {"deadline": 32}
    assert found["queue"]["queued"]["store"] == 0
    assert found["backend"] == {"pages": 3}
    assert not stores.backends[0].closed
    done = admin.detach(5, force=False)
    assert (done.shown, done.dropped_pages) == ("shown a", 0)
    assert stores.backends[0].closed
    assert engine.storage.worker is None
    wait_until(lambda: not threads.names)
    assert admin.inspect() == {"attached": False}


def test_the_engine_is_called_on_its_own_thread_and_stores_are_opened_on_another(admin, engine):
    admin.attach("a")
    admin.inspect()
    admin.detach(5, force=False)
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_it_can_be_attached_again_and_only_once_at_a_time(admin, stores):
    for _ in range(3):
        admin.attach("a")
        error = refused(409, admin.attach, "b")
        assert (error.code, "shown a" in error.message) == ("storage_attached", True)
        assert admin.inspect()["url"] == "shown a"
        admin.detach(5, force=False)
    assert len(stores.backends) == 3


def test_nothing_is_left_of_a_store_that_could_not_be_opened(admin, stores):
    for failure, status in ((ConfigError("--storage x: no"), 400), (StorageError("down"), 502)):
        stores.failure = failure
        error = refused(status, admin.attach, "x")
        assert error.message == str(failure)
        assert admin.inspect() == {"attached": False}
    stores.failure = None
    assert admin.attach("y") == "shown y"


def test_a_failed_attach_does_not_touch_the_store_that_is_there(admin, stores):
    admin.attach("a")
    stores.failure = StorageError("down")
    refused(409, admin.attach, "x")
    assert admin.inspect()["url"] == "shown a"


def test_where_nothing_can_be_attached_the_reason_is_reported():
    with administering(EchoEngine(), "there is no host tier") as (admin, _):
        error = refused(409, admin.attach, "a")
    assert (error.code, error.message) == ("cannot_attach", "there is no host tier")


def test_without_storage_there_is_nothing_to_detach_or_clear(admin):
    assert refused(404, admin.detach, 1, force=True).code == "no_storage"
    assert refused(404, admin.clear).code == "no_storage"


def test_a_detach_waits_until_everything_is_written(engine, stores):
    with administering(engine, stores) as (admin, driver), ThreadPoolExecutor(1) as pool:
        admin.attach("a")
        backend = stores.backends[0]
        backend.gate.clear()
        on_engine(driver, lambda: engine.storage.store(1, 2, 3))
        detach = pool.submit(admin.detach, 20, force=False)
        wait_until(lambda: engine.storage.asked > 2)
        assert not detach.done()
        assert not backend.closed
        backend.gate.set()
        assert detach.result(PATIENCE_S).dropped_pages == 0
        assert backend.written == 3
        assert backend.closed


def test_a_detach_that_takes_too_long_changes_nothing(engine, stores):
    with administering(engine, stores) as (admin, driver):
        admin.attach("a")
        stores.backends[0].gate.clear()
        on_engine(driver, lambda: engine.storage.store(1, 2, 3))
        error = refused(409, admin.detach, 0.05, force=False)
        assert error.code == "storage_busy"
        assert "after 0.05 s, 3 pages are still to be written" in error.message
        assert not engine.storage.detaching  # it goes on as before
        on_engine(driver, lambda: engine.storage.store(4))
        assert not stores.backends[0].closed
        stores.backends[0].gate.set()
        assert admin.detach(10, force=False).dropped_pages == 0
        assert stores.backends[0].written == 4


def test_force_drops_what_is_queued_and_says_how_much(engine, stores):
    with administering(engine, stores) as (admin, driver), ThreadPoolExecutor(1) as pool:
        admin.attach("a")
        backend = stores.backends[0]
        backend.gate.clear()
        on_engine(driver, lambda: engine.storage.store(1, 2, 3))
        on_engine(driver, lambda: engine.storage.store(4))
        assert backend.writing.wait(PATIENCE_S)
        detach = pool.submit(admin.detach, 20, force=True)
        wait_until(lambda: engine.storage.asked > 2)
        backend.gate.set()
        assert detach.result(PATIENCE_S).dropped_pages == 4  # one of which was under way
        assert backend.written == 1
        assert backend.closed


def test_force_does_not_leave_a_store_that_does_not_come_back(engine, stores):
    """Its batch has the host's pages; nobody else may have them before it ends."""
    with administering(engine, stores) as (admin, driver):
        admin.attach("a")
        stores.backends[0].gate.clear()
        on_engine(driver, lambda: engine.storage.store(1, 2))
        assert stores.backends[0].writing.wait(PATIENCE_S)
        error = refused(409, admin.detach, 0.05, force=True)
        assert "up to 2 that were queued are dropped" in error.message
        assert admin.inspect()["attached"]


def test_one_change_at_a_time(engine, stores):
    with administering(engine, stores) as (admin, _), ThreadPoolExecutor(1) as pool:
        stores.gate.clear()
        attach = pool.submit(admin.attach, "a")
        assert stores.opening.wait(PATIENCE_S)
        for call in (lambda: admin.attach("b"), lambda: admin.detach(1, force=True), admin.clear):
            assert refused(409, call).code == "busy"
        assert admin.inspect() == {"attached": False}
        stores.gate.set()
        assert attach.result(PATIENCE_S) == "shown a"
        assert len(stores.backends) == 1


def test_an_attach_while_a_detach_waits_is_refused(engine, stores):
    with administering(engine, stores) as (admin, driver), ThreadPoolExecutor(1) as pool:
        admin.attach("a")
        stores.backends[0].gate.clear()
        on_engine(driver, lambda: engine.storage.store(1))
        detach = pool.submit(admin.detach, 20, force=False)
        wait_until(lambda: engine.storage.detaching)
        assert refused(409, admin.attach, "b").code == "busy"
        stores.backends[0].gate.set()
        detach.result(PATIENCE_S)
        assert admin.attach("b") == "shown b"


def test_many_at_once_end_in_one_state(engine, stores):
    def change(admin, i):
        try:
            admin.attach(str(i)) if i % 2 else admin.detach(5, force=bool(i % 4))
        except ApiError as error:
            assert error.status in {404, 409}, error.message  # noqa: PT017

    threads = StorageThreads()
    with administering(engine, stores) as (admin, _), ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: change(admin, i), range(200)))
        attached = admin.inspect()["attached"]
        assert (engine.storage.worker is not None) == attached
        assert sum(not backend.closed for backend in stores.backends) == attached
        wait_until(lambda: len(threads.names) == attached)


def test_clear_is_the_engines(admin, engine, stores):
    admin.attach("a")
    assert admin.clear() == "shown a"
    wait_until(lambda: engine.storage.worker.ready(Kind.REMOVE) == 1)
    admin.detach(5, force=False)


def test_a_server_that_drains_takes_no_changes(engine, stores):
    with administering(engine, stores) as (admin, driver):
        admin.attach("a")
        driver.drain()
        for call in (lambda: admin.attach("b"), lambda: admin.detach(1, force=True), admin.clear):
            assert refused(503, call).code == "draining"
        assert admin.inspect()["attached"]


def test_a_detach_gives_way_to_the_servers_end(engine, stores):
    with administering(engine, stores) as (admin, driver), ThreadPoolExecutor(1) as pool:
        admin.attach("a")
        stores.backends[0].gate.clear()
        on_engine(driver, lambda: engine.storage.store(1, 2))
        detach = pool.submit(admin.detach, 3600, force=False)
        wait_until(lambda: engine.storage.asked > 2)
        driver.drain()
        with pytest.raises(ApiError) as caught:
            detach.result(PATIENCE_S)
        assert (caught.value.status, caught.value.code) == (503, "draining")
        assert not engine.storage.detaching
    assert stores.backends[0].written == 2


def test_a_store_that_opens_when_the_server_ends_is_closed(engine, stores):
    with administering(engine, stores) as (admin, driver), ThreadPoolExecutor(1) as pool:
        stores.gate.clear()
        attach = pool.submit(admin.attach, "a")
        assert stores.opening.wait(PATIENCE_S)
        driver.drain()
        stores.gate.set()
        with pytest.raises(ApiError) as caught:
            attach.result(PATIENCE_S)
        assert caught.value.status == 503
        wait_until(lambda: [backend.closed for backend in stores.backends] == [True])
        assert engine.storage.worker is None


def test_the_engines_death_ends_a_detach_and_the_store_is_closed(engine, stores):
    with administering(engine, stores) as (admin, driver), ThreadPoolExecutor(1) as pool:
        admin.attach("a")
        stores.backends[0].gate.clear()
        on_engine(driver, lambda: engine.storage.store(1))
        detach = pool.submit(admin.detach, 20, force=False)
        wait_until(lambda: engine.storage.asked > 2)
        engine.storage.take = None  # the next look fails, and the engine with it
        with pytest.raises(ApiError) as caught:
            detach.result(PATIENCE_S)
        assert caught.value.status in {500, 503}
        refused(503, admin.inspect)
    assert stores.backends[0].written == 1


def test_before_the_start_nothing_is_changed(engine, stores):
    with administering(engine, stores, start=False) as (admin, _):
        assert refused(503, admin.attach, "a").code == "starting"

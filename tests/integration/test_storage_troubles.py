"""Storage that is slow, hangs, fails or is full: every request is served, exactly, no step of those
that run waits for it, and the engine ends in bounded time.
"""

import logging
import threading
import time
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest

from stratakv.engine.endings import Endings
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.testing.storage_faults import Faults, FaultyBackend
from stratakv.tiers.progress import Progress
from tests.engines import on_device, on_storage
from tests.hit_cases import lab, last_end, prompt, spec_for
from tests.storage_cases import (
    PATIENT,
    Shelf,
    attach_backend,
    check_sums,
    evict_all,
    format_of,
    lost,
    of_each,
    settled,
    shelf_for,
    shelf_lab,
)
from tests.storage_threads import StorageThreads

PAGE = 16
TOKENS = prompt(PAGE, 1)
END = last_end(len(TOKENS), PAGE)
some = of_each(("llama", "gemma3", "qwen3_next"), quick=("gemma3",))
policies = pytest.mark.parametrize("policy", ["best-effort", "wait-complete", "timeout"])


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")


class Hanging(Shelf):
    """Answers until it hangs, and then not before it is let go: who waits for it waits for ever."""

    def __init__(self, form):
        super().__init__(form)
        self.answers = threading.Event()
        self.answers.set()
        self.threads = set()

    def _wait(self):
        self.threads.add(threading.current_thread())
        assert self.answers.wait(PATIENCE_S), "it was never let go"

    def contains(self, keys):
        self._wait()
        return super().contains(keys)

    def read(self, keys, into):
        self._wait()
        return super().read(keys, into)

    def write(self, keys, pages):
        self._wait()
        return super().write(keys, pages)

    def touch(self, keys):
        self._wait()
        super().touch(keys)


@contextmanager
def hanging_lab(family, policy, **settings):
    """A lab over a store that has ``TOKENS`` and is about to hang; it ends well."""
    store = Hanging(format_of(spec_for(family, PAGE)))
    with shelf_lab(family, PAGE, store) as this:
        this.ask(TOKENS)
    settings = PATIENT | {"prefetch_policy": policy} | settings
    with lab(family, PAGE, **settings) as this:
        attach_backend(this.parts, store)
        try:
            yield this, store
        finally:
            store.answers.set()


def traffic(this) -> None:
    for at in range(3):
        this.submit(f"fresh{at}", prompt(PAGE, 40 + at, 60 + 20 * at), count=6)
    this.submit("known", TOKENS, count=6)
    this.submit("twin", TOKENS, count=6)
    this.drain()


@some
@policies
def test_slow_storage(family, policy):
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf) as this:
        this.ask(TOKENS)
    slow = FaultyBackend(shelf, Faults(delay_s=0.05))
    with shelf_lab(family, PAGE, slow, prefetch_policy=policy) as this:
        traffic(this)
        if policy == "wait-complete":
            assert this.answers["known"].cached == on_storage(this.spec, END)
        settled(this)
        check_sums(this)
        this.parts.engine.check()


@some
@pytest.mark.parametrize("policy", ["best-effort", "timeout"])
def test_storage_that_hangs_delays_nobody_for_long(family, policy):
    more = {"prefetch_timeout": 0.05, "prefetch_timeout_per_1k": 0.0} if policy == "timeout" else {}
    with hanging_lab(family, policy, **more) as (this, store):
        store.answers.clear()
        for at in range(3):
            this.submit(f"fresh{at}", prompt(PAGE, 40 + at, 60 + 20 * at), count=6)
        this.submit("known", TOKENS, count=6)
        wait_until(
            lambda: this.step() or not this.parts.engine.statuses(), "an end of all requests"
        )
        assert not store.answers.is_set()
        assert threading.main_thread() not in store.threads
        store.answers.set()
        this.drain()
        assert this.answers["known"].cached == on_device(this.spec, 0)
        settled(this)
        evict_all(this)
        check_sums(this)


@some
def test_a_store_is_busy_until_all_that_a_finished_request_left_is_stored(family):
    with hanging_lab(family, "best-effort") as (this, store):
        store.answers.clear()
        this.submit("fresh", prompt(PAGE, 40, 60), count=6)
        wait_until(
            lambda: this.step() or not this.parts.engine.statuses(), "an end of all requests"
        )
        for _ in range(20):
            this.step()
            assert this.parts.engine.storage_stats().busy
        store.answers.set()
        wait_until(lambda: this.step() or not this.parts.engine.storage_stats().busy)
        stored = this.parts.engine.storage_stats().pages["stored"]
        assert stored > 0
        settled(this)
        this.drain()
        assert this.parts.engine.storage_stats().pages["stored"] == stored


@some
def test_a_request_that_waits_for_ever_can_be_aborted(family):
    with hanging_lab(family, "wait-complete") as (this, store):
        store.answers.clear()
        this.submit("known", TOKENS)
        for _ in range(20):
            this.step()
        assert this.parts.engine.stats().waiting == 1
        this.parts.engine.abort("known")
        this.step()
        assert this.parts.engine.stats().waiting == 0
        this.parts.engine.check()
        store.answers.set()
        this.drain()
        assert this.ask(TOKENS).cached == on_storage(this.spec, END)


@of_each(("llama", "gemma3"))
def test_a_flush_while_a_request_waits_for_its_fetch_does_nothing(family):
    with hanging_lab(family, "wait-complete") as (this, store):
        this.ask(prompt(PAGE, 60))
        settled(this)
        assert this.parts.engine.flush()
        this.ask(prompt(PAGE, 60)[:40])
        settled(this)
        store.answers.clear()
        this.submit("known", TOKENS)
        this.step()
        assert not this.parts.engine.flush()
        this.parts.engine.check()
        store.answers.set()
        while this.parts.cache.storage.busy:  # it has landed, and its turn has not come
            this.parts.cache.progress.pause()
        assert not this.parts.engine.flush()
        this.drain()
        assert this.answers["known"].cached == on_storage(this.spec, END)
        settled(this)
        assert this.parts.engine.flush()


def test_a_flush_does_not_wait_for_storage_that_hangs():
    with hanging_lab("llama", "best-effort") as (this, store):
        store.answers.clear()
        this.submit("fresh", prompt(PAGE, 60))
        while this.parts.engine.statuses():
            this.step()
        assert not this.parts.engine.flush(), "a page that is being written is not to be had"
        assert not store.answers.is_set()
        this.parts.engine.check()
        store.answers.set()
        this.drain()
        settled(this)
        assert this.parts.engine.flush()


@contextmanager
def blocked(cache):
    """Where this thread has waited for another one, or slept."""
    found, mine = [], threading.get_ident()

    def seen(name, wait):
        def waiting(*arguments):
            if threading.get_ident() == mine:
                found.append((name, *arguments))
            return wait(*arguments)

        return waiting

    with ExitStack() as patches:
        for owner, name in (
            (threading.Condition, "wait"),
            (threading.Thread, "join"),
            (time, "sleep"),
            (cache.progress, "wait"),
            (cache.progress, "pause"),
        ):
            patched = mock.patch.object(owner, name, seen(name, getattr(owner, name)))
            patches.enter_context(patched)
        yield found


def waits_of_steps(this, store) -> list:
    """While two requests decode, one waits for storage, and pages are being written."""
    for name, seed in (("decodes", 50), ("too", 51)):
        this.submit(name, prompt(PAGE, seed, 40), count=48)
    while this.parts.engine.stats().output_tokens < 4:
        this.step()
    store.answers.clear()
    this.submit("known", TOKENS)
    with blocked(this.parts.cache) as found:
        for _ in range(34):
            this.step()
    assert this.parts.engine.stats().running >= 2, "nothing was decoding any more"
    return found


@policies
def test_no_step_waits_for_storage_that_hangs(policy):
    with hanging_lab("llama", policy) as (this, store):
        assert waits_of_steps(this, store) == []
        assert not store.answers.is_set()
        store.answers.set()
        this.drain()


@pytest.mark.parametrize("waits", [False, True])
def test_an_engine_over_storage_that_hangs_ends_in_bounded_time(waits):
    with hanging_lab("llama", "wait-complete") as (this, store):
        store.answers.clear()
        if waits:
            this.submit("known", TOKENS)
            this.step()
        this.submit("fresh", prompt(PAGE, 60), count=4)
        for _ in range(12):
            this.step()
        this.parts.engine.close(timeout_s=0.2)
        assert not store.answers.is_set()
        assert not this.parts.engine.statuses()


@some
@policies
@pytest.mark.parametrize(
    "faults",
    [Faults(call_fails=1.0), Faults(call_breaks=0.5, seed=3), Faults(read_fails=1.0)],
    ids=["every call fails", "calls break", "reads fail"],
)
def test_storage_that_fails(family, policy, faults):
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf) as this:
        this.ask(TOKENS)
    backend = FaultyBackend(shelf, faults)
    with shelf_lab(family, PAGE, backend, prefetch_policy=policy) as this:
        traffic(this)
        if faults.call_breaks == 0.0:
            assert this.answers["known"].cached.storage == 0
        assert backend.injected > 0
        if faults.read_fails and policy == "wait-complete":
            assert "io_error" in lost(this)
        backend.change(Faults())
        settled(this)
        check_sums(this)


@some
def test_storage_that_is_full_stores_no_more(family):
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf) as this:
        this.ask(TOKENS)
    full = FaultyBackend(shelf, Faults(write_refused=1.0))
    with shelf_lab(family, PAGE, full) as this:
        traffic(this)
        assert this.answers["known"].cached == on_storage(this.spec, END)
        settled(this)
        stats = this.parts.engine.storage_stats()
        assert stats.pages["refused"] > 0
        assert stats.pages["stored"] == 0
        full.change(Faults())
        settled(this)
        fresh = prompt(PAGE, 40, 60)
        this.ask(fresh)  # what was refused is stored when it is used again
        settled(this)
        evict_all(this)
        assert this.ask(fresh).cached == on_storage(this.spec, last_end(len(fresh), PAGE))


@some
def test_a_quota_that_holds_less_than_a_prompt(family):
    """Whatever is left of it is used as far as it goes."""
    room = sum(group.page_bytes for group in spec_for(family, PAGE).groups) * 5
    shelf = shelf_for(family, PAGE, quota_bytes=room)
    with shelf_lab(family, PAGE, shelf) as this:
        for _ in range(3):
            for seed in (1, 70, 71):
                this.ask(prompt(PAGE, seed))
                settled(this)
                evict_all(this)
        check_sums(this)


def test_a_close_that_fails_leaves_no_thread_behind(monkeypatch):
    """It raises what went wrong; whoever goes on must not meet the store's threads again."""
    threads = StorageThreads()

    def wrong(*_):
        raise AssertionError("a bug")

    def closed():
        with shelf_lab("gemma3", PAGE, shelf_for("gemma3", PAGE)) as this:
            this.ask(TOKENS)
            assert threads.names
            monkeypatch.setattr(Progress, "wait", wrong)
            monkeypatch.setattr(Endings, "close", wrong)

    with pytest.raises(AssertionError, match="a bug"):
        closed()
    wait_until(lambda: not threads.names, "the end of the store's threads")

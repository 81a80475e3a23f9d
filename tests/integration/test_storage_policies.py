"""Storage under every stop policy and every write policy, with requests that share, wait, are
aborted and are retracted: what is served is exact, and what is stored is what the policy says.
"""

import threading

import pytest

from stratakv.core.ids import RequestId
from stratakv.engine.attachment import StorageCall, Verb
from stratakv.storage.backend import Everything
from stratakv.testing.patience import PATIENCE_S
from stratakv.tree.nodes import Tier
from tests.engines import evict, evict_device, on_device, on_storage
from tests.hit_cases import OUTPUT, last_end, prompt, spec_for
from tests.storage_cases import (
    Shelf,
    format_of,
    lost_alone,
    of_each,
    settled,
    shelf_for,
    shelf_lab,
    stored_pages,
    usable_end,
)

PAGE = 16
TOKENS = prompt(PAGE, 1)
END = last_end(len(TOKENS), PAGE)
kinds = of_each()
some = of_each(("llama", "gemma3", "qwen3_next"), quick=("gemma3",))


class Held(Shelf):
    """Holds its reads until they are let through, and counts the objects that were read."""

    def __init__(self, form):
        super().__init__(form)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.objects = 0

    def read(self, keys, into):
        self.entered.set()
        assert self.gate.wait(PATIENCE_S), "a read was never let through"
        self.objects += len(keys)
        return super().read(keys, into)


def filled(family) -> Held:
    shelf = Held(format_of(spec_for(family, PAGE)))
    with shelf_lab(family, PAGE, shelf) as this:
        this.ask(TOKENS)
    return shelf


# -- when a request stops waiting ------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("policy", ["best-effort", "wait-complete", "timeout"])
def test_every_stop_policy_gets_what_has_arrived_in_time(family, policy):
    """All rows are taken, so that the prefetch ends before its request's turn comes."""
    shelf = filled(family)
    shelf.gate.set()
    patience = {"prefetch_timeout": PATIENCE_S} if policy == "timeout" else {}
    with shelf_lab(family, PAGE, shelf, prefetch_policy=policy, **patience) as this:
        for at in range(6):
            this.submit(f"busy{at}", prompt(PAGE, 10 + at, 5), count=2)
        this.step()
        this.submit("known", TOKENS)
        while this.parts.cache.storage.busy:
            this.parts.cache.progress.pause()
        this.drain()
        assert this.answers["known"].cached == on_storage(this.spec, END)
        assert lost_alone(this) == {}


@some
@pytest.mark.parametrize("policy", ["best-effort", "timeout"])
def test_who_does_not_wait_goes_without(family, policy):
    shelf = filled(family)
    more = {"prefetch_timeout": 0.05, "prefetch_timeout_per_1k": 0.0} if policy == "timeout" else {}
    with shelf_lab(family, PAGE, shelf, prefetch_policy=policy, **more) as this:
        this.submit("known", TOKENS)
        if policy == "best-effort":  # so that it has found something that it can lose
            while not this.parts.cache.storage.ready:
                pass
            this.parts.cache.progress.pause()
        while this.parts.engine.statuses():
            this.step()
        assert not shelf.gate.is_set()
        shelf.gate.set()
        this.drain()
        assert this.answers["known"].cached == on_device(this.spec, 0)
        settled(this)
        assert lost_alone(this) == {"deadline": END}
        assert this.ask(TOKENS).cached == on_device(this.spec, END)


@kinds
def test_two_requests_of_one_prefix_read_it_once(family):
    shelf = filled(family)
    shelf.gate.set()
    with shelf_lab(family, PAGE, shelf) as this:
        this.submit("one", TOKENS)
        this.submit("two", TOKENS)
        this.submit("more", [*TOKENS, *prompt(PAGE, 4, 20)])
        this.drain()
        objects = shelf.objects
        assert this.answers["one"].cached == on_storage(this.spec, END)
        for name in ("two", "more"):
            assert this.answers[name].cached.storage == 0
            assert this.answers[name].cached.total == END
        assert lost_alone(this) == {}
    stored = [len(pages) for pages in stored_pages(this, shelf, TOKENS)]
    assert objects <= sum(stored), "an object was read twice"


@kinds
def test_an_abort_during_a_fetch_and_the_same_prompt_again(family):
    shelf = filled(family)
    with shelf_lab(family, PAGE, shelf) as this:
        engine = this.parts.engine
        this.submit("gone", TOKENS)
        while not shelf.entered.is_set():
            this.step()
        engine.abort(RequestId("gone"))
        this.step()
        engine.check()
        this.submit("again", TOKENS)
        this.step()
        shelf.gate.set()
        this.drain()
        assert this.answers["again"].cached == on_storage(this.spec, END)
        assert lost_alone(this) == {"aborted": END}


@some
def test_an_abort_of_the_first_of_two(family):
    """The second one waits for the first one's fetch, and must not wait for ever."""
    shelf = filled(family)
    with shelf_lab(family, PAGE, shelf) as this:
        engine = this.parts.engine
        this.submit("gone", TOKENS)
        this.submit("stays", TOKENS)
        while not shelf.entered.is_set():
            this.step()
        engine.abort(RequestId("gone"))
        this.step()
        shelf.gate.set()
        this.drain()
        assert this.answers["stays"].cached == on_storage(this.spec, END)


# -- what is stored, and when ----------------------------------------------------------------------


def everything(this, shelf) -> bool:
    """Whether the whole prompt could be had from storage alone."""
    return usable_end(this, stored_pages(this, shelf, TOKENS), len(TOKENS)) == END


@kinds
def test_write_through_stores_at_once(family):
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf) as this:
        this.ask(TOKENS)
        settled(this)
        assert everything(this, shelf)
        objects = len(shelf.snapshot())
        this.ask(TOKENS)
        settled(this)
        stats = this.parts.engine.storage_stats()
        assert stats.pages["stored"] == objects == len(shelf.snapshot()), "a page was written twice"


@kinds
def test_write_through_selective_stores_what_is_used_again(family):
    shelf = shelf_for(family, PAGE)
    settings = {"write_policy": "write-through-selective", "write_hits": 2}
    with shelf_lab(family, PAGE, shelf, **settings) as this:
        this.ask(TOKENS)
        settled(this)
        assert not shelf.snapshot()
        this.ask(TOKENS)
        settled(this)
        assert everything(this, shelf)
    with shelf_lab(family, PAGE, shelf, **settings) as this:
        assert this.ask(TOKENS).cached == on_storage(this.spec, END)


@kinds
def test_write_back_stores_what_leaves_the_device(family):
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf, write_policy="write-back", write_back_reserve=1.0) as this:
        assert not shelf.snapshot()
        this.ask(TOKENS)
        while this.parts.cache.progress.busy:
            this.parts.cache.progress.pause()
        for _ in range(3):  # what is cold is saved step by step
            this.ask(prompt(PAGE, 20, 40))
            settled(this)
        evict_device(this.parts)
        best = usable_end(this, stored_pages(this, shelf, TOKENS), len(TOKENS))
        assert best == END
    with shelf_lab(family, PAGE, shelf, write_policy="write-back") as this:
        assert this.ask(TOKENS).cached == on_storage(this.spec, END)


@some
def test_write_back_stores_nothing_while_there_is_room(family):
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf, write_policy="write-back") as this:
        this.ask(TOKENS)
        settled(this)
        assert not shelf.snapshot()


@some
def test_what_was_cached_before_storage_came_is_stored_when_it_is_used(family):
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf) as this:
        this.ask(TOKENS)
        settled(this)
        this.parts.engine.call_storage(StorageCall(Verb.CLEAR))
        settled(this)
        assert not shelf.snapshot()
        this.ask(TOKENS)
        settled(this)
        assert everything(this, shelf)
    assert shelf.remove(Everything.EVERYTHING)


# -- retraction ------------------------------------------------------------------------------------


@kinds
def test_a_request_that_was_fetched_is_retracted_and_goes_on(family):
    shelf = filled(family)
    shelf.gate.set()
    with shelf_lab(family, PAGE, shelf, reserve_tokens=1) as this:
        engine = this.parts.engine
        this.submit("r", TOKENS, count=24)
        this.submit("other", prompt(PAGE, 7, 40), count=24)
        while engine.status(RequestId("r")).computed < END + 11:
            this.step()
        engine.retract(RequestId("r"))
        engine.check()
        evict_device(this.parts)
        this.drain()
        assert this.answers["r"].cached == on_storage(this.spec, END)
        assert this.recorder.computed_tokens == len(TOKENS) - END + 40 + 2 * 23
    with shelf_lab(family, PAGE, shelf) as this:
        grown = [*TOKENS, *prompt(PAGE, 8, 30)]
        assert this.ask(grown).cached.storage == END
        evict(this.parts, Tier.DEVICE, 0)
        assert this.ask(TOKENS, count=OUTPUT).cached.total == END

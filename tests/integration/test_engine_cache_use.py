"""One request kept out of the cache: "no-store" leaves nothing behind, "bypass" reads nothing, and
"off" is both; what it computes is its own while it runs, however it ends.
"""

import dataclasses
from contextlib import contextmanager

import numpy as np
import pytest

from stratakv.cache.records import CacheUse
from stratakv.core.config import EngineConfig
from stratakv.policy.admission import demand
from stratakv.policy.losses import LossCause
from stratakv.spec.retention import KeepBoundary, KeepChunk, KeepLive, KeepWindow
from stratakv.storage.memory import MemoryBackend
from stratakv.tree.nodes import TIERS
from tests.engines import (
    VOCABULARY,
    RecordingRunner,
    all_free,
    allocator,
    drain,
    evict_device,
    expected_tokens,
    greedy,
    on_device,
    on_host,
    on_storage,
    retract_youngest,
    run,
    token_engine,
    token_spec,
    tokens_of,
    without_anchor_bytes,
)
from tests.storage_cases import attach_backend, format_of

PAGE = 4
LONGEST = 100
STATE = token_spec(PAGE, KeepBoundary())
SPECS = {
    "anchor": token_spec(PAGE),
    "window": token_spec(PAGE, KeepWindow(10)),
    "chunk": token_spec(PAGE, KeepChunk(11)),
    "state": STATE,
    "state alone": without_anchor_bytes(STATE),
    "all": token_spec(PAGE, KeepBoundary(), KeepWindow(6), KeepLive(), KeepChunk(9)),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
NO_STORE, BYPASS, OFF = CacheUse.READ, CacheUse.STORE, CacheUse.NOTHING
PROMPT = [n * 7 % VOCABULARY for n in range(61)]
OTHER = PROMPT[::-1]


def engine(spec, pages=100, host=100, spare=30, **settings):
    """``pages``: device pages of the anchor; the other groups have the peaks of all that run, and
    ``spare`` more."""
    plain = {"page_tokens": PAGE, "max_running": 4, "max_model_len": LONGEST, "chunk_tokens": 9}
    plain |= {"step_tokens": 20, "reserve_tokens": 1, "snapshot_tokens": 8}
    config = EngineConfig(**{**plain, "load_back_threshold": 1, **settings})
    peak = demand(spec, LONGEST, LONGEST, config.chunk_tokens, 0).peak
    device = [pages, *(n * config.max_running + spare for n in peak[1:])]
    return token_engine(spec, config, device, [host] * len(device))


def kept_apart(name, tokens, use, count=9):
    return dataclasses.replace(greedy(name, tokens, count), use=use)


def ask(parts, tokens, use=CacheUse.ALL, count=9):
    """What of a prompt was cached, after checking its whole answer."""
    out = run(parts, kept_apart("r", tokens, use, count))["r"]
    assert tokens_of(out) == expected_tokens(tokens, count)
    parts.cache.progress.settle()
    return out[0].cached


def seen(parts):
    """Everything that the cache holds: where each page of the tree is, and what is free."""
    parts.cache.progress.settle()
    parts.engine.check()
    nodes = parts.cache.tiers.tree.internals.nodes
    states = {key: [int(state[row]) for state in nodes.state] for key, row in nodes.index.items()}
    return states, parts.cache.tiers.pools.stats()


@contextmanager
def nothing_left_by(parts):
    before, counters = seen(parts), parts.cache.tiers.pools.counters.snapshot()
    yield
    assert seen(parts) == before
    after = parts.cache.tiers.pools.counters.snapshot()
    moved = ("backup_pages", "evicted_device_pages", "evicted_host_pages", "snapshots")
    assert {name: after[name] for name in moved} == {name: counters[name] for name in moved}


def poison_what_is_cached(parts):
    """Whoever reads a page of the tree, on any tier, reads NaN."""
    nodes = parts.cache.tiers.tree.internals.nodes
    for tier in TIERS:
        for group in parts.spec.groups:
            pages = nodes.page[tier][group.id][nodes.rows()]
            allocator(parts, tier, group.id).poison(pages[pages >= 0])


# -- nothing is left behind ----------------------------------------------------------------------


@each_spec
@pytest.mark.parametrize("use", [NO_STORE, OFF])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_request_that_stores_nothing_leaves_all_as_it_was(spec, use, warm):
    with engine(spec) as parts:
        if warm:
            ask(parts, PROMPT)
        with nothing_left_by(parts):
            ask(parts, PROMPT[:41], use)
            ask(parts, PROMPT, use, count=35)
            ask(parts, OTHER, use)
        assert warm or all_free(parts)
        assert ask(parts, OTHER).total == 0, "somebody's pages were found after all"


@each_spec
@pytest.mark.parametrize("steps", [0, 1, 4, 12])
def test_nor_does_one_that_is_aborted(spec, steps):
    with engine(spec) as parts:
        ask(parts, PROMPT[:33])
        with nothing_left_by(parts):
            parts.engine.submit(kept_apart("r", PROMPT, NO_STORE, 30))
            for _ in range(steps):
                parts.engine.step()
            parts.engine.abort("r")
            drain(parts)


@each_spec
def test_nor_do_several_at_once_and_one_that_was_retracted(spec):
    """No page of another is read: each computes its own, and the retracted one again."""
    with engine(spec, host=0, cache="device") as parts, nothing_left_by(parts):
        prompts = [kept_apart(f"r{n}", PROMPT, NO_STORE, 30) for n in range(4)]
        for prompt in prompts:
            parts.engine.submit(prompt)
        outputs_of = {prompt.id: [] for prompt in prompts}
        for step in range(10_000):
            if not parts.engine.has_work():
                break
            if step == 14:
                retract_youngest(parts)
            for output in parts.engine.step():
                outputs_of[output.request].append(output)
        assert (
            parts.cache.tiers.pools.counters.retracted
            == parts.cache.tiers.pools.counters.retracted_unsaved
            == 1
        )
        for outputs in outputs_of.values():
            assert tokens_of(outputs) == expected_tokens(PROMPT, 30)
            assert outputs[0].cached == dataclasses.replace(on_device(spec, 0), use=NO_STORE)


@each_spec
def test_where_pages_run_short_such_requests_are_retracted_and_all_get_through(spec):
    with engine(spec, pages=40) as parts, nothing_left_by(parts):
        prompts = [kept_apart(f"r{n}", PROMPT[n:], NO_STORE, 35) for n in range(4)]
        for prompt, outputs in zip(prompts, run(parts, *prompts).values(), strict=True):
            assert tokens_of(outputs) == expected_tokens(prompt.tokens, 35)
        assert parts.cache.tiers.pools.counters.retracted > 0


# -- what is there is read -----------------------------------------------------------------------


@each_spec
def test_no_store_reads_what_is_there(spec):
    with engine(spec) as parts:
        ask(parts, PROMPT)
        hit = dataclasses.replace(on_device(spec, 60), use=NO_STORE)
        assert ask(parts, PROMPT, NO_STORE, count=30) == hit
        evict_device(parts)
        states = len(parts.cache.tiers.tree)
        hit = dataclasses.replace(on_host(spec, 60), use=NO_STORE)
        assert ask(parts, PROMPT, NO_STORE) == hit
        assert len(parts.cache.tiers.tree) == states


@pytest.mark.parametrize("rule", [KeepWindow(10), KeepChunk(11), KeepBoundary()])
def test_what_was_read_is_anybodys_once_it_is_behind(rule):
    """The lease stays where it is: only what a window at the newest token needs may be pinned."""
    with engine(token_spec(PAGE, rule)) as parts:
        ask(parts, PROMPT, count=1)
        cached = parts.cache.tiers.pools.stats()[1]
        assert cached.evictable == cached.total - cached.free > 0
        parts.engine.submit(kept_apart("r", PROMPT, NO_STORE, 35))
        parts.engine.step()
        assert parts.cache.tiers.pools.stats()[1].evictable < cached.evictable
        for _ in range(20):
            parts.engine.step()
        parts.engine.check()
        assert parts.cache.tiers.pools.stats()[1].evictable == cached.evictable
        assert len(drain(parts)) > 0


@each_spec
def test_nothing_of_it_is_stored_and_what_is_stored_is_read(spec):
    shelf = MemoryBackend(format_of(spec), 1 << 30)
    with engine(spec, prefetch_policy="wait-complete", prefetch_threshold=1) as parts:
        attach_backend(parts, shelf)
        ask(parts, PROMPT)
        stored = len(shelf.snapshot())
        ask(parts, OTHER, NO_STORE, count=35)
        assert len(shelf.snapshot()) == stored > 0
        assert parts.engine.flush()
        hit = dataclasses.replace(on_storage(spec, 60), use=NO_STORE)
        assert ask(parts, PROMPT, NO_STORE) == hit
        assert len(shelf.snapshot()) == stored


# -- nothing is read -----------------------------------------------------------------------------


@each_spec
@pytest.mark.parametrize("use", [BYPASS, OFF])
def test_bypass_reads_no_cached_page(spec, use):
    """Every page that is cached is wrong; so is each that another running request has."""
    with engine(spec) as parts:
        ask(parts, PROMPT)
        poison_what_is_cached(parts)
        nothing = dataclasses.replace(on_device(spec, 0), use=use)
        for count in (1, 12, 35):
            assert ask(parts, PROMPT, use, count) == nothing


def test_nor_after_it_was_retracted():
    with engine(SPECS["all"]) as parts:
        ask(parts, PROMPT)
        poison_what_is_cached(parts)
        parts.engine.submit(kept_apart("r", PROMPT, BYPASS, 30))
        out = [output for _ in range(14) for output in parts.engine.step()]
        retract_youngest(parts)
        parts.cache.progress.settle()
        poison_what_is_cached(parts)
        assert tokens_of(out + drain(parts)) == expected_tokens(PROMPT, 30)


@pytest.mark.parametrize("use", [CacheUse.ALL, BYPASS, OFF])
def test_what_a_request_that_reads_nothing_computes_again_is_no_loss(use):
    with engine(SPECS["window"], host=0, cache="device") as parts:
        parts.engine.submit(kept_apart("r", PROMPT, use, 30))
        for _ in range(14):
            parts.engine.step()
        losses = parts.cache.admission.losses
        before = losses.known
        # Nothing of it is left to go on from.
        retract_youngest(parts)
        evict_device(parts)
        drain(parts)
        assert parts.cache.tiers.pools.counters.retracted_unsaved == 1
        reads = CacheUse.READ in use
        assert (losses.lost[LossCause.DEVICE_RETRACTED] > 0) == reads
        assert (losses.known > before) == reads
        losses.check()


@pytest.mark.parametrize("use", [BYPASS, OFF])
def test_bypass_asks_storage_for_nothing(use):
    spec = SPECS["window"]
    shelf = MemoryBackend(format_of(spec), 1 << 30)
    with engine(spec, prefetch_policy="wait-complete", prefetch_threshold=1) as parts:
        attach_backend(parts, shelf)
        ask(parts, PROMPT)
        assert parts.engine.flush()
        asked, prefetcher = [], parts.cache.storage.prefetcher
        start, prefetcher.start = prefetcher.start, lambda *what: (asked.append(what), start(*what))
        assert ask(parts, PROMPT, use).total == 0
        assert not asked
        assert ask(parts, OTHER, NO_STORE).total == 0
        assert len(asked) == 1


def test_bypass_does_not_wait_for_one_that_computes_the_same_nor_is_it_waited_for():
    with engine(SPECS["window"]) as parts:
        recorder = RecordingRunner(parts)
        prompts = [
            kept_apart("a", PROMPT, BYPASS, 2),
            kept_apart("b", PROMPT, CacheUse.ALL, 2),
            kept_apart("c", PROMPT, BYPASS, 2),
            kept_apart("d", PROMPT, CacheUse.ALL, 2),
        ]
        out = run(parts, *prompts)
        assert {outputs[0].cached.total for outputs in (out["a"], out["b"], out["c"])} == {0}
        assert out["d"][0].cached.total == 60
        assert recorder.computed_tokens == 3 * 61 + 1 + 4


def test_bypass_starts_at_once_beside_one_that_computes_the_same():
    with engine(SPECS["window"]) as parts:
        parts.engine.submit(kept_apart("first", PROMPT, CacheUse.ALL))
        parts.engine.submit(kept_apart("apart", PROMPT[:9], BYPASS, 1))
        assert [output.request for output in parts.engine.step()] == ["apart"]
        drain(parts)


def test_its_end_lets_nobody_in_who_waits_for_the_other():
    with engine(SPECS["window"]) as parts:
        parts.engine.submit(kept_apart("apart", PROMPT[:9], OFF, 1))
        parts.engine.submit(kept_apart("filler", OTHER, CacheUse.ALL))
        parts.engine.submit(kept_apart("first", PROMPT, CacheUse.ALL))  # 2 tokens are left for it
        parts.engine.submit(kept_apart("second", PROMPT, CacheUse.ALL))
        assert [output.request for output in parts.engine.step()] == ["apart"]
        cached = {output.request: output.cached for output in drain(parts) if output.cached}
        assert (cached["first"].total, cached["second"].total) == (0, 60)


def test_bypass_makes_nothing_warmer():
    with engine(SPECS["window"]) as parts:
        ask(parts, PROMPT)
        nodes = parts.cache.tiers.tree.internals.nodes
        rows = nodes.rows()
        before = nodes.hits[rows].copy(), [rank[rows].copy() for rank in nodes.rank]
        ask(parts, PROMPT, OFF)
        after = nodes.hits[rows], [rank[rows] for rank in nodes.rank]
        np.testing.assert_equal(after, before)


# -- what bypass leaves --------------------------------------------------------------------------


@each_spec
def test_bypass_leaves_what_it_has_at_its_end(spec):
    with engine(spec) as parts:
        assert ask(parts, PROMPT, BYPASS, count=4).total == 0  # its last token has no KV: 64 have
        known = PROMPT + expected_tokens(PROMPT, 4)
        assert ask(parts, known) == on_device(spec, 64)
        evict_device(parts)
        assert ask(parts, known) == on_host(spec, 64)


@each_spec
def test_what_is_there_already_stays_and_is_not_kept_twice(spec):
    with engine(spec) as parts:
        ask(parts, PROMPT, count=4)
        states, stats = seen(parts)
        ask(parts, PROMPT, BYPASS, count=4)
        assert seen(parts) == (states, stats)
        evict_device(parts)
        ask(parts, PROMPT, BYPASS, count=4)
        known = PROMPT + expected_tokens(PROMPT, 4)
        assert ask(parts, known) == on_device(spec, 64)


def test_an_aborted_bypass_leaves_the_pages_that_it_has():
    with engine(SPECS["window"]) as parts:
        parts.engine.submit(kept_apart("r", PROMPT, BYPASS, 9))
        for _ in range(4):
            parts.engine.step()
        assert parts.cache.tiers.pools.stats()[0].evictable == 0, (
            "nothing is handed over while it runs"
        )
        parts.engine.abort("r")
        drain(parts)
        assert ask(parts, PROMPT) == on_device(SPECS["window"], 36)


def test_such_requests_never_hold_more_than_was_booked():
    """Windows never run short, so what a lease holds and what is the request's own must fit the
    peak that was booked, to the page."""
    spec = SPECS["all"]
    with engine(spec, max_running=2, spare=0) as parts:
        ask_twice = [
            kept_apart(f"{n}{use}", PROMPT[: 17 + 11 * n], use, 40)
            for n in range(4)
            for use in (CacheUse.ALL, NO_STORE, BYPASS)
        ]
        for prompt, outputs in zip(ask_twice, run(parts, *ask_twice).values(), strict=True):
            assert tokens_of(outputs) == expected_tokens(prompt.tokens, 40)

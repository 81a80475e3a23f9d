"""Every token that was cached and had to be computed is counted once, with its tier and reason."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from stratakv.cache.prices import AdmissionRequest
from stratakv.cache.records import CacheUse
from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId
from stratakv.core.page_keys import PageHasher
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.tree.nodes import Tier
from tests.engines import (
    allocator,
    drain,
    evict,
    evict_device,
    greedy,
    run,
    token_engine,
    token_spec,
)
from tests.small_cache import SmallCache

WINDOW, STATE = token_spec(4, KeepWindow(10)), token_spec(4, KeepBoundary())
PROMPT = [(7 * n) % 97 for n in range(41)]
ON_BOUNDARY = PROMPT[:40]


def engine(spec=WINDOW, host=100, **settings):
    plain = {"page_tokens": 4, "max_running": 3, "max_model_len": 100, "chunk_tokens": 20}
    plain |= {"step_tokens": 60, "reserve_tokens": 1, "load_back_threshold": 1}
    plain |= {} if host else {"cache": "device"}
    pages = [100] * len(spec.groups)
    return token_engine(
        spec, EngineConfig(**{**plain, **settings}), pages, [host] * len(spec.groups)
    )


def lost(parts):
    """By tier and reason; with what was cached, all that was known."""
    stats = parts.engine.stats()
    parts.engine.check()
    cached = stats.cached_device_tokens + stats.cached_host_tokens + stats.cached_storage_tokens
    assert stats.known_tokens == cached + sum(stats.lost_tokens.values())
    return {cause: tokens for cause, tokens in stats.lost_tokens.items() if tokens}


def test_a_first_prompt_and_a_whole_hit_lose_nothing():
    with engine() as parts:
        run(parts, greedy("first", PROMPT, 1))
        run(parts, greedy("again", PROMPT, 1))
        assert lost(parts) == {}
        assert parts.engine.stats().known_tokens == 40


def test_what_no_prompt_had_before_is_no_loss():
    with engine() as parts:
        run(parts, greedy("first", PROMPT, 1))
        run(parts, greedy("longer", [*PROMPT, *PROMPT], 1))
        assert lost(parts) == {}


def test_below_the_threshold_of_a_load():
    with engine(load_back_threshold=41) as parts:
        run(parts, greedy("first", PROMPT, 1))
        evict_device(parts)
        run(parts, greedy("again", PROMPT, 1))
        assert lost(parts) == {("host", "below_threshold"): 40}


def test_no_device_page_for_a_load(monkeypatch):
    with engine() as parts:
        run(parts, greedy("first", PROMPT, 1))
        evict_device(parts)
        space = allocator(parts, Tier.DEVICE, 1)
        alloc, fails = space.alloc, [True]
        monkeypatch.setattr(space, "alloc", lambda n: None if fails and fails.pop() else alloc(n))
        run(parts, greedy("again", PROMPT, 1))
        assert lost(parts) == {("host", "device_capacity"): 40}


@pytest.mark.parametrize(
    ("spec", "reason"), [(WINDOW, "window_incomplete"), (STATE, "state_missing")]
)
def test_another_group_has_not_what_it_needs(spec, reason):
    with engine(spec, host=0) as parts:
        run(parts, greedy("first", PROMPT, 1))
        evict(parts, Tier.DEVICE, 1)
        run(parts, greedy("again", PROMPT, 1))
        assert lost(parts) == {("device", reason): 40}
    with engine(spec) as parts:
        run(parts, greedy("first", PROMPT, 1))
        evict_device(parts)
        evict(parts, Tier.HOST, 1)
        run(parts, greedy("again", PROMPT, 1))
        assert lost(parts) == {("host", reason): 40}


def test_a_branch_in_the_middle_of_what_was_kept_at_its_end():
    with engine(STATE) as parts:
        run(parts, greedy("first", PROMPT, 1))
        run(parts, greedy("branch", [*PROMPT[:22], 1, 2, 3], 1))
        assert lost(parts) == {("device", "state_missing"): 20}


def test_the_page_of_the_token_that_is_always_computed():
    with engine() as parts:
        run(parts, greedy("first", ON_BOUNDARY, 1))
        run(parts, greedy("again", ON_BOUNDARY, 1))
        assert lost(parts) == {("device", "last_token"): 4}
        evict_device(parts)
        run(parts, greedy("from host", ON_BOUNDARY, 1))
        assert lost(parts) == {("device", "last_token"): 4, ("host", "last_token"): 4}
        assert parts.engine.stats().cached_host_tokens == 36


@pytest.mark.parametrize("pages", [1, 10])
@pytest.mark.parametrize("host", [0, 100])
def test_what_has_left_every_tier(host, pages):
    prompt = PROMPT[: 4 * pages + 1]
    with engine(host=host) as parts:
        run(parts, greedy("first", prompt, 1))
        evict_device(parts)
        for group in (1, 0):
            evict(parts, Tier.HOST, group)
        run(parts, greedy("again", prompt, 1))
        assert lost(parts) == {("host" if host else "device", "evicted"): 4 * pages}
        run(parts, greedy("third", prompt, 1))  # it is there again
        assert parts.engine.stats().cached_device_tokens == 4 * pages


def test_what_has_left_and_could_not_have_been_used_is_no_loss():
    """The page of the token that is always computed."""
    with engine(host=0) as parts:
        run(parts, greedy("first", ON_BOUNDARY, 1))
        evict_device(parts)
        run(parts, greedy("again", ON_BOUNDARY, 1))
        assert lost(parts) == {("device", "evicted"): 36}


def test_what_a_flush_dropped_is_nobodys_loss():
    with engine() as parts:
        run(parts, greedy("first", PROMPT, 1))
        assert parts.engine.flush()
        run(parts, greedy("again", PROMPT, 1))
        assert lost(parts) == {}


@pytest.mark.parametrize("spec", [WINDOW, STATE])
def test_one_that_was_retracted_without_a_place_on_the_host(spec):
    with engine(spec, host=0) as parts:
        parts.engine.submit(greedy("r", PROMPT, 9))
        out = []
        while len(out) < 4:
            out += parts.engine.step()
        parts.engine.retract(RequestId("r"))
        evict_device(parts)
        drain(parts)
        assert lost(parts) == {("device", "retracted"): 41 + 3}


def test_one_that_comes_back_from_the_host_loses_nothing():
    with engine() as parts:
        parts.engine.submit(greedy("r", PROMPT, 9))
        while not parts.engine.step():
            pass
        parts.engine.retract(RequestId("r"))
        evict_device(parts)
        drain(parts)
        assert lost(parts) == {}


def test_one_that_was_aborted_before_its_turn():
    with engine() as parts:
        run(parts, greedy("first", PROMPT, 1))
        parts.engine.submit(greedy("r", PROMPT, 1))
        parts.engine.abort(RequestId("r"))
        evict_device(parts)
        parts.engine.submit(greedy("r", PROMPT[:9], 1))
        parts.engine.abort(RequestId("r"))
        drain(parts)
        assert lost(parts) == {("device", "aborted"): 40, ("host", "aborted"): 8}


def test_what_a_request_does_not_want_to_read_is_no_loss():
    with engine() as parts:
        run(parts, greedy("first", PROMPT, 1))
        for use in (CacheUse.STORE, CacheUse.NOTHING):
            run(parts, replace(greedy("again", PROMPT, 1), use=use))
            parts.engine.submit(replace(greedy("left", PROMPT, 1), use=use))
            parts.engine.abort(RequestId("left"))
            drain(parts)
        assert lost(parts) == {}
        assert parts.engine.stats().known_tokens == 0
        run(parts, replace(greedy("reads", PROMPT, 1), use=CacheUse.READ))
        assert parts.engine.stats().known_tokens == 40


@pytest.mark.parametrize(
    ("use", "known"),
    [(CacheUse.ALL, 40), (CacheUse.READ, 40), (CacheUse.STORE, 0), (CacheUse.NOTHING, 0)],
)
def test_the_cache_bills_who_leaves_for_what_it_would_have_read(use, known):
    """Whoever calls need not look at ``use``; nor is anything matched in vain."""
    with engine() as parts:
        run(parts, greedy("first", PROMPT, 1))
        prefix = PageHasher(parts.plan.namespaces.of("", ""), 4)
        prefix.extend(np.array(PROMPT, np.int32))
        asked = AdmissionRequest(
            prefix=prefix, tokens=41, total_tokens=42, request=RequestId("left"), use=use
        )
        match, matched = parts.cache.admission.match, []
        with mock.patch.object(
            parts.cache.admission,
            "match",
            lambda *what: (matched.append(what), match(*what))[1],
        ):
            parts.cache.admission.abandon(asked)
        assert (parts.cache.admission.losses.known, bool(matched)) == (known, bool(known))
        parts.cache.admission.losses.check()


def test_one_that_never_asked_storage_is_billed_too_when_it_leaves():
    cache = SmallCache(WINDOW, 16)
    cache.serve(PROMPT[:9])
    known = cache.admission.losses.known
    cache.admission.abandon(cache.ask(PROMPT[:9]))
    assert cache.admission.losses.known == known + 8
    cache.admission.losses.check()


def test_without_reuse_nothing_is_known():
    with engine(host=0, cache="off") as parts:
        for name in ("first", "again"):
            run(parts, greedy(name, PROMPT, 1))
        parts.engine.submit(greedy("r", PROMPT, 1))
        parts.engine.abort(RequestId("r"))
        drain(parts)
        assert parts.engine.stats().known_tokens == 0
        assert lost(parts) == {}

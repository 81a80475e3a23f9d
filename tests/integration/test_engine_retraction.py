"""Retraction: where pages run short the youngest leaves with everything it needs to go on, comes
back ahead of new requests, and says what it would have said anyway.
"""

import dataclasses
import threading
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from stratakv.cache.records import Admission, Refusal
from stratakv.core.config import EngineConfig
from stratakv.core.ids import NONE, RequestId
from stratakv.engine.request import FinishReason, Phase
from stratakv.policy.admission import demand
from stratakv.spec.retention import KeepBoundary, KeepChunk, KeepLive, KeepWindow, needed
from stratakv.testing.transfer_ends import CopyHold, HookedCopier
from stratakv.tiers import flights
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.cpu import DEFAULT_COPIER
from stratakv.tree.nodes import Tier
from tests.engines import (
    VOCABULARY,
    RecordingRunner,
    assert_nothing_left,
    computing,
    drain,
    ended,
    evict_device,
    expected_tokens,
    greedy,
    run,
    token_engine,
    token_spec,
    tokens_of,
)

PAGE = 4
SPECS = {
    "anchor": token_spec(PAGE),
    "window": token_spec(PAGE, KeepWindow(10)),
    "chunk": token_spec(PAGE, KeepChunk(11)),
    "state": token_spec(PAGE, KeepBoundary()),
    "all": token_spec(PAGE, KeepBoundary(), KeepWindow(6), KeepLive()),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
LONGEST = 60
PROMPT = [n * 7 % VOCABULARY for n in range(97)]


def engine(spec, pages=100, host=300, copier=DEFAULT_COPIER, **settings):
    """``pages``: device pages of the anchor; the other groups have the peaks of all that run."""
    plain = {"page_tokens": PAGE, "max_running": 4, "max_model_len": 100, "chunk_tokens": 9}
    plain |= {"step_tokens": 20, "reserve_tokens": 1, "snapshot_tokens": 8}
    config = EngineConfig(**{**plain, "load_back_threshold": 1, **settings})
    peak = demand(spec, 100, 100, config.chunk_tokens, 0).peak
    device = [pages, *(n * config.max_running for n in peak[1:])]
    return token_engine(spec, config, device, [host] * len(device), copier)


@contextmanager
def retractions(parts):
    """Every retraction as (who, who else ran, what was retracted), while the engine works on."""
    seen, retract = [], parts.cache.retract

    def watch(row, tokens):
        running = computing(parts)
        (request,) = (one for one in running if one.row == row)
        others = [one for one in running if one.row != row]
        retracted = retract(row, tokens)
        seen.append((request, others, retracted))
        return retracted

    parts.cache.retract = watch
    yield seen
    parts.cache.retract = retract


def admissions_of(parts):
    """Ids of requests in the order in which they get a row, from now on."""
    seen, admission = [], parts.cache.admission
    admit, resume = admission.admit, admission.resume

    def watch(enter, asked):
        answer = enter()
        if isinstance(answer, Admission):
            seen.append(asked.request)
        return answer

    def resumed(retracted, asked):
        enter = partial(resume, retracted, asked)
        saved = retracted in parts.cache.retraction  # else it is admitted
        return watch(enter, asked) if saved else enter()

    admission.admit = lambda asked: watch(partial(admit, asked), asked)
    admission.resume = resumed
    return seen


def start(parts, name, tokens, count, computed):
    """Submit a request and step until ``computed`` of its tokens have their KV."""
    parts.engine.submit(greedy(name, tokens, count))
    out = []
    while computed_of(parts, name) < computed:
        out += parts.engine.step()
    assert computed_of(parts, name) == computed
    return out


def status_of(parts, name):
    return parts.engine.status(RequestId(name))


def computed_of(parts, name):
    return status_of(parts, name).computed


def retract(parts, name):
    parts.engine.retract(RequestId(name))
    parts.engine.check()
    request = status_of(parts, name)
    assert request.phase is Phase.RETRACTED
    return request.retracted


def held_copier(direction):
    hold = CopyHold()

    def before_copy(of, group, layers):
        if of is direction:
            hold(of, group, layers)

    return hold, HookedCopier(DEFAULT_COPIER, before_copy)


# -- pools of any size ---------------------------------------------------------------------------


def family(count=8, temperature=0.0, longest=LONGEST):
    """Prompts of which some share a stem; all may grow to about ``longest`` tokens."""
    rng = np.random.default_rng(5)
    stem = rng.integers(0, VOCABULARY, 14).tolist()
    prompts = []
    for n in range(count):
        own = rng.integers(0, VOCABULARY, int(rng.integers(1, 12))).tolist()
        tokens = stem[: n % 3 * 7] + own
        prompt = greedy(
            f"r{n}", tokens, int(rng.integers(longest // 2 - 5, longest - len(tokens) + 1))
        )
        sampling = dataclasses.replace(prompt.sampling, temperature=temperature, seed=n)
        prompts.append(dataclasses.replace(prompt, sampling=sampling))
    return prompts


def serve(parts, prompts):
    """What each says; every page accounted for at every step, usage told with the first token."""
    out = {prompt.id: [] for prompt in prompts}
    for prompt in prompts:
        parts.engine.submit(prompt)
    while parts.engine.has_work():
        for output in parts.engine.step():
            out[output.request].append(output)
        parts.engine.check()
    for prompt in prompts:
        reported = [output.cached is not None for output in out[prompt.id]]
        assert reported == [True] + [False] * (prompt.sampling.max_tokens - 1)
        assert ended(out[prompt.id]) is FinishReason.LENGTH
    stats = parts.engine.stats()
    assert stats.prompt_tokens == sum(len(prompt.tokens) for prompt in prompts)
    assert stats.output_tokens == sum(prompt.sampling.max_tokens for prompt in prompts)
    assert_nothing_left(parts)
    return {name: tokens_of(outputs) for name, outputs in out.items()}


@each_spec
@pytest.mark.parametrize("host", [300, 25, 0])
@pytest.mark.parametrize(
    "level", [0, 2, *(pytest.param(level, marks=pytest.mark.long) for level in (1, 3, 4))]
)
def test_pools_from_one_request_to_all_of_them(spec, host, level):
    """No token is lost or repeated, whoever has to leave and whether or not it could be saved."""
    prompts = family()
    one = -(-LONGEST // PAGE)
    pages = (one, one + 3, 2 * one - 4, 3 * one, len(prompts) * one)[level]
    settings = {} if host else {"cache": "device"}
    with engine(spec, pages, host, max_model_len=LONGEST, **settings) as parts:
        with retractions(parts) as seen:
            generated = serve(parts, prompts)
        for prompt in prompts:
            count = prompt.sampling.max_tokens
            assert generated[prompt.id] == expected_tokens(prompt.tokens.tolist(), count)
        counters = parts.cache.tiers.pools.counters
        assert counters.retracted == len(seen)
        assert bool(seen) == (level < 3)
        assert counters.retracted_unsaved == len(seen) if not host else True
        if host == 300:
            assert counters.retracted_unsaved == 0
        for request, others, _ in seen:  # nobody goes while it runs alone, and no elder one
            assert others
            assert all(other.serial < request.serial for other in others)


@each_spec
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.long)])
def test_every_pool_from_one_request_to_all_of_them(spec, stride):
    """Whatever the room: every token right, every page accounted for, and nothing unsaved."""
    longest = 36
    prompts = family(4, longest=longest)
    one = -(-longest // PAGE)
    expected = {p.id: expected_tokens(p.tokens.tolist(), p.sampling.max_tokens) for p in prompts}
    retracted = []
    for pages in range(one, len(prompts) * one + 1, stride):
        with engine(spec, pages, max_model_len=longest) as parts:
            assert serve(parts, prompts) == expected, f"{pages} pages"
            assert parts.cache.tiers.pools.counters.retracted_unsaved == 0, f"{pages} pages"
            retracted.append(parts.cache.tiers.pools.counters.retracted)
    assert sum(count > 0 for count in retracted) > one // stride
    assert not any(retracted[-one // stride :]), "all of them fit"


@each_spec
@pytest.mark.parametrize("host", [300, 0])
def test_a_sampled_stream_goes_on_as_if_nothing_had_happened(spec, host):
    prompts = family(temperature=1.0)
    settings = {} if host else {"cache": "device"}
    with engine(spec, 200, host, **settings) as parts:
        expected = serve(parts, prompts)
        assert parts.cache.tiers.pools.counters.retracted == 0
    with engine(spec, 25, host, **settings) as parts:
        assert serve(parts, prompts) == expected
        assert parts.cache.tiers.pools.counters.retracted > 2


# -- what is saved -------------------------------------------------------------------------------

IN_MID_PREFILL = {8: {"chunk_tokens": 8}, 9: {"snapshot_tokens": 16}}
"""Tokens computed, and what stops there: at a milestone, whose state is the tree's now, and off a
boundary. Where a milestone costs a state, a chunk of 9 tokens would be cut at 8."""


@each_spec
@pytest.mark.parametrize("prompt_tokens", [13, 24])
@pytest.mark.parametrize("computed", [*range(24, 38), *IN_MID_PREFILL])
def test_exactly_what_every_group_needs_is_saved(spec, prompt_tokens, computed):
    """In mid-prefill and while decoding, on and off a page boundary: as ``needed`` says."""
    with engine(spec, **IN_MID_PREFILL.get(computed, {})) as parts:
        out = start(parts, "r", PROMPT[:prompt_tokens], 40, computed)
        parts.cache.progress.settle()
        nodes, rule = (
            parts.cache.tiers.tree.internals.nodes,
            {g.id: g.retention for g in spec.groups},
        )
        whole = computed // PAGE
        (lease,) = parts.cache.tiers.tree.leases
        path = lease.path.copy()
        missing = 0
        wanted = {g: needed(rule[g], computed, PAGE) for g in rule}
        before = parts.cache.tiers.pools.counters.retracted_pages
        on_host = {g: nodes.page[Tier.HOST][g][path] != NONE for g in rule}
        retracted = retract(parts, "r")
        live = {page.group: page for page in retracted.live}
        assert len(live) == len(retracted.live)
        for group in spec.groups:
            span = wanted[group.id]
            if group.id in live:  # off a boundary, or a state that no snapshot was made of
                span = span[:-1]
                at = NONE if group.stateful else computed // PAGE
                assert live[group.id].index == at
                assert group.stateful or computed % PAGE
                missing += 1
            assert retracted.starts[group.id] == (span.start if len(span) else whole)
            assert len(span) + (group.id in live) == len(wanted[group.id])
            pinned = nodes.pins[Tier.HOST][group.id][path]
            assert np.flatnonzero(pinned).tolist() == list(span)
            missing += int((~on_host[group.id][list(span)]).sum())
        assert (retracted.tokens, retracted.end) == (computed, whole)
        assert parts.cache.tiers.pools.counters.retracted_pages - before == missing
        out += drain(parts)
        assert tokens_of(out) == expected_tokens(PROMPT[:prompt_tokens], 40)
        assert_nothing_left(parts)


@each_spec
@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("computed", [*IN_MID_PREFILL, 20, 31, 32])
def test_nothing_is_computed_twice(spec, gone, computed):
    """Neither when its pages still lie on the device nor when others have taken them."""
    with engine(spec, **IN_MID_PREFILL.get(computed, {})) as parts:
        out = start(parts, "r", PROMPT[:20], 30, computed)
        parts.cache.progress.settle()
        retract(parts, "r")
        if gone:
            evict_device(parts)
            free = [pool.free == pool.total for pool in parts.cache.tiers.pools.stats()]
            assert all(free[: len(spec.groups)])
        recorder = RecordingRunner(parts)
        out += drain(parts)
        assert recorder.computed_tokens == 20 + 29 - computed
        assert tokens_of(out) == expected_tokens(PROMPT[:20], 30)
        if gone:
            assert parts.cache.tiers.pools.counters.load_pages > computed // PAGE - 1


@each_spec
def test_a_save_is_several_bounded_plans(spec, monkeypatch):
    """A copier that has gigabytes to save must not keep everybody else waiting."""
    room, failing = 2 * spec.groups[0].page_bytes, [True]
    monkeypatch.setattr(flights, "PLAN_BYTES", room)

    def fail(direction, group, layers):
        del direction, group, layers
        if failing[0]:
            raise OSError("seeded")

    with engine(spec, copier=HookedCopier(DEFAULT_COPIER, fail)) as parts:
        out = start(parts, "r", PROMPT[:20], 30, 38)
        parts.cache.progress.settle()
        failing[0] = False
        plans, submit = [], parts.transfer.submit

        def counting(plan):
            plans.append(plan)
            return submit(plan)

        monkeypatch.setattr(parts.transfer, "submit", counting)
        retract(parts, "r")
        sizes = [
            sum(len(copy.device) * spec.groups[copy.group].page_bytes for copy in plan.copies)
            for plan in plans
        ]
        assert max(sizes) <= room
        assert len(sizes) >= 5 + 1  # nine pages of the anchor, and what is live
        saved = sum(len(copy.device) for plan in plans for copy in plan.copies)
        assert saved == parts.cache.tiers.pools.counters.retracted_pages
        parts.cache.progress.settle()
        evict_device(parts)
        out += drain(parts)
        assert tokens_of(out) == expected_tokens(PROMPT[:20], 30)
        assert parts.cache.tiers.pools.counters.retracted_unsaved == 0
        assert_nothing_left(parts)


# -- whose turn it is ----------------------------------------------------------------------------


def test_those_that_left_come_back_in_order_and_before_new_ones():
    with engine(SPECS["window"], max_running=3, step_tokens=30) as parts:
        for n in range(5):
            parts.engine.submit(greedy(str(n), [n, *PROMPT[:9]], 8))
        parts.engine.step()
        assert parts.engine.stats().running == 3
        for name in "021":
            retract(parts, name)
        order = admissions_of(parts)
        out = drain(parts)
        assert order == list("01234")
        for n in range(5):
            generated = tokens_of([output for output in out if output.request == str(n)])
            assert generated == expected_tokens([n, *PROMPT[:9]], 8)


def test_a_new_request_waits_until_the_one_that_left_is_back():
    """There is room for the small one all the while."""
    with engine(SPECS["anchor"], pages=12, max_model_len=44) as parts:
        parts.engine.submit(greedy("elder", PROMPT[:20], 24))
        parts.engine.submit(greedy("younger", [9, *PROMPT[:10]], 20))
        order = admissions_of(parts)
        while parts.cache.tiers.pools.counters.retracted == 0:
            parts.engine.step()
        parts.engine.submit(greedy("new", [5], 2))
        drain(parts)
        assert order == ["elder", "younger", "younger", "new"]


def test_one_that_computes_what_others_wait_for_may_leave():
    """They wait for its pages by key; when it goes, one of them computes the rest."""
    with engine(SPECS["all"]) as parts:
        for name in "ab":
            parts.engine.submit(greedy(name, PROMPT[:40], 5))
        parts.engine.step()
        assert status_of(parts, "b").phase is Phase.WAITING
        retract(parts, "a")
        out = drain(parts)
        for name in "ab":
            generated = tokens_of([output for output in out if output.request == name])
            assert generated == expected_tokens(PROMPT[:40], 5)
        assert_nothing_left(parts)


# -- where it cannot be saved --------------------------------------------------------------------


@each_spec
@pytest.mark.parametrize("host", [0, 1, 3])
@pytest.mark.parametrize("computed", [9, 30, 32])
def test_without_host_room_it_is_recomputed(spec, host, computed):
    settings = {"snapshot_tokens": 16, "cache": "host" if host else "device"}
    with engine(spec, host=host, **settings) as parts:
        out = start(parts, "r", PROMPT[:20], 30, computed)
        retracted = retract(parts, "r")
        counters = parts.cache.tiers.pools.counters
        saved = retracted in parts.cache.retraction
        assert saved == (computed == 9 and host == 3)
        assert counters.retracted_unsaved == (not saved)
        assert (counters.retracted_pages > 0) == saved
        evict_device(parts)
        out += drain(parts)
        assert tokens_of(out) == expected_tokens(PROMPT[:20], 30)
        assert [output.cached is not None for output in out] == [True] + [False] * 29
        assert_nothing_left(parts)


@each_spec
@pytest.mark.parametrize("group", [0, 1])
def test_a_save_that_fails_means_recompute(spec, group):
    """Nothing of it may be read: what the copier did not write is NaN."""
    group, failing = min(group, len(spec.groups) - 1), [False]

    def fail(direction, of, layers):
        del layers
        if failing[0] and of == group and direction is Direction.BACKUP:
            raise OSError("seeded")

    with engine(spec, copier=HookedCopier(DEFAULT_COPIER, fail)) as parts:
        out = start(parts, "r", PROMPT[:20], 30, 30)
        failing[0] = True
        retracted = retract(parts, "r")
        assert retracted in parts.cache.retraction
        parts.cache.progress.settle()
        failing[0] = False
        assert retracted not in parts.cache.retraction
        assert parts.cache.tiers.pools.counters.retracted_unsaved == 1
        parts.engine.check()
        evict_device(parts)
        out += drain(parts)
        assert tokens_of(out) == expected_tokens(PROMPT[:20], 30)
        assert_nothing_left(parts)


@each_spec
def test_another_ones_failed_backup_is_nothing_to_a_request_without_a_full_page(spec, monkeypatch):
    failing = [False]

    def fail(direction, group, layers):
        del direction, group, layers
        if failing[0]:
            raise OSError("seeded")

    with engine(spec, copier=HookedCopier(DEFAULT_COPIER, fail)) as parts:
        parts.engine.submit(greedy("other", PROMPT[:20], 9))
        out = start(parts, "r", PROMPT[:2], 9, 3)
        retracted = retract(parts, "r")
        parts.cache.progress.settle()
        failing[0] = True
        with monkeypatch.context() as patch:
            patch.setattr(  # it does not come back yet
                parts.cache.admission, "resume", lambda *_: Refusal.SAVING
            )
            for _ in range(3):
                out += parts.engine.step()
            parts.cache.progress.settle()
        failing[0] = False
        assert parts.cache.tiers.pools.counters.backup_failed_pages > 0
        assert retracted in parts.cache.retraction
        out += drain(parts)
        for name, count in (("r", 2), ("other", 20)):
            generated = tokens_of([output for output in out if output.request == name])
            assert generated == expected_tokens(PROMPT[:count], 9)


@each_spec
def test_off_recomputes_whoever_had_to_leave(spec):
    prompts = family()
    with engine(spec, 20, 0, cache="off") as parts:
        generated = serve(parts, prompts)
        for prompt in prompts:
            count = prompt.sampling.max_tokens
            assert generated[prompt.id] == expected_tokens(prompt.tokens.tolist(), count)
        counters = parts.cache.tiers.pools.counters
        assert counters.retracted == counters.retracted_unsaved > 0


# -- aborts --------------------------------------------------------------------------------------


def abort(parts, name):
    parts.engine.abort(RequestId(name))
    parts.engine.check()
    assert parts.engine.status(RequestId(name)) is None


@each_spec
@pytest.mark.parametrize("computed", [9, 30, 32])
def test_an_abort_while_retracted(spec, computed):
    with engine(spec, snapshot_tokens=16) as parts:
        start(parts, "r", PROMPT[:20], 30, computed)
        retract(parts, "r")
        parts.cache.progress.settle()
        abort(parts, "r")
        assert len(parts.cache.retraction) == 0
        assert ended(drain(parts)) is FinishReason.ABORT
        generated = tokens_of(run(parts, greedy("next", PROMPT[:40], 5))["next"])
        assert generated == expected_tokens(PROMPT[:40], 5)
        assert_nothing_left(parts)


@each_spec
@pytest.mark.parametrize("computed", [9, 30, 32])
def test_an_abort_while_its_save_is_in_flight(spec, computed):
    hold, copier = held_copier(Direction.BACKUP)
    with engine(spec, copier=copier, snapshot_tokens=16) as parts:
        try:
            start(parts, "r", PROMPT[:20], 30, computed)
            live = list(retract(parts, "r").live)
            assert parts.cache.progress.busy
            abort(parts, "r")
            host = parts.cache.tiers.pools.tiers[
                Tier.HOST
            ]  # what is still being written is not free
            for page in live:
                space = host[page.group]
                assert page.host not in space.next(space.available())
        finally:
            hold.allow(1_000)
        assert ended(drain(parts)) is FinishReason.ABORT
        assert len(parts.cache.retraction) == 0
        assert_nothing_left(parts)


@each_spec
def test_one_whose_save_is_in_flight_waits_for_it(spec):
    """Its live pages are nobody's until they have arrived; others run meanwhile."""
    hold, copier = held_copier(Direction.BACKUP)
    with engine(spec, copier=copier) as parts:
        try:
            out = start(parts, "r", PROMPT[:20], 30, 30)
            retract(parts, "r")
            parts.engine.submit(greedy("other", [1, 2], 3))
            parts.engine.admit()
            assert status_of(parts, "r").phase is Phase.RETRACTED
            assert status_of(parts, "other").phase is Phase.WAITING
        finally:
            hold.allow(1_000)
        out += [output for output in drain(parts) if output.request == "r"]
        assert tokens_of(out) == expected_tokens(PROMPT[:20], 30)
        assert_nothing_left(parts)


@each_spec
@pytest.mark.parametrize("submitted", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_an_abort_or_another_retraction_while_its_load_is_begun_or_in_flight(
    spec, again, submitted
):
    """What is landing is neither saved nor anybody else's before it is there."""
    hold, copier = held_copier(Direction.LOAD)
    with engine(spec, copier=copier) as parts:
        out = start(parts, "r", PROMPT[:20], 30, 30)
        retract(parts, "r")
        parts.cache.progress.settle()
        evict_device(parts)
        parts.engine.admit()
        assert status_of(parts, "r").phase is Phase.PREFILLING
        if submitted:
            parts.cache.tiers.copies.flights.submit_loads()
        assert parts.cache.progress.busy
        threading.Timer(0.05, hold.allow, (1_000,)).start()
        if again:
            retract(parts, "r")
        else:
            abort(parts, "r")
        parts.engine.submit(greedy("other", [1, 2], 60))  # takes what is free too early
        outputs = drain(parts)
        other = [output for output in outputs if output.request == "other"]
        assert tokens_of(other) == expected_tokens([1, 2], 60)
        out += [output for output in outputs if output.request == "r"]
        whole = expected_tokens(PROMPT[:20], 30)
        assert tokens_of(out) == (whole if again else whole[:11])
        assert_nothing_left(parts)


def test_a_retraction_counts_no_use_of_pages():
    """Prompts that share nothing: whoever comes back has used its pages before."""
    for host in (300, 0):
        with engine(SPECS["window"], pages=40, host=host) as parts:
            for at in range(3):
                parts.engine.submit(greedy(f"r{at}", [at, *PROMPT[:20]], 60))
            drain(parts)
            assert parts.cache.tiers.pools.counters.retracted > 0
            assert parts.cache.tiers.tree.internals.nodes.hits.max() == 0

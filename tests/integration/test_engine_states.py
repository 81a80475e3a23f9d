"""State groups in the engine: where a prompt hits, what is kept while decoding, where chunks are
cut, and that keeping a state may fail while a request may not.
"""

import dataclasses
import threading

import pytest

from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId
from stratakv.engine.request import Phase
from stratakv.spec.retention import KeepBoundary, KeepChunk, KeepLive, KeepWindow
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.transfer_ends import CopyHold, HookedCopier
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.cpu import DEFAULT_COPIER
from stratakv.tree.nodes import Tier
from tests.engines import (
    VOCABULARY,
    RecordingRunner,
    all_free,
    cached,
    drain,
    evict,
    evict_device,
    expected_tokens,
    greedy,
    kept_out,
    on_device,
    on_host,
    run,
    token_engine,
    token_spec,
    tokens_of,
    without_anchor_bytes,
)

PAGE = 4
STATE = token_spec(PAGE, KeepBoundary())
MIXTURES = {
    "state": STATE,
    "no anchor bytes": without_anchor_bytes(STATE),
    "two states": token_spec(PAGE, KeepBoundary(), KeepBoundary()),
    "state+window": token_spec(PAGE, KeepBoundary(), KeepWindow(10)),
    "state+live": token_spec(PAGE, KeepLive(), KeepBoundary()),
    "all": token_spec(PAGE, KeepWindow(6), KeepBoundary(), KeepLive(), KeepChunk(9)),
}
PROMPT = [n * 7 % VOCABULARY for n in range(97)]


def engine(spec=STATE, states=30, host=200, copier=DEFAULT_COPIER, **settings):
    """``states``: device pages of every group but the anchor."""
    plain = {"page_tokens": PAGE, "max_running": 4, "max_model_len": 200, "chunk_tokens": 20}
    config = EngineConfig(**{**plain, "step_tokens": 64, "load_back_threshold": 1, **settings})
    others = len(spec.groups) - 1
    pools = [100] + [states] * others, [host] * (1 + others)
    return token_engine(spec, config, *pools, copier)


def ask(parts, tokens, count=1):
    """What of a prompt was cached, after checking its whole answer."""
    out = run(parts, greedy("r", tokens, count))["r"]
    assert tokens_of(out) == expected_tokens(tokens, count)
    return out[0].cached


def recorded(parts, tokens, count=1):
    """Its cached tokens, and the sizes of its batches."""
    recorder = RecordingRunner(parts)
    cached = ask(parts, tokens, count)
    recorder.stop()
    return cached, [int(batch.counts.sum()) for batch in recorder.batches]


def checkpoints(parts):
    """Ends, in pages, at which the tree has a checkpoint."""
    nodes = parts.cache.tiers.tree.internals.nodes
    rows = nodes.rows()
    return sorted((nodes.depth[rows[nodes.checkpoint[rows]]] + 1).tolist())


def usable(tokens):
    return (tokens - 1) // PAGE * PAGE


def assert_nothing_left(parts):
    drain(parts)
    assert parts.engine.flush()
    parts.engine.check()
    assert all_free(parts)


# -- where a prompt hits -------------------------------------------------------------------------


@pytest.mark.parametrize("spec", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("length", [1, 4, 5, 8, 40, 41, 43, 44, 60])
def test_a_prompt_hits_at_its_last_boundary_on_either_tier(spec, length):
    """Also of exactly k pages: one token is always computed, so that one hits at k - 1 pages."""
    with engine(spec) as parts:
        assert ask(parts, PROMPT[:length], 2) == on_device(spec, 0)
        assert ask(parts, PROMPT[:length], 2) == on_device(spec, usable(length))
        evict_device(parts)
        assert ask(parts, PROMPT[:length], 2) == on_host(spec, usable(length))
        assert_nothing_left(parts)


@pytest.mark.parametrize("spec", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("extra", [1, 2, 3, 4, 5])
def test_a_longer_prompt_goes_on_from_a_state(spec, extra):
    with engine(spec) as parts:
        ask(parts, PROMPT[:41])
        cached, sizes = recorded(parts, PROMPT[: 40 + extra])
        assert cached == on_device(spec, 40)
        assert sum(sizes) == extra


def test_a_snapshot_that_only_the_host_has_is_loaded_alone():
    with engine() as parts:
        ask(parts, PROMPT[:41])
        evict(parts, Tier.DEVICE, 1)
        assert ask(parts, PROMPT[:41]) == cached((40, 0), (0, PAGE), host=40)
        assert parts.cache.tiers.pools.counters.load_pages == 1


def test_without_a_host_an_evicted_snapshot_is_computed_again():
    with engine(cache="device", host=0) as parts:
        ask(parts, PROMPT[:41])
        evict(parts, Tier.DEVICE, 1)
        assert ask(parts, PROMPT[:41]) == on_device(STATE, 0)
        assert ask(parts, PROMPT[:41]) == on_device(STATE, 40)
        assert parts.cache.tiers.pools.counters.backup_pages == 0


@pytest.mark.parametrize("spec", MIXTURES.values(), ids=MIXTURES)
def test_off_keeps_nothing(spec):
    with engine(spec, cache="off", host=0) as parts:
        for _ in range(2):
            cached, sizes = recorded(parts, PROMPT[:41], 30)
            assert cached == kept_out(spec)
            assert sum(sizes) == 41 + 29
            assert all_free(parts)
        assert parts.cache.tiers.pools.counters.snapshots == 0


# -- where chunks end ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "sizes"),
    [(61, [20, 20, 20, 1]), (60, [20, 20, 16, 4]), (50, [20, 20, 8, 2]), (18, [16, 2]), (4, [4])],
)
def test_a_chunk_ends_where_a_snapshot_is_due(length, sizes):
    with engine() as parts:
        assert recorded(parts, PROMPT[:length])[1] == sizes


def test_without_a_state_no_chunk_is_cut():
    with engine(token_spec(PAGE, KeepWindow(10), KeepLive())) as parts:
        assert recorded(parts, PROMPT[:50])[1][:3] == [20, 20, 8]  # scratch: lives by the page
    with engine(token_spec(PAGE, KeepWindow(10))) as parts:
        assert recorded(parts, PROMPT[:50])[1] == [20, 20, 10]


# -- branching points ----------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [40, 42])
@pytest.mark.parametrize("spec", MIXTURES.values(), ids=MIXTURES)
def test_the_second_prompt_leaves_a_snapshot_at_the_branching_point(spec, shared):
    """The anchor matches further than the state: that is computed again once, and never again."""
    with engine(spec) as parts:
        stem = PROMPT[:shared]
        ask(parts, [*stem, *range(1, 31)])
        cached, sizes = recorded(parts, [*stem, *range(2, 32)])
        assert cached == on_device(spec, 0)
        assert 40 in [sum(sizes[:n]) for n in range(len(sizes))], "no chunk ended there"
        assert 10 in checkpoints(parts)
        for seed in (3, 4):
            assert ask(parts, [*stem, *range(seed, seed + 30)]) == on_device(spec, 40)
        evict_device(parts)
        assert ask(parts, [*stem, *range(5, 35)]) == on_host(spec, 40)


# -- while decoding ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize(
    ("every", "count", "hit"),
    [
        (8, 30, 32),  # 35 tokens computed
        (16, 30, 32),
        (16, 40, 32),
        (12, 30, 24),
        (64, 30, 4),  # the prompt's own
        (64, 27, 32),  # 32 tokens computed: the last state lies on a boundary
        (64, 28, 4),
    ],
)
def test_the_next_turn_hits_the_latest_snapshot(spec, every, count, hit):
    with engine(spec, snapshot_tokens=every) as parts:
        prompt = PROMPT[:6]
        ask(parts, prompt, count)
        turn = prompt + expected_tokens(prompt, count) + [1, 2, 3]
        assert ask(parts, turn) == on_device(spec, hit)
    with engine(spec, snapshot_tokens=every) as parts:
        ask(parts, prompt, count)
        evict_device(parts)
        assert ask(parts, turn) == on_host(spec, hit)


def test_a_decode_snapshot_takes_the_place_of_the_one_before():
    with engine(snapshot_tokens=8) as parts:
        parts.engine.submit(greedy("r", PROMPT[:6], 60))
        seen = []
        while parts.engine.has_work():
            parts.engine.step()
            if not seen or seen[-1] != checkpoints(parts):
                seen.append(checkpoints(parts))
        assert seen == [[1], *([1, end] for end in range(2, 17, 2))]
        assert parts.cache.tiers.pools.counters.snapshots == 9


def test_a_decode_snapshot_is_saved_when_its_request_ends():
    with engine(snapshot_tokens=8) as parts:
        parts.engine.submit(greedy("r", PROMPT[:6], 30))
        while parts.engine.statuses():
            parts.engine.step()
            host = parts.cache.tiers.pools.stats()[3]
            running = parts.engine.stats().running
            assert host.total - host.free <= (1 if running else 5)
        parts.cache.progress.settle()
        assert (
            parts.cache.tiers.pools.stats()[3].free == 195
        )  # the prompt's, the last, and milestones


def test_a_last_state_on_a_boundary_costs_no_page():
    """The request leaves its live page behind: no copy, and no step cut for it."""
    with engine(states=2, snapshot_tokens=64) as parts:
        ask(parts, PROMPT[:6], 27)
        assert parts.cache.tiers.pools.counters.snapshots == 2
        assert parts.cache.tiers.pools.counters.snapshots_skipped == 0
        assert ask(parts, PROMPT[:6] + expected_tokens(PROMPT[:6], 27)).device == 32


# -- who shares a snapshot, and when there is no page for one ------------------------------------


@pytest.mark.parametrize("spec", MIXTURES.values(), ids=MIXTURES)
def test_requests_that_start_from_one_snapshot_do_not_disturb_each_other(spec):
    with engine(spec, states=60, snapshot_tokens=8) as parts:
        ask(parts, PROMPT[:41])
        tails = [[n] * (1 + 5 * n) for n in range(4)]
        prompts = {str(n): PROMPT[:41] + tail for n, tail in enumerate(tails)}
        out = run(parts, *(greedy(name, prompt, 20) for name, prompt in prompts.items()))
        for name, prompt in prompts.items():
            assert out[name][0].cached == on_device(spec, 40)
            assert tokens_of(out[name]) == expected_tokens(prompt, 20)
        assert ask(parts, PROMPT[:42]) == on_device(spec, 40)  # and it is still what it was
        assert_nothing_left(parts)


def hold_backups():
    hold = CopyHold()

    def before_copy(direction, group, layers):
        if direction is Direction.BACKUP:
            hold(direction, group, layers)

    return hold, HookedCopier(DEFAULT_COPIER, before_copy)


def test_without_a_page_to_go_on_with_a_snapshot_is_skipped():
    """The only other page is being saved; the request goes on, and the next snapshot is kept."""
    hold, copier = hold_backups()
    with engine(states=2, copier=copier, snapshot_tokens=8) as parts:
        patience = threading.Timer(PATIENCE_S, hold.allow, (1_000,))
        patience.daemon = True  # if a page is waited for after all
        patience.start()
        parts.engine.submit(greedy("r", PROMPT[:6], 40))
        out = []
        for _ in range(10):
            out += parts.engine.step()
        counters = parts.cache.tiers.pools.counters
        assert (counters.snapshots, counters.snapshots_skipped) == (1, 1)  # at 4; not at 8 tokens
        assert counters.copy_waits == 0
        patience.cancel()
        hold.allow(1_000)
        parts.cache.progress.settle()
        out += drain(parts)
        assert tokens_of(out) == expected_tokens(PROMPT[:6], 40)
        assert counters.snapshots == 1 + 4  # 16, 24, 32, 40
        assert_nothing_left(parts)


def test_a_request_alone_keeps_every_snapshot_in_two_pages():
    """It lets go of the last one as it gives the next: none is skipped for want of a page."""
    with engine(states=2, cache="device", host=0, snapshot_tokens=4) as parts:
        ask(parts, PROMPT[:6], 40)
        counters = parts.cache.tiers.pools.counters
        assert (counters.snapshots, counters.snapshots_skipped) == (11, 0)


@pytest.mark.parametrize("spec", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("running", [1, 2, 3])
def test_pools_with_no_page_to_spare_serve_everybody(spec, running):
    """Every other pool holds just the peaks of those that run."""
    peak = 9
    with engine(spec, states=running * peak, max_running=running, snapshot_tokens=4) as parts:
        for group in spec.groups:
            if group.stateful:  # two pages each: the live one, and the snapshot it started from
                parts.cache.tiers.pools.tiers[Tier.DEVICE][group.id].alloc(running * (peak - 2))
        prompts = {str(n): PROMPT[: 20 + n] + [n] * n for n in range(8)}
        for name, prompt in prompts.items():
            parts.engine.submit(greedy(name, prompt, 15))
        out = {name: [] for name in prompts}
        most = 0
        while parts.engine.has_work():
            for output in parts.engine.step():
                out[output.request].append(output)
            most = max(most, parts.engine.stats().running)
        for name, prompt in prompts.items():
            assert tokens_of(out[name]) == expected_tokens(prompt, 15)
        assert most == running


# -- aborts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("steps", range(14))
def test_an_abort_at_any_step_leaves_nothing_behind(spec, steps):
    """Steps 1 to 4: within its chunks, right after a snapshot, decoding on from one."""
    with engine(spec, snapshot_tokens=8) as parts:
        parts.engine.submit(greedy("r", PROMPT[:50], 30))
        for _ in range(steps):
            parts.engine.step()
            parts.engine.check()
        parts.engine.abort(RequestId("r"))
        parts.engine.check()
        drain(parts)
        ask(parts, PROMPT[:50], 8)
        assert_nothing_left(parts)


@pytest.mark.parametrize("spec", MIXTURES.values(), ids=MIXTURES)
def test_an_abort_while_its_snapshot_is_loaded_leaves_it_to_others(spec):
    hold = CopyHold()

    def before_copy(direction, group, layers):
        if direction is Direction.LOAD:
            hold(direction, group, layers)

    with engine(spec, copier=HookedCopier(DEFAULT_COPIER, before_copy)) as parts:
        ask(parts, PROMPT[:41])
        evict_device(parts)
        for name in ("r", "other"):
            parts.engine.submit(greedy(name, PROMPT[:41], 3))
        parts.engine.admit()
        assert parts.engine.status(RequestId("r")).phase is Phase.PREFILLING
        parts.engine.abort(RequestId("r"))
        parts.engine.check()
        hold.allow(1_000)
        out = [output for output in drain(parts) if output.request == "other"]
        assert tokens_of(out) == expected_tokens(PROMPT[:41], 3)
        assert out[0].cached.total == 40
        assert ask(parts, PROMPT[:41]) == on_device(spec, 40)
        assert_nothing_left(parts)


def test_a_stop_token_right_after_a_snapshot_leaves_a_usable_state():
    answer = expected_tokens(PROMPT[:6], 40)
    with engine(snapshot_tokens=8) as parts:
        plain = greedy("r", PROMPT[:6], 40)
        stop = next(token for at, token in enumerate(answer) if at >= 10)
        sampling = dataclasses.replace(plain.sampling, stop_tokens=(stop,))
        out = run(parts, dataclasses.replace(plain, sampling=sampling))["r"]
        generated = tokens_of(out)
        assert generated == answer[: answer.index(stop) + 1]
        known = PROMPT[:6] + generated
        computed = len(known) - 1
        hit = computed if computed % PAGE == 0 else computed // 8 * 8
        assert ask(parts, [*known, 1]) == on_device(STATE, hit)

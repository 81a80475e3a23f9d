"""The cache as configured: off, device only, with a host; what is loaded and what is declined; what
a failed backup costs; and that nobody's output depends on who shares the batch.
"""

import dataclasses
import threading

import numpy as np
import pytest

from stratakv.core.config import EngineConfig
from stratakv.core.ids import NONE, RequestId
from stratakv.engine.request import FinishReason, Phase, Prompt, SamplingParams
from stratakv.spec.retention import KeepWindow
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.transfer_ends import CopyHold, HookedCopier
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.cpu import DEFAULT_COPIER
from stratakv.tree.nodes import Tier
from tests.engines import (
    RecordingRunner,
    all_free,
    computing,
    drain,
    ended,
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
)
from tests.fixtures.models import random_prompt
from tests.hit_cases import lab

SPEC = token_spec(4, KeepWindow(10))
PROMPT = [n * 7 % 97 for n in range(61)]


def engine(copier=DEFAULT_COPIER, host=(100, 60), **settings):
    plain = {"page_tokens": 4, "max_running": 4, "max_model_len": 200, "chunk_tokens": 20}
    config = EngineConfig(**{**plain, "step_tokens": 64, **settings})
    return token_engine(SPEC, config, (100, 60), host, copier)


def first_of(parts, tokens, name="r", count=3):
    """The answer's first output, after checking all of it."""
    out = run(parts, greedy(name, tokens, count))[name]
    assert tokens_of(out) == expected_tokens(tokens, count)
    return out[0]


# -- modes ---------------------------------------------------------------------------------------


def test_off_reuses_nothing_and_keeps_nothing():
    with engine(cache="off", host=(0, 0)) as parts:
        recorder = RecordingRunner(parts)
        for _ in range(2):
            out = run(parts, *(greedy(str(n), PROMPT, 3) for n in range(3)))
            for answer in out.values():
                assert tokens_of(answer) == expected_tokens(PROMPT, 3)
                assert answer[0].cached == kept_out(SPEC)
            assert all_free(parts)
        assert recorder.computed_tokens == 2 * 3 * (len(PROMPT) + 2)


def test_device_only_hits_until_it_evicts():
    with engine(cache="device", host=(0, 0)) as parts:
        first_of(parts, PROMPT)
        assert first_of(parts, PROMPT).cached == on_device(SPEC, 60)
        evict_device(parts)
        assert all_free(parts)
        assert first_of(parts, PROMPT).cached == on_device(SPEC, 0)
        counters = parts.cache.tiers.pools.counters
        assert (counters.backup_pages, counters.load_pages) == (0, 0)


def test_a_host_takes_every_anchor_page_and_of_a_window_what_checkpoints_and_milestones_need():
    """The prompt ends at 15 pages, its milestones at 1, 2, 4, 7, 11, 13 and 14. A window reaches
    three pages back, so that page 7 alone is in none of theirs."""
    with engine() as parts:
        first_of(parts, PROMPT)
        parts.cache.progress.settle()
        nodes = parts.cache.tiers.tree.internals.nodes
        rows = nodes.rows()
        for group, pages in enumerate([set(range(15)), set(range(15)) - {7}]):
            saved = nodes.page[Tier.HOST][group][rows] != NONE
            assert set(nodes.depth[rows[saved]].tolist()) == pages
        assert parts.cache.tiers.pools.counters.backup_pages == 15 + 14
        assert first_of(parts, PROMPT).cached == on_device(SPEC, 60)
        evict_device(parts)
        assert first_of(parts, PROMPT).cached == on_host(SPEC, 60)
        stats = parts.engine.stats()
        assert (stats.prompt_tokens, stats.output_tokens) == (3 * 61, 9)
        assert (stats.cached_device_tokens, stats.cached_host_tokens) == (60, 60)


def test_flush_is_refused_while_a_request_runs():
    with engine() as parts:
        parts.engine.submit(greedy("r", PROMPT, 3))
        parts.engine.step()
        before = parts.cache.tiers.pools.stats()
        assert not parts.engine.flush()
        assert parts.cache.tiers.pools.stats() == before
        drain(parts)
        assert parts.engine.flush()
        assert all_free(parts)
        assert first_of(parts, PROMPT).cached == on_device(SPEC, 0)


# -- load-back -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "hit"), [(60, 60), (61, 0)])
def test_a_load_below_the_threshold_is_declined_and_counted(threshold, hit):
    with engine(load_back_threshold=threshold) as parts:
        first_of(parts, PROMPT)
        evict_device(parts)
        assert first_of(parts, PROMPT).cached == on_host(SPEC, hit)
        assert parts.engine.stats().lost_tokens["host", "below_threshold"] == 60 - hit
        assert parts.cache.tiers.pools.counters.load_pages == (18 if hit else 0)
        # What was recomputed is on both tiers again.
        evict_device(parts)
        assert first_of(parts, PROMPT).cached == on_host(SPEC, hit)


def test_a_load_over_the_budget_waits_its_turn():
    hold = CopyHold()

    def hold_loads(direction, group, layers):
        if direction is Direction.LOAD:
            hold(direction, group, layers)

    with engine(HookedCopier(DEFAULT_COPIER, hold_loads), load_back_budget=100) as parts:
        other = PROMPT[::-1]
        for tokens in (PROMPT, other):
            first_of(parts, tokens)
        evict_device(parts)
        parts.engine.submit(greedy("one", PROMPT, 3))
        parts.engine.submit(greedy("two", other, 3))
        parts.engine.admit()  # a whole step would wait for the load that is held
        assert parts.cache.tiers.pools.counters.load_waited == 1
        assert (parts.engine.stats().running, parts.engine.stats().waiting) == (1, 1)
        hold.allow(1_000)
        got = drain(parts)
        for name, tokens in (("one", PROMPT), ("two", other)):
            out = [output for output in got if output.request == name]
            assert out[0].cached == on_host(SPEC, 60)
            assert tokens_of(out) == expected_tokens(tokens, 3)


def test_a_forward_waits_for_its_load():
    """No page lands before the forward asks for it: without a gate it would read NaN."""
    asked = threading.Event()

    def land_when_asked(direction, group, layers):
        del group, layers
        if direction is Direction.LOAD:
            assert asked.wait(PATIENCE_S), "nobody waited at the gate"

    class Asking:
        def __init__(self, gate):
            self.gate = gate

        def wait(self, layer):
            asked.set()
            self.gate.wait(layer)

    with engine(HookedCopier(DEFAULT_COPIER, land_when_asked)) as parts:
        first_of(parts, PROMPT)
        evict_device(parts)
        forward = parts.runner.forward

        def asking(batch):
            gate = Asking(batch.gate) if batch.gate else None
            return forward(dataclasses.replace(batch, gate=gate))

        parts.runner.forward = asking
        try:
            assert first_of(parts, PROMPT).cached == on_host(SPEC, 60)
        finally:
            asked.set()


def test_a_load_without_device_pages_falls_back_to_what_is_there():
    """The window pool is full of pages that a backup holds: nothing can land, nothing is lost."""
    with engine() as parts:
        first_of(parts, PROMPT)
        evict_device(parts)
        taken = parts.cache.tiers.pools.tiers[Tier.DEVICE][1].alloc(58)
        parts.engine.submit(greedy("r", PROMPT, 3))
        parts.engine.admit()
        parts.cache.tiers.pools.tiers[Tier.DEVICE][1].free(taken)
        out = drain(parts)
        assert out[0].cached == on_device(SPEC, 0)
        assert parts.engine.stats().lost_tokens["host", "device_capacity"] == 60
        assert tokens_of(out) == expected_tokens(PROMPT, 3)


# -- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [1, 2, 1000])
def test_a_failed_backup_leaves_a_working_cache(failing):
    calls = [0]

    def fail(direction, group, layers):
        del group, layers
        if direction is Direction.BACKUP:
            calls[0] += 1
            if calls[0] <= failing:
                raise OSError("seeded")

    with engine(HookedCopier(DEFAULT_COPIER, fail)) as parts:
        first_of(parts, PROMPT)
        counters = parts.cache.tiers.pools.counters
        assert counters.backup_failed_pages > 0
        assert first_of(parts, PROMPT).cached == on_device(SPEC, 60)
        evict_device(parts)
        first_of(parts, PROMPT)
        evict_device(parts)
        if failing < 1000:  # the next backup of the same pages has worked
            assert first_of(parts, PROMPT).cached == on_host(SPEC, 60)
        else:
            assert counters.backup_pages == 0
            assert all_free(parts)
        assert parts.engine.flush()
        assert all_free(parts)


def test_a_full_host_drops_backups_and_counts_them():
    with engine(host=(5, 2)) as parts:
        first_of(parts, PROMPT)
        counters = parts.cache.tiers.pools.counters
        assert counters.dropped_backup_pages > 0
        assert counters.backup_pages + counters.dropped_backup_pages >= 15
        assert first_of(parts, PROMPT).cached == on_device(SPEC, 60)


# -- sharing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
def test_identical_prompts_submitted_together_compute_their_prefix_once(cached):
    with engine() as parts:
        if cached:
            first_of(parts, PROMPT[:33])
        recorder = RecordingRunner(parts)
        out = run(parts, *(greedy(str(n), PROMPT, 3) for n in range(4)))
        for answer in out.values():
            assert tokens_of(answer) == expected_tokens(PROMPT, 3)
        rest = 61 - (32 if cached else 0)
        assert recorder.computed_tokens == rest + 3 * (61 - 60) + 4 * 2
        assert [out[str(n)][0].cached.device for n in range(1, 4)] == [60] * 3


def test_one_that_waits_does_not_hold_up_those_behind_it():
    with engine() as parts:
        parts.engine.submit(greedy("first", PROMPT, 3))
        parts.engine.submit(greedy("same", PROMPT, 3))
        parts.engine.submit(greedy("other", PROMPT[::-1], 3))
        parts.engine.step()
        running = {request.id for request in computing(parts)}
        assert running == {"first", "other"}
        drain(parts)


def test_rows_run_out_before_pages_do():
    with engine(max_running=2) as parts:
        for n in range(5):
            parts.engine.submit(greedy(str(n), [n, 1, 2], 3))
        parts.engine.step()
        assert parts.engine.stats().running == 2
        assert {output.request for output in drain(parts)} == set("01234")


def test_first_come_first_served_where_pages_are_short():
    with engine(host=(0, 0), cache="device") as parts:
        big = list(range(90)) + list(range(97))
        parts.engine.submit(greedy("a", big, 10))
        parts.engine.submit(greedy("b", big[::-1], 10))  # 2 x 50 pages fill the pool
        parts.engine.submit(greedy("c", big[5:], 10))
        parts.engine.submit(greedy("small", [1], 2))
        overtook = False
        while parts.engine.has_work():
            running = {request.id for request in computing(parts)}
            waiting = {one.id for one in parts.engine.statuses() if one.phase is Phase.WAITING}
            overtook |= "small" in running and "c" in waiting
            parts.engine.step()
        assert not overtook, "nobody passes one that pages lack for"


# -- sampling ------------------------------------------------------------------------------------


def sampled(name, tokens, seed, **fields):
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=seed, **fields)
    return Prompt(id=RequestId(name), tokens=np.array(tokens, np.int32), sampling=params)


def test_a_seed_gives_the_same_tokens_in_any_batch():
    tokens = random_prompt(50, 70)
    with lab("llama", 16) as this:
        parts = this.parts
        alone = tokens_of(run(parts, sampled("alone", tokens, 7))["alone"])
        again = tokens_of(run(parts, sampled("again", tokens, 7))["again"])  # from the cache
        others = [sampled(f"o{n}", random_prompt(60 + n, 20 + 9 * n), n) for n in range(4)]
        together = run(parts, *others[:2], sampled("r", tokens, 7), *others[2:])
        assert alone == again == tokens_of(together["r"])
        assert alone != tokens_of(run(parts, sampled("else", tokens, 8))["else"])
        n_choices = run(parts, *(sampled(f"c{seed}", tokens, seed) for seed in (7, 8, 9)))
        assert tokens_of(n_choices["c7"]) == alone
        assert len({tuple(tokens_of(choice)) for choice in n_choices.values()}) == 3


def test_a_stop_token_ends_a_request_and_is_its_last():
    with engine() as parts:
        expected = expected_tokens(PROMPT, 8)
        stop = expected[4]
        prompt = greedy("r", PROMPT, 8)
        sampling = dataclasses.replace(prompt.sampling, stop_tokens=(96 - stop, stop))
        ends_at = min(expected.index(token) for token in sampling.stop_tokens if token in expected)
        out = run(parts, dataclasses.replace(prompt, sampling=sampling))["r"]
        assert tokens_of(out) == expected[: ends_at + 1]
        assert ended(out) is FinishReason.STOP
        assert ended(run(parts, greedy("s", PROMPT, 8))["s"]) is FinishReason.LENGTH


def test_logprobs_are_those_of_the_logits():
    tokens = random_prompt(51, 40)
    with lab("qwen3", 16) as this:
        params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2)
        prompt = Prompt(id=RequestId("r"), tokens=np.array(tokens, np.int32), sampling=params)
        out = run(this.parts, prompt)["r"]
        for output, logits in zip(out, this.recorder.logits["r"], strict=True):
            scores = logits.log_softmax(-1)
            assert output.logprob.chosen == pytest.approx(scores[output.token].item(), abs=1e-5)
            assert [token for token, _ in output.logprob.top] == scores.topk(2).indices.tolist()


def test_evicting_a_window_alone_keeps_the_anchor():
    with engine(cache="device", host=(0, 0)) as parts:
        first_of(parts, PROMPT)
        evict(parts, Tier.DEVICE, 1)
        assert first_of(parts, PROMPT).cached == on_device(SPEC, 0)
        assert first_of(parts, PROMPT).cached == on_device(SPEC, 60)

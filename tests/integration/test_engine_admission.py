"""Admission where a load-back cannot go through, and what a refused request leaves untouched."""

import threading

import numpy as np

from stratakv.core.config import EngineConfig
from stratakv.core.page_keys import PageHasher
from stratakv.policy.admission import demand
from stratakv.spec.retention import KeepWindow
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.transfer.numpy_copy import NumpyCopier
from stratakv.tree.nodes import Tier
from tests.engines import evict, expected_tokens, greedy, run, token_engine, token_spec, tokens_of

PROMPT = list(range(1, 18))


class HeldCopier(NumpyCopier):
    """Copies wait while ``go`` is clear."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def gather(self, *arguments):
        self.go.wait(PATIENCE_S)
        super().gather(*arguments)

    def scatter(self, *arguments):
        self.go.wait(PATIENCE_S)
        super().scatter(*arguments)


def config(**more):
    base = {"page_tokens": 4, "max_model_len": 32, "load_back_threshold": 1, "cache": "host"}
    return EngineConfig(**(base | more))


def finish(parts, outputs):
    while parts.engine.has_work():
        for output in parts.engine.step():
            outputs.setdefault(output.request, []).append(output)
    return outputs


def test_a_load_that_fails_may_have_evicted_what_the_first_match_stood_on():
    copier = HeldCopier()
    settings = config(max_running=3, step_tokens=40, chunk_tokens=4)
    spec = token_spec(4, KeepWindow(8))
    with token_engine(spec, settings, [40, 4], [80, 40], copier) as parts:
        engine = parts.engine
        for name, tokens in (
            ("a", PROMPT[:5]), ("b", PROMPT), ("c", [*PROMPT[:4], 90, 90, 90]), ("d", PROMPT[:5]),
        ):  # fmt: skip
            run(parts, greedy(name, tokens, 1))
        evict(parts, Tier.DEVICE, 1, keep=1)
        copier.go.clear()  # the backups of these three keep the rest of the window's pool
        for at in range(3):
            engine.submit(greedy(f"z{at}", [50 + at] * 4, 1))
            while not any(output.finish for output in engine.step()):
                pass
        engine.submit(greedy("again", PROMPT, 1))
        threading.Timer(0.3, copier.go.set).start()
        outputs = finish(parts, {})
        assert tokens_of(outputs["again"]) == expected_tokens(PROMPT, 1)
        engine.check()


def test_the_load_back_budget_counts_a_load_of_window_pages_alone():
    copier = HeldCopier()
    settings = config(max_running=4, step_tokens=80, chunk_tokens=16, load_back_budget=1)
    prompts = [[20 * at + k for k in range(17)] for at in range(3)]
    with token_engine(token_spec(4, KeepWindow(8)), settings, [40, 40], [80, 80], copier) as parts:
        for at, prompt in enumerate(prompts):
            run(parts, greedy(f"first{at}", prompt, 1))
        evict(parts, Tier.DEVICE, 1)
        copier.go.clear()
        for at, prompt in enumerate(prompts):
            parts.engine.submit(greedy(f"again{at}", prompt, 1))
        counters = parts.cache.tiers.pools.counters

        def let_go():
            wait_until(lambda: counters.load_waited, "a load that waits for another one")
            copier.go.set()

        threading.Thread(target=let_go).start()
        finish(parts, {})
        assert counters.load_waited > 0
        assert counters.load_pages > 0


def test_a_refused_request_warms_nothing():
    settings = config(max_running=2, step_tokens=80, chunk_tokens=16)
    with token_engine(token_spec(4, KeepWindow(8)), settings, [9, 12], [0, 0]) as parts:
        run(parts, greedy("first", PROMPT, 1))
        prefix = PageHasher(parts.plan.namespaces.of("", ""), 4)
        prefix.extend(np.array(PROMPT, np.int32))
        row = parts.cache.tiers.tree.internals.nodes.index[prefix.keys[0]]
        parts.engine.submit(greedy("long", [70] * 8, 20))
        parts.engine.step()
        parts.engine.submit(greedy("again", PROMPT, 12))
        hits = parts.cache.tiers.tree.internals.nodes.hits.item(row)
        for _ in range(5):
            parts.engine.step()
            assert parts.engine.stats().waiting == 1
        assert parts.cache.tiers.tree.internals.nodes.hits.item(row) == hits
        finish(parts, {})
        parts.engine.check()


def test_a_page_that_found_no_host_room_is_saved_by_a_later_request():
    settings = config(max_running=2, step_tokens=80, chunk_tokens=16)
    fails = [True]

    class Once(NumpyCopier):
        def gather(self, *arguments):
            if fails[0]:
                raise OSError("the host is gone")
            super().gather(*arguments)

    with token_engine(token_spec(4), settings, [40], [40], Once()) as parts:
        run(parts, greedy("first", PROMPT, 1))
        parts.cache.progress.settle()
        assert parts.cache.tiers.pools.counters.backup_failed_pages
        fails[0] = False
        run(parts, greedy("again", PROMPT, 1))
        parts.cache.progress.settle()
        evict(parts, Tier.DEVICE, 0)
        outputs = run(parts, greedy("third", PROMPT, 1))["third"]
        assert outputs[0].cached is not None
        assert outputs[0].cached.host == 16


def test_a_request_that_decodes_holds_less_than_a_chunk():
    """The window's pool has room for one prefill and one that decodes, not for two prefills."""
    spec = token_spec(4, KeepWindow(8))
    prefill = demand(spec, 32, 32, 16, 0).peak[1]
    decode = demand(spec, 32, 32, 1, 0).peak[1]
    settings = config(max_running=2, step_tokens=80, chunk_tokens=16)
    with token_engine(spec, settings, [40, prefill + decode], [80, 80]) as parts:
        parts.engine.submit(greedy("a", PROMPT, 8))
        parts.engine.submit(greedy("b", PROMPT[::-1], 8))
        together = 0
        while parts.engine.has_work():
            parts.engine.step()
            together = max(together, parts.engine.stats().running)
            parts.engine.check()
        assert together == 2

"""KVCache's own promises: a step's backups are one plan, a refusal changes nothing, and an
allocation waits for a copy that holds back what it was promised.
"""

import threading

import numpy as np

from stratakv.cache.admit import Wish
from stratakv.cache.records import Admission, Refusal
from stratakv.core.config import EngineConfig
from stratakv.core.page_keys import Namespace, PageHasher
from stratakv.spec.retention import KeepWindow
from stratakv.testing.transfer_ends import PATIENCE_S, HookedCopier
from stratakv.transfer.cpu import DEFAULT_COPIER
from stratakv.transfer.plan import Direction
from tests.engines import (
    drain,
    evict_device,
    expected_tokens,
    greedy,
    run,
    token_engine,
    token_spec,
    tokens_of,
)

SPEC = token_spec(4, KeepWindow(10))
CONFIG = EngineConfig(
    page_tokens=4, max_running=3, max_model_len=200, chunk_tokens=20, step_tokens=80
)
PROMPTS = [[(n * 5 + k) % 97 for n in range(41)] for k in range(4)]


def wish(prefix, tokens, total_tokens):
    return Wish(prefix=prefix, tokens=tokens, total_tokens=total_tokens)


def engine(device=(60, 30), host=(60, 30), copier=DEFAULT_COPIER):
    return token_engine(SPEC, CONFIG, device, host, copier)


def prefix_of(tokens):
    prefix = PageHasher(Namespace(model=b"m", spec_digest=b"s"), 4)
    prefix.extend(np.array(tokens, np.int32))
    return prefix


def test_all_backups_of_a_step_are_one_plan(monkeypatch):
    with engine() as parts:
        plans = []
        submit = parts.transfer.submit

        def counting(plan):
            plans.append(plan)
            return submit(plan)

        monkeypatch.setattr(parts.transfer, "submit", counting)
        for n in range(3):
            parts.engine.submit(greedy(str(n), PROMPTS[n], 2))
        for step in range(1, 3):
            parts.engine.step()
            assert len(plans) == step
            assert plans[-1].direction is Direction.BACKUP
            anchor = next(copy for copy in plans[-1].copies if copy.group == 0)
            assert len(anchor.device) == 3 * 5  # of three requests, 20 tokens each
        drain(parts)
        assert sum(len(c.device) for p in plans for c in p.copies if c.group == 0) == 3 * 10


def test_a_refusal_changes_nothing():
    with engine(device=(25, 14)) as parts:
        cache = parts.cache
        held = cache.admit(wish(prefix_of(PROMPTS[0]), 41, 60))
        assert isinstance(held, Admission)
        before = cache.stats(), cache.counters.snapshot()
        assert cache.admit(wish(prefix_of(PROMPTS[1]), 41, 60)) is Refusal.NO_PAGES
        assert (cache.stats(), cache.counters.snapshot()) == before
        cache.check()
        small = [cache.admit(wish(prefix_of([k]), 1, 4)) for k in range(2)]
        assert all(isinstance(admission, Admission) for admission in small)
        assert cache.admit(wish(prefix_of([9]), 1, 4)) is Refusal.NO_ROW
        for admission in (held, *small):
            cache.release(admission.row, np.empty(0, np.int32))
        assert cache.flush()
        assert all(pool.free == pool.total for pool in cache.stats())


def test_an_allocation_waits_for_the_copy_that_holds_its_page_back(monkeypatch):
    """Half of a prefix is saved, the half below it is being saved: the upper pages are nobody's,
    but an anchor's pages leave from the leaf up."""
    allowed = threading.Event()
    plans = []

    def second_plan_waits(direction, group, layers):
        del layers
        plans.append((direction, group))
        if plans.count((Direction.BACKUP, 0)) == 2:
            assert allowed.wait(PATIENCE_S), "nobody waited for the copy"

    with engine((12, 20), copier=HookedCopier(DEFAULT_COPIER, second_plan_waits)) as parts:
        copies = parts.cache._copies
        wait = copies.wait

        def allow_and_wait():
            allowed.set()
            return wait()

        parts.engine.submit(greedy("a", PROMPTS[0], 1))
        parts.engine.step()
        while not copies.ready:  # the first plan, on its own thread
            threading.Event().wait(0.001)
        out = parts.engine.step() + parts.engine.step()
        assert not parts.engine._requests
        monkeypatch.setattr(copies, "wait", allow_and_wait)
        parts.engine.submit(greedy("b", PROMPTS[1][:21], 2))
        out += drain(parts)
        assert parts.cache.counters.copy_waits > 0
        for name, prompt, count in (("a", PROMPTS[0], 1), ("b", PROMPTS[1][:21], 2)):
            said = tokens_of([output for output in out if output.request == name])
            assert said == expected_tokens(prompt, count)


def test_a_prefix_that_is_being_loaded_is_joined_not_loaded_twice():
    with engine() as parts:
        run(parts, greedy("a", PROMPTS[0], 2))
        evict_device(parts)
        loaded = parts.cache.counters.load_pages
        out = run(parts, *(greedy(str(n), PROMPTS[0], 2) for n in range(3)))
        assert [out[str(n)][0].cached.total for n in range(3)] == [40] * 3
        assert sum(out[str(n)][0].cached.host for n in range(3)) == 40
        assert parts.cache.counters.load_pages - loaded == 10 + 3

"""Random traffic over an engine with storage that is slow, full, failing, emptied, taken away and
brought back: every answer right, every page accounted for, and hits and losses are what was found.
"""

import logging

import numpy as np
import pytest

from stratakv.core.clock import ManualClock
from stratakv.core.config import EngineConfig
from stratakv.engine.attachment import StorageCall, Verb
from stratakv.policy.admission import demand
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepChunk, KeepLive, KeepWindow
from stratakv.storage.io_worker import IoLimits
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.storage_faults import Faults, FaultyBackend
from tests.churn import Traffic, UnevenCopier
from tests.engines import token_engine, token_spec, without_anchor_bytes
from tests.storage_cases import attach_backend, detached, format_of

PAGE = 4
MOST = 100
SPECS = {
    "anchor": token_spec(PAGE),
    "window": token_spec(PAGE, KeepWindow(10)),
    "chunk": token_spec(PAGE, KeepChunk(11)),
    "state": token_spec(PAGE, KeepBoundary()),
    "state alone": without_anchor_bytes(token_spec(PAGE, KeepBoundary())),
    "all": token_spec(PAGE, KeepBoundary(), KeepWindow(6), KeepLive(), KeepAll()),
}
FAULTS = Faults(
    call_fails=0.02,
    read_misses=0.03,
    read_fails=0.03,
    read_corrupt=0.03,
    write_refused=0.03,
    write_fails=0.03,
)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")


class LastingBackend(MemoryBackend):
    """Outlives the engine that closes it."""

    def close(self):
        pass


class Operator:
    """Attaches, detaches and clears storage while traffic runs, and adds up its figures.

    ``prompt``: every turn waits until the store, which answers from a thread of its own, has
    answered; otherwise requests go without it when half a second has passed, of a clock that each
    turn advances.
    """

    def __init__(self, spec, seed, faults, quota_bytes, *, prompt=False):
        self.random = np.random.default_rng(seed)
        self.store = LastingBackend(format_of(spec), quota_bytes)
        self.faults = faults
        self.attached = self.leaving = False
        self.clock = ManualClock()
        self.turns = 0
        self.prompt = prompt

    def __call__(self, parts):
        self.turns += 1
        if self.prompt:
            parts.cache.progress.settle()
        else:
            self.clock.advance(0.5)
        if not self.attached:
            if self.random.random() < 0.05 or self.turns == 1:
                self.attach(parts)
        elif self.leaving:
            self.detach(parts, force=self.random.random() < 0.1)
        else:
            chance = self.random.random()
            self.leaving = chance < 0.004
            if 0.004 <= chance < 0.008:
                parts.engine.call_storage(StorageCall(Verb.CLEAR))
            if 0.008 <= chance < 0.012:
                self.detach(parts, force=False)
                if self.attached:
                    parts.engine.call_storage(StorageCall(Verb.RESUME))

    def attach(self, parts):
        backend = FaultyBackend(self.store, self.faults)
        limits = IoLimits(queue_pages=40, batch_pages=3, batch_bytes=400)
        attach_backend(parts, backend, limits, self.clock)
        self.attached = True

    def detach(self, parts, *, force):
        if detached(parts.engine, force=force):
            self.attached = self.leaving = False

    def leave(self, parts):
        while self.attached:
            self.detach(parts, force=False)
            parts.cache.progress.settle()


def config(**settings):
    plain = {"page_tokens": PAGE, "max_running": 4, "max_model_len": MOST, "chunk_tokens": 9}
    plain |= {"step_tokens": 20, "reserve_tokens": 1, "snapshot_tokens": 8}
    plain |= {"load_back_threshold": 1, "prefetch_threshold": PAGE, "prefetch_share": 1.0}
    return EngineConfig(**{**plain, **settings})


def pools(spec, anchor, host):
    peak = demand(spec, MOST, MOST, 9, 0).peak
    device = [anchor if group.keeps_all else 4 * peak[group.id] for group in spec.groups]
    return device, [host] * len(device)


def churn(spec, host, traffic, operator, **settings):
    copier = UnevenCopier(traffic.seed, 10)
    with token_engine(spec, config(**settings), *pools(spec, 40, host), copier) as parts:
        traffic.between = operator
        traffic.run(parts, MOST)
        parts.engine.check()
        found = parts.cache.storage.prefetcher.counters
        assert found.hits + sum(found.lost.values()) == found.found, found
        left = parts.cache.storage.prefetcher.records()
        assert not left["in the book"], f"a prefetch was never settled: {left}"
        operator.leave(parts)
        assert parts.cache.progress.flush(), "something still holds a page"
        assert all(pool.free == pool.total for pool in parts.cache.tiers.pools.stats())
        return found, parts.engine.stats().cached_storage_tokens


POLICIES = ("best-effort", "wait-complete", "timeout")
FAULTY = [
    pytest.param(name, policy, marks=() if name == "all" or at % 3 == turn else pytest.mark.long)
    for at, name in enumerate(SPECS)
    for turn, policy in enumerate(POLICIES)
]
"""In ``make test``, each with one policy, and what has every rule with all."""


@pytest.mark.parametrize(("name", "policy"), FAULTY)
def test_traffic_over_a_store_with_faults(name, policy):
    spec = SPECS[name]
    traffic = Traffic(seed=7, requests=60, aborts=0.03, check_every=3)
    operator = Operator(spec, 7, FAULTS, quota_bytes=20_000)
    found, _ = churn(spec, 14, traffic, operator, prefetch_policy=policy)
    assert found.found > 0


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_traffic_over_a_good_store_hits_it(spec):
    traffic = Traffic(seed=3, requests=60, check_every=3)
    operator = Operator(spec, 3, Faults(), quota_bytes=1 << 20, prompt=True)
    found, cached = churn(spec, 14, traffic, operator, prefetch_policy="wait-complete")
    assert found.hits > 0
    assert cached > 0


def test_traffic_with_long_prompts_and_a_full_host():
    spec = SPECS["all"]
    traffic = Traffic(seed=5, requests=60, prompt_tokens=90, aborts=0.02, check_every=3)
    operator = Operator(spec, 5, FAULTS, quota_bytes=1 << 20)
    churn(spec, 6, traffic, operator, prefetch_policy="wait-complete")

"""The engine over a file store for a long time: a store that is too small and fails now and then,
taken away and brought back while requests run. Every answer right, and memory, open files and
threads are in the end what they were when a fifth of it was done.
"""

import gc
import logging
import os
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from stratakv.cache.prefetch import Prefetcher
from stratakv.cache.storage import StorageTier
from stratakv.core.clock import ManualClock, WallClock
from stratakv.core.config import EngineConfig
from stratakv.engine.request import FinishReason
from stratakv.policy.prefetch_book import PrefetchBook
from stratakv.serve.wiring import EngineParts
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.storage.file.room import Keeping
from stratakv.storage.file.store import FileStore
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.testing.storage_faults import Faults, FaultyBackend
from tests.engines import VOCABULARY, expected_tokens, greedy, token_engine, token_spec, tokens_of
from tests.storage_cases import format_of

PAGE = 4
SPEC = token_spec(PAGE, KeepWindow(6), KeepBoundary())
CONFIG = EngineConfig(
    page_tokens=PAGE,
    max_running=16,
    max_model_len=40,
    chunk_tokens=32,
    step_tokens=128,
    reserve_tokens=1,
    snapshot_tokens=PAGE,
    load_back_threshold=1,
    prefetch_threshold=PAGE,
    prefetch_policy="wait-complete",
)
DEVICE, HOST = [200, 100, 80], [80, 60, 60]
QUOTA_BYTES = 512 << 10
STEMS, STEM_TOKENS, MOST_TAIL, MOST_OUTPUT = 300, 28, 3, 3
AT_ONCE = 24
ABORTS = 0.01
SALTS = ("", "", "one", "another")
FAULTS = Faults(
    call_fails=0.005,
    call_breaks=0.005,
    read_misses=0.02,
    read_corrupt=0.01,
    read_fails=0.01,
    write_refused=0.02,
    write_fails=0.01,
    write_lost=0.01,
    contains_lies=0.01,
)
GROWTH_BYTES, GROWTH_BLOCKS = 4 << 20, 10_000
"""What a size may vary by; a leak of one small object per request would be many times that."""


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")  # pytest keeps what is logged


@dataclass(frozen=True)
class Sample:
    """``blocks``: small objects that Python holds; far sharper than ``resident_bytes``."""

    resident_bytes: int
    blocks: int
    files: int
    threads: int


def sample() -> Sample:
    gc.collect()
    return Sample(
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE"),
        blocks=sys.getallocatedblocks(),
        files=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
    )


class Soak:
    """Requests at random over an engine whose store comes and goes. Keeps no request that has
    ended, so that what grows is not its own."""

    def __init__(self, parts: EngineParts, directory: Path) -> None:
        self.parts, self.engine, self.directory = parts, parts.engine, directory
        self.random = np.random.default_rng(1)
        self.stems = self.random.integers(0, VOCABULARY, (STEMS, STEM_TOKENS))
        self.clock = ManualClock()
        self.sent = self.turn = 0
        self.live: dict[str, tuple[list[int], int, list]] = {}
        self.seen = Counter[str]()

    # -- the store -------------------------------------------------------------------------------

    def attach(self) -> None:
        """A new opening of the directory; every second one fails now and then."""
        self.turn += 1
        form, keeping = format_of(SPEC), Keeping(quota_bytes=QUOTA_BYTES)
        faults = replace(FAULTS, seed=self.turn) if self.turn % 2 == 0 else Faults()
        self.stores = [FileStore(self.directory, form, keeping, WallClock()) for _ in range(2)]
        self.backends = [FaultyBackend(store, faults) for store in self.stores]
        limits = IoLimits(queue_pages=256, batch_pages=16)
        self.engine.attach_storage(IoWorker(Backends(*self.backends), form, limits, self.clock))

    def detach(self) -> bool:
        """Whether the store is gone; it is not while pages are being written or fetched."""
        worker = self.engine.detach_storage()
        if worker is None:
            return False
        assert worker.close(60.0)
        self.seen["injected"] += sum(backend.injected for backend in self.backends)
        self.seen["evicted"] += self.stores[1].stats().counters.evicted
        self.seen["attached"] += 1
        del self.stores, self.backends
        return True

    # -- traffic ---------------------------------------------------------------------------------

    def submit(self) -> None:
        """The beginning of one of a few stems, the first ones most of the time, and a tail."""
        stem = self.stems[int(STEMS * self.random.random() ** 2)]
        keep = int(self.random.integers(1, STEM_TOKENS + 1))
        tail = self.random.integers(0, VOCABULARY, int(self.random.integers(0, MOST_TAIL + 1)))
        prompt = [*stem[:keep].tolist(), *tail.tolist()]
        count = int(self.random.integers(1, MOST_OUTPUT + 1))
        name = f"r{self.sent}"
        self.engine.submit(greedy(name, prompt, count, str(self.random.choice(SALTS))))
        self.live[name] = (prompt, count, [])
        self.sent += 1

    def step(self) -> None:
        self.clock.advance(0.05)
        if self.live and self.random.random() < ABORTS * AT_ONCE:
            self.engine.abort(list(self.live)[self.random.integers(len(self.live))])
        for output in self.engine.step():
            self.live[output.request][2].append(output)
            if output.finish is not None:
                self.look(output.request, output.finish)

    def look(self, name: str, finish: FinishReason) -> None:
        prompt, count, outputs = self.live.pop(name)
        said, expected = tokens_of(outputs), expected_tokens(prompt, count)
        aborted = finish is FinishReason.ABORT
        assert said == (expected[: len(said)] if aborted else expected), (name, said, expected)
        self.seen["aborted" if aborted else "answered"] += 1

    def serve(self, most: int) -> None:
        """Go on until ``most`` requests were sent in all."""
        while self.sent < most:
            while self.sent < most and len(self.live) < AT_ONCE:
                self.submit()
            self.step()

    def drain(self) -> None:
        while self.engine.has_work():
            self.step()
        assert not self.live

    # -- rounds ----------------------------------------------------------------------------------

    def round(self, requests: int, before: Sample) -> Sample:
        """The store is attached, leaves while requests run, and they go on without it."""
        until = self.sent + requests
        self.attach()
        self.serve(until - requests // 10)
        within = sample()
        assert within.threads == before.threads + 2
        assert within.files <= before.files + 2 * 66, "more than a file for each segment"
        while not self.detach():
            self.serve(min(until, self.sent + 1))
            self.step()
        self.serve(until)
        self.drain()
        self.audit()
        return sample()

    def audit(self) -> None:
        """Nothing is left of those that were served."""
        self.engine.check()
        prefetcher = self.parts.cache.storage.prefetcher
        found = prefetcher.counters
        assert found.hits + sum(found.lost.values()) == found.found, found
        self.seen["hits"], self.seen["lost"] = found.hits, found.found - found.hits
        kept = (prefetcher._book._entries, prefetcher._by_request, prefetcher._by_id,
                prefetcher._by_ticket, prefetcher._leaders, prefetcher._followers)  # fmt: skip
        assert not any(kept), "an ask was never removed"


def soak(directory: Path, requests: int, rounds: int) -> tuple[list[Sample], Counter[str]]:
    """Sizes after each round, and what has happened."""
    with token_engine(SPEC, CONFIG, DEVICE, HOST) as parts:
        this, before = Soak(parts, directory), sample()
        samples = [this.round(requests // rounds, before) for _ in range(rounds)]
        assert this.seen["answered"] + this.seen["aborted"] == requests
        assert parts.cache.flush(), "something still holds a page"
        assert all(pool.free == pool.total for pool in parts.cache.stats())
    for each in samples:
        assert (each.files, each.threads) == (before.files, before.threads), samples
    return samples, this.seen


def growth(samples: list[Sample]) -> tuple[int, int]:
    """How much resident bytes and blocks vary once a fifth is done."""
    settled = samples[len(samples) // 5 - 1 :]
    resident = [each.resident_bytes for each in settled]
    blocks = [each.blocks for each in settled]
    return max(resident) - min(resident), max(blocks) - min(blocks)


def happened(seen: Counter[str]) -> None:
    for what in ("aborted", "evicted", "hits", "injected", "lost"):
        assert seen[what] > 0, f"never {what}: {seen}"


def test_2_000_requests_leave_files_threads_and_asks_as_they_were(tmp_path):
    _, seen = soak(tmp_path / "store", 2_000, 5)
    happened(seen)


@pytest.mark.long
def test_200_000_requests_leave_memory_files_and_threads_as_they_were(tmp_path):
    samples, seen = soak(tmp_path / "store", 200_000, 40)
    happened(seen)
    resident, blocks = growth(samples)
    print(f"resident +{resident >> 10} KiB, blocks +{blocks}; {dict(seen)}; {samples[-1]}")
    assert resident < GROWTH_BYTES, samples
    assert blocks < GROWTH_BLOCKS, samples

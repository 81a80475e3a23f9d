"""``stratakv bench growth``: how costs grow, each at one size and at ten times that.

Owns what is made larger; pages are moved by ``growth_bytes``. Processor time of one thread, of all
where pages are moved; medians. What a request, a key or a page costs may grow with how many there
are of these, and with nothing else. The tree's operations have the same in ``bench tree``; ranks in
``bench ranks --tp``.
"""

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

import numpy as np

from stratakv.bench.growth_bytes import copies_us, stored_us
from stratakv.bench.rig import greedy, one_thread
from stratakv.bench.still_engine import PAGE_TOKENS, STILL_SPEC, VOCABULARY, StillLimits, engine_of
from stratakv.core.clock import WallClock
from stratakv.core.ids import GroupId, PageKey
from stratakv.engine.loop import Engine
from stratakv.storage.backend import ObjectKey, StoreFormat
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore

TIMES: Final = 10
NEW_TOKENS: Final = 96
OBJECT_BYTES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """``context``: tokens of each request that runs. ``cached``: pages of others, who have
    ended."""

    running: int = 16
    context: int = 256
    waiting: int = 0
    cached: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCase:
    """``asked``: keys of a question, half of which are there. ``stored``: pages in the store."""

    asked: int = 1000
    stored: int = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """``exponent``: of the power of its size by which a cost grows; at most ``allowed``."""

    small_us: float
    large_us: float
    exponent: float
    allowed: float


_Row: TypeAlias = tuple[Callable[[], float], Callable[[], float], float]
"""Cost once, cost with ten times as much, and the largest exponent."""
STEP: Final = "a step, by"
PAGES: Final = 64
"""That are moved."""
SLACK: Final = 0.15
"""Caches of the processor are smaller than ten times as much: what is flat by its count is not
quite so by the clock."""


def run(*, repeats: int = 7, steps: int = 64) -> dict[str, object]:
    """Measure and print."""
    print(f"{'us':40s} {'once':>10s} {f'{TIMES} times':>10s}   exponent")
    found: dict[str, Grown] = {}
    with one_thread():
        for name, (small, large, allowed) in _rows(repeats, steps).items():
            one = found[name] = _grown(small(), large(), allowed)
            print(
                f"{name:40s} {one.small_us:10.1f} {one.large_us:10.1f}   {one.exponent:5.2f} "
                f"(at most {allowed:.0f})",
                flush=True,
            )
    return {
        "times": TIMES,
        "slack": SLACK,
        "cases": [{"name": name, **asdict(one)} for name, one in found.items()],
    }


def _rows(repeats: int, steps: int) -> Mapping[str, _Row]:
    step, store = StepCase(), StoreCase()
    return {
        f"{STEP} requests that run": (
            lambda: step_us(step, steps),
            lambda: step_us(replace(step, running=TIMES * step.running), steps),
            1.0,
        ),
        f"{STEP} requests that wait": (
            lambda: step_us(replace(step, waiting=100), steps),
            lambda: step_us(replace(step, waiting=TIMES * 100), steps),
            0.0,
        ),
        f"{STEP} tokens of each": (
            lambda: step_us(step, steps),
            lambda: step_us(replace(step, context=TIMES * step.context), steps),
            0.0,
        ),
        f"{STEP} pages that are cached": (
            lambda: step_us(step, steps),
            lambda: step_us(replace(step, cached=TIMES * step.cached), steps),
            0.0,
        ),
        "a question to a file store, by keys": (
            lambda: question_us(store, repeats),
            lambda: question_us(replace(store, asked=TIMES * store.asked), repeats),
            1.0,
        ),
        "the same, by pages in the store": (
            lambda: question_us(store, repeats),
            lambda: question_us(replace(store, stored=TIMES * store.stored), repeats),
            0.0,
        ),
        "pages to the host and back, by pages": (
            lambda: copies_us(PAGES, repeats),
            lambda: copies_us(TIMES * PAGES, repeats),
            1.0,
        ),
        "pages into a store and out, by pages": (
            lambda: stored_us(PAGES, repeats),
            lambda: stored_us(TIMES * PAGES, repeats),
            1.0,
        ),
    }


def _grown(small_us: float, large_us: float, allowed: float) -> Grown:
    exponent = math.log(large_us / small_us, TIMES)
    return Grown(small_us=small_us, large_us=large_us, exponent=exponent, allowed=allowed)


def step_us(case: StepCase, steps: int) -> float:
    """Of the engine's thread, for a step in which every request decodes."""
    longest = case.context + NEW_TOKENS + steps
    pages = case.running * (longest // PAGE_TOKENS + 2) + 2 * case.cached
    limits = StillLimits(
        running=case.running, longest=longest, device_pages=pages, host_pages=PAGE_TOKENS
    )
    engine, memory = engine_of(STILL_SPEC, limits)
    rng = np.random.default_rng(0)

    def submit(name: str, tokens: int, new_tokens: int) -> None:
        prompt = rng.integers(0, VOCABULARY, tokens, dtype=np.int32)
        engine.submit(greedy(name, prompt, new_tokens))

    for at in range(case.cached // 2):
        submit(f"cached {at}", 2 * PAGE_TOKENS, 1)
    _finish(engine)
    for at in range(case.running):
        submit(f"runs {at}", case.context, NEW_TOKENS + steps)
    while len(engine.step()) < case.running:
        pass
    for at in range(case.waiting):
        submit(f"waits {at}", PAGE_TOKENS, 1)
    taken_s: list[float] = []
    for _ in range(steps):
        begin_s = time.thread_time()
        decoded = len(engine.step())
        taken_s.append(time.thread_time() - begin_s)
        assert decoded == case.running, f"{decoded} of {case.running} requests decode"
    engine.close()
    memory.transfer.close()
    return median(taken_s) * 1e6


def _finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def question_us(case: StoreCase, repeats: int) -> float:
    """Of the thread that asks."""
    form = StoreFormat(spec_digest=b"growth".ljust(16), page_bytes=(OBJECT_BYTES,))
    keys = [
        ObjectKey(PageKey(at.to_bytes(32, "little")), GroupId(0))
        for at in range(case.stored + case.asked // 2)
    ]
    page = memoryview(bytes(OBJECT_BYTES))
    with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as name:
        store = FileStore(Path(name), form, StoreLimits(quota_bytes=1 << 30), WallClock())
        written = store.write(keys[: case.stored], [page] * case.stored)
        assert len(set(written)) == 1, "not all pages were stored"
        asked = np.resize(np.arange(case.stored), case.asked - case.asked // 2).tolist()
        question = [*(keys[at] for at in asked), *keys[case.stored :]]
        taken_s: list[float] = []
        for _ in range(repeats):
            begin_s = time.thread_time()
            found = store.contains(question)
            taken_s.append(time.thread_time() - begin_s)
            assert int(found.sum()) == len(asked), "what is stored is not found, or more"
        store.close()
    return median(taken_s) * 1e6

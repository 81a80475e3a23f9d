"""What storage costs the scheduler: CPU time of the engine's thread per step, with it and without.

Owns the measurement. Once with a small model, and once with a forward that computes nothing, so
that nothing hides what the cache's own thread does; there the writer's share of memory bandwidth
and of Python's lock shows as well. Pages, copies, writes and fetches are real. The prompts come
twice, the second time when neither the device nor the host has most of them any more.
"""

import time
from collections import deque
from pathlib import Path
from typing import Final

import numpy as np

from stratakv.bench.rig import Laps, attach_files, greedy, in_turn
from stratakv.bench.shapes import LLAMA_4X128, build
from stratakv.bench.still_engine import PAGE_TOKENS, STILL_SPEC, VOCABULARY, StillLimits, engine_of
from stratakv.engine.huggingface.model import HuggingFaceModel, wrap
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import CacheSpec

TARGET: Final = 1.1
ROWS: Final = 16
PROMPT_TOKENS: Final = 1024
OUTPUT_TOKENS: Final = 192
PAIRS: Final = 24
"""Requests that come twice; with a model, which takes its time, there are a quarter."""
REPEATS: Final = 5
DEVICE_PAGES: Final = 320
HOST_PAGES: Final = 320
"""Of what the requests leave behind, some 450 pages and as many of their windows' tails, the host
keeps a part; all running requests together hold up to 304."""
LIMITS: Final = StillLimits(
    running=ROWS,
    longest=PROMPT_TOKENS + OUTPUT_TOKENS + 1,
    device_pages=DEVICE_PAGES,
    host_pages=HOST_PAGES,
)


def step_time_ratios(directory: Path) -> dict[str, float]:
    """CPU time per step with a file store in ``directory`` to that without: medians over pairs of
    runs, in turns. ``step_time_ratio``: with a model; ``scheduler_time_ratio``: without one."""
    model = wrap(build(LLAMA_4X128))
    return {
        "step_time_ratio": _ratio(directory / "model", model),
        "scheduler_time_ratio": _ratio(directory / "still", None),
    }


def _ratio(directory: Path, model: HuggingFaceModel | None) -> float:
    laps = Laps()
    for turn in range(REPEATS + 1):
        for name, of in in_turn((("without", None), ("with", directory / str(turn))), turn):
            laps.add(name, _play(of, model))
    return laps.ratio("with", "without")


def _play(directory: Path | None, model: HuggingFaceModel | None) -> float:
    """Seconds of the engine's thread per step."""
    spec = STILL_SPEC if model is None else _spec_of(model)
    engine, memory = engine_of(spec, LIMITS, model)
    if directory is not None:
        host = [arena.pages for arena in memory.arenas]
        attach_files(engine, spec, host, f"file://{directory}?quota=1GiB")
    rng = np.random.default_rng(0)
    pairs = PAIRS if model is None else PAIRS // 4
    prompts = [rng.integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32) for _ in range(pairs)]
    coming = deque(enumerate([*prompts, *prompts]))
    taken_s, open_, steps = 0.0, 0, 0
    while coming or open_:
        while coming and open_ < ROWS:
            number, tokens = coming.popleft()
            engine.submit(greedy(str(number), tokens, OUTPUT_TOKENS))
            open_ += 1
        begin_s = time.thread_time()
        outputs = engine.step()
        if outputs:  # else all waited for a copy or for storage, and time passed
            taken_s += time.thread_time() - begin_s
            steps += 1
            open_ -= sum(output.finish is not None for output in outputs)
    engine.close()
    memory.transfer.close()
    return taken_s / steps


def _spec_of(model: HuggingFaceModel) -> CacheSpec:
    return spec_of(model.config, page_tokens=PAGE_TOKENS, dtype=model.dtype)

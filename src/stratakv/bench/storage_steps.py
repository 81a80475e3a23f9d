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
import torch

from stratakv.assembly.build import MappedMemory
from stratakv.assembly.build import build as build_engine
from stratakv.assembly.device import cpu_kernels, runner_of
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.sizing import Sizes
from stratakv.bench.rig import Laps, attach_files, greedy, in_turn
from stratakv.bench.shapes import LLAMA_4X128, build
from stratakv.core.config import EngineConfig
from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.batch import StepBatch
from stratakv.engine.executor import Runner
from stratakv.engine.forward import Forward
from stratakv.engine.loop import Engine
from stratakv.engine.model import HuggingFaceModel, wrap
from stratakv.engine.torch_pools import TorchPools
from stratakv.memory.block_table import BlockTable
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepWindow
from stratakv.transfer.cpu import CpuTransferEngine

TARGET: Final = 1.1
PAGE_TOKENS: Final = 64
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
VOCABULARY: Final = 64


class _Still:
    """A forward that takes no time: token 0, always."""

    def forward(self, batch: StepBatch) -> Forward:
        return Forward.of_numbers(torch.zeros(int(batch.sampled.sum()), VOCABULARY), batch)


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
    spec = _spec() if model is None else _spec_of(model)
    engine, memory = _engine(spec, model)
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


def _spec() -> CacheSpec:
    def group(index: int, name: str, rule: KeepAll | KeepWindow) -> CacheGroup:
        rows = [
            BufferSpec(
                name=buffer,
                layers=tuple(LayerId(layer) for layer in range(index, 8, 2)),
                rows_per_page=PAGE_TOKENS,
                row_shape=(2, 32),
                dtype="float32",
            )
            for buffer in ("k", "v")
        ]
        return CacheGroup(id=GroupId(index), name=name, retention=rule, buffers=tuple(rows))

    groups = (group(0, "full", KeepAll()), group(1, "swa", KeepWindow(128)))
    return CacheSpec(page_tokens=PAGE_TOKENS, groups=groups)


def _spec_of(model: HuggingFaceModel) -> CacheSpec:
    return spec_of(model.config, page_tokens=PAGE_TOKENS, dtype=model.dtype)


def _engine(
    spec: CacheSpec, model: HuggingFaceModel | None
) -> tuple[Engine, MappedMemory[TorchPools, CpuTransferEngine]]:
    config = EngineConfig(max_running=ROWS)
    device, host = ([pages] * len(spec.groups) for pages in (DEVICE_PAGES, HOST_PAGES))
    sizes = Sizes.of(spec, device, host, PROMPT_TOKENS + OUTPUT_TOKENS + 1)
    plan = EnginePlan.of(config, sizes, b"bench")
    memory = MappedMemory.of(plan, TorchPools, CpuTransferEngine)

    def runner(tables: BlockTable) -> Runner:
        return (
            _Still()
            if model is None
            else runner_of(model, spec, memory.pools, tables, cpu_kernels(model))
        )

    engine, _ = build_engine(plan, memory, runner)
    return engine, memory

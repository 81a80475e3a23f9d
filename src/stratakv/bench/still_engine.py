"""An engine whose forward takes no time, so that what is left is the cache's and the scheduler's.

Owns that forward, and how such an engine is put together; with a model it is the engine as ever.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from stratakv.assembly.build import MappedMemory
from stratakv.assembly.build import build as build_engine
from stratakv.assembly.device import cpu_kernels, runner_of
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.sizing import Sizes
from stratakv.core.config import EngineConfig
from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.attention.torch_pools import TorchPools
from stratakv.engine.batch import StepBatch
from stratakv.engine.executor import Runner
from stratakv.engine.forward import Forward
from stratakv.engine.huggingface.model import HuggingFaceModel
from stratakv.engine.loop import Engine
from stratakv.memory.block_table import BlockTable
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepWindow
from stratakv.transfer.cpu import CpuTransferEngine

VOCABULARY: Final = 64
PAGE_TOKENS: Final = 64
Memory: TypeAlias = MappedMemory[TorchPools, CpuTransferEngine]


@dataclass(frozen=True, slots=True, kw_only=True)
class StillLimits:
    """``longest``: tokens of a request. Pages of each group."""

    running: int
    longest: int
    device_pages: int
    host_pages: int


class Still:
    """A forward that takes no time: token 0, always."""

    def forward(self, batch: StepBatch) -> Forward:
        return Forward.of_numbers(torch.zeros(int(batch.sampled.sum()), VOCABULARY), batch)


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


STILL_SPEC: Final = _spec()
"""Full attention and a window, four layers each."""


def engine_of(
    spec: CacheSpec, limits: StillLimits, model: HuggingFaceModel | None = None
) -> tuple[Engine, Memory]:
    """``model``: None for a forward that takes no time."""
    config = EngineConfig(max_running=limits.running)
    device, host = (
        [pages] * len(spec.groups) for pages in (limits.device_pages, limits.host_pages)
    )
    sizes = Sizes.of(spec, device, host, limits.longest)
    plan = EnginePlan.of(config, sizes, b"bench")
    memory = MappedMemory.of(plan, TorchPools, CpuTransferEngine)

    def runner(tables: BlockTable) -> Runner:
        if model is None:
            return Still()
        return runner_of(model, spec, memory.pools, tables, cpu_kernels(model))

    engine, _ = build_engine(plan, memory, runner)
    return engine, memory

"""An engine around a model: the one place that names what a device and a model type run on.

Owns the order of a start: refuse what cannot run, split the budget, and only then take memory.
Another device is another ``Device``, and nothing else; another role, or whatever else plugs in,
comes with ``Sockets``.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeAlias, TypeVar

import torch

from stratakv.assembly.build import (
    DEFAULT_SOCKETS,
    MakeAllocator,
    MakeArena,
    MakeExecutor,
    MappedMemory,
    Sockets,
    build,
)
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.rank_context import check_alike, sharing_of
from stratakv.assembly.sizing import Sizes, size
from stratakv.assembly.stores import opener_while_it_runs, store_key
from stratakv.cache.kv_cache import KVCache
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId
from stratakv.engine.deepseek.refused import OWN_TYPES, own_refusal
from stratakv.engine.deepseek.v4_runner import DeepSeekV4Runner
from stratakv.engine.deepseek.v32_runner import DeepSeekV32Runner
from stratakv.engine.dense_kernels import DenseKernels
from stratakv.engine.executor import Runner, SerialExecutor
from stratakv.engine.kernels import AttentionKernels
from stratakv.engine.loop import Engine
from stratakv.engine.model import HuggingFaceModel, with_adapters
from stratakv.engine.model_facts import ModelFacts
from stratakv.engine.parallel import tp_refusal
from stratakv.engine.ranked import RankedEngine
from stratakv.engine.row_kernels import RowKernels
from stratakv.engine.runner import ModelRunner
from stratakv.engine.storage_control import BackgroundStores
from stratakv.engine.torch_pools import LayerTensors, TorchPools
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.block_table import BlockTable
from stratakv.memory.host_arena import HostArena
from stratakv.spec.budget_table import BudgetTable
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.spec.offload import SELECTED, selected_group
from stratakv.transfer.cpu import CpuTransferEngine
from stratakv.transfer.engine import TransferEngine
from stratakv.transfer.host_rows import CpuHostRows, HostRows

log = logging.getLogger(__name__)

P = TypeVar("P", bound=LayerTensors)
RunnerOf: TypeAlias = Callable[
    [HuggingFaceModel, CacheSpec, LayerTensors, BlockTable, AttentionKernels], Runner
]
OWN_RUNNERS: Final[Mapping[str, RunnerOf]] = {
    "deepseek_v32": DeepSeekV32Runner,
    "glm_moe_dsa": DeepSeekV32Runner,
    "deepseek_v4": DeepSeekV4Runner,
}
"""Model types whose Hugging Face module takes no ragged batch: our own runs in its place."""
SPILLING_RUNNERS: Final = {
    "deepseek_v32": DeepSeekV32Runner,
    "glm_moe_dsa": DeepSeekV32Runner,
    "deepseek_v4": DeepSeekV4Runner,
}
assert SPILLING_RUNNERS.keys() == SELECTED.keys()
assert OWN_RUNNERS.keys() == OWN_TYPES


def runner_of(
    model: HuggingFaceModel,
    spec: CacheSpec,
    pools: LayerTensors,
    tables: BlockTable,
    kernels: AttentionKernels,
) -> Runner:
    """What runs the model: Hugging Face's module unmodified, or our own in its place."""
    own = OWN_RUNNERS.get(str(model.config["model_type"]), ModelRunner)
    return own(model, spec, pools, tables, kernels)


def spilling_runner(
    model: HuggingFaceModel,
    spec: CacheSpec,
    pools: LayerTensors,
    tables: BlockTable,
    kernels: AttentionKernels,
    host: HostRows,
) -> Runner:
    """The same where a group has its home on the host, which ``host`` reads."""
    own = SPILLING_RUNNERS[str(model.config["model_type"])]
    return own(model, spec, pools, tables, kernels, host)


def cpu_kernels(model: HuggingFaceModel) -> AttentionKernels:
    """torch's sparse kernels know float32 alone."""
    dtype = model.module.dtype
    return RowKernels() if dtype == torch.float32 else DenseKernels(model.device, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(Generic[P]):
    """Everything that an engine is made of on one kind of device, and on no other.

    pools: bytes of the device tier, of any type that gives the runner a tensor for each layer;
    ``transfer``, which copies between them and the host ``arenas``, knows that type. allocator: who
    gives out page ids. kernels: what attends over pages, in the model's dtype. runner: what turns a
    batch into logits. host_rows: what reads rows of host pages in a step; None: no group can have
    its home on the host. executor: how its steps are launched and collected, and, by its
    ``launched``, what copies come after; steps_at_once: its depth. on_host: whether the device tier
    takes host memory.
    """

    pools: Callable[[CacheSpec, Sequence[int]], P]
    transfer: Callable[[CacheSpec, P, Sequence[HostArena]], TransferEngine]
    kernels: Callable[[HuggingFaceModel], AttentionKernels]
    allocator: MakeAllocator = PageAllocator
    arenas: MakeArena = HostArena
    runner: RunnerOf = runner_of
    host_rows: Callable[[GroupId, P, Sequence[HostArena]], HostRows] | None = None
    executor: MakeExecutor = SerialExecutor
    steps_at_once: int = 1
    on_host: bool = False


CPU: Final = Device(
    pools=TorchPools,
    transfer=CpuTransferEngine,
    kernels=cpu_kernels,
    host_rows=CpuHostRows,
    on_host=True,
)


@dataclass(frozen=True, slots=True, eq=False)
class EngineParts:
    """A running engine and what it was built from, for the server, the benches and the tests.
    ``port``: who steps it; with ranks, all of them."""

    plan: EnginePlan
    engine: Engine
    port: Engine | RankedEngine
    model: HuggingFaceModel
    cache: KVCache
    pools: LayerTensors
    arenas: Sequence[HostArena]
    transfer: TransferEngine
    runner: Runner

    @property
    def spec(self) -> CacheSpec:
        return self.plan.spec

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len

    @property
    def table(self) -> BudgetTable:
        return BudgetTable.of(self.plan.spec, self.plan.device, self.plan.host)

    def close(self) -> None:
        try:
            self.port.close()
        finally:
            self.transfer.close()


def check_model(facts: ModelFacts, config: EngineConfig) -> None:
    """ConfigError for what our own modules do not do, and for what ranks cannot share."""
    if reason := own_refusal(facts):
        raise ConfigError(f"MODEL: {reason}")
    if reason := tp_refusal(facts, config.tp):
        raise ConfigError(f"--tp {config.tp}: {reason}")
    name = str(facts.config["model_type"])
    if config.adapters() and name in OWN_RUNNERS:
        raise ConfigError(f"--lora: model type {name!r} takes no adapters; allowed is none")


def build_engine(
    model: HuggingFaceModel, config: EngineConfig, device: Device[P] = CPU
) -> EngineParts:
    """Everything below the server, for a model in memory. ConfigError before any is taken."""
    check_model(model.facts, config)
    sizes = size(model.facts, config, on_host=device.on_host)
    model = with_adapters(model, config.adapters())
    return build_sized(model, config, sizes, device=device)


def build_sized(
    model: HuggingFaceModel,
    config: EngineConfig,
    sizes: Sizes,
    sockets: Sockets = DEFAULT_SOCKETS,
    device: Device[P] = CPU,
) -> EngineParts:
    """The same, with all adapters and for what was found for the model and, with ranks, for all of
    them. ConfigError where ranks differ."""
    if sizes.notice is not None:
        log.warning(sizes.notice)
    for line in sizes.advice(config.chat_tokens):
        log.info("--sparse-offload: %s", line)
    if (ranks := sockets.ranks) is not None:
        check_alike(ranks, config, model.fingerprint, sizes.spec.digest, store_key(config))
    rank = 0 if ranks is None else ranks.ranks.rank
    sharing = sharing_of(sizes, config, rank, model.fingerprint)
    stores = BackgroundStores(opener_while_it_runs(config, sizes.spec, sizes.host, sharing))
    digests, ahead = model.adapters.digests, device.steps_at_once
    plan = EnginePlan.of(config, sizes, model.fingerprint, digests, steps_at_once=ahead)
    return assemble(model, plan, replace(sockets, stores=stores), device)


def assemble(
    model: HuggingFaceModel,
    plan: EnginePlan,
    sockets: Sockets = DEFAULT_SOCKETS,
    device: Device[P] = CPU,
) -> EngineParts:
    """Take the memory."""
    memory = MappedMemory.of(plan, device.pools, device.transfer, device.allocator, device.arenas)
    made: list[Runner] = []

    def runner(tables: BlockTable) -> Runner:
        kernels, away = device.kernels(model), selected_group(plan.spec)
        if away == ANCHOR:
            made.append(device.runner(model, plan.spec, memory.pools, tables, kernels))
        else:
            assert device.host_rows is not None, "this device reads no rows of host pages"
            host = device.host_rows(away, memory.pools, memory.arenas)
            made.append(spilling_runner(model, plan.spec, memory.pools, tables, kernels, host))
        return made[0]

    engine, cache = build(plan, memory, runner, sockets, device.executor)
    ranks = sockets.ranks
    port = engine if ranks is None else RankedEngine(engine, ranks.sync)
    return EngineParts(
        plan, engine, port, model, cache, memory.pools, memory.arenas, memory.transfer, made[0]
    )

"""What an engine runs on: everything of one kind of device, and what runs each model type.

Owns both choices; another device is another ``Device``, and nothing else. Must not take memory, nor
know settings.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

import torch

from stratakv.assembly.build import MakeArena, MakeExecutor
from stratakv.assembly.cache import MakeAllocator
from stratakv.assembly.sizing import ANY_AMOUNT
from stratakv.core.ids import GroupId
from stratakv.engine.attention.dense_kernels import DenseKernels
from stratakv.engine.attention.kernels import AttentionKernels
from stratakv.engine.attention.row_kernels import RowKernels
from stratakv.engine.attention.torch_pools import LayerTensors, TorchPools
from stratakv.engine.deepseek.refused import OWN_TYPES
from stratakv.engine.deepseek.v4_runner import DeepSeekV4Runner
from stratakv.engine.deepseek.v32_runner import DeepSeekV32Runner
from stratakv.engine.executor import Runner, SerialExecutor
from stratakv.engine.huggingface.model import CPU as HOST
from stratakv.engine.huggingface.model import HuggingFaceModel
from stratakv.engine.huggingface.page_selection import PageSelectingRunner
from stratakv.engine.huggingface.runner import ModelRunner
from stratakv.engine.in_c import IN_C
from stratakv.engine.thread_executor import MirroredRunner
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.block_table import BlockTable
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import CacheSpec
from stratakv.spec.offload import SELECTED, bounds_pages
from stratakv.transfer.cpu import CpuTransferEngine
from stratakv.transfer.engine import TransferEngine
from stratakv.transfer.host_rows import CpuHostRows, HostRows

_logger = logging.getLogger(__name__)

_row_kernels: Callable[[], AttentionKernels] = RowKernels
if IN_C:
    from stratakv.engine.attention.compiled_row_kernels import CompiledRowKernels

    _row_kernels = CompiledRowKernels
P = TypeVar("P", bound=LayerTensors)
OwnRunner: TypeAlias = Callable[
    [HuggingFaceModel, CacheSpec, LayerTensors, BlockTable, AttentionKernels], Runner
]


class RunnerOf(Protocol):
    """Makes what runs a model. ``host``: reads the group that has its home on the host; None: none
    has."""

    def __call__(
        self,
        model: HuggingFaceModel,
        spec: CacheSpec,
        pools: LayerTensors,
        tables: BlockTable,
        kernels: AttentionKernels,
        host: HostRows | None = None,
        /,
    ) -> Runner: ...


OWN_RUNNERS: Final[Mapping[str, OwnRunner]] = {
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
    host: HostRows | None = None,
) -> Runner:
    """What runs the model: Hugging Face's module unmodified, or our own in its place."""
    kind = str(model.config["model_type"])
    if host is None:
        return OWN_RUNNERS.get(kind, ModelRunner)(model, spec, pools, tables, kernels)
    if bounds_pages(spec):
        return PageSelectingRunner(model, spec, pools, tables, kernels, host)
    return SPILLING_RUNNERS[kind](model, spec, pools, tables, kernels, host)


def mirrored_runner(
    model: HuggingFaceModel,
    spec: CacheSpec,
    pools: LayerTensors,
    tables: BlockTable,
    kernels: AttentionKernels,
    host: HostRows | None = None,
) -> MirroredRunner:
    """The same on a copy of the block table, for a device that runs ahead."""
    mirror = tables.empty_copy()
    return MirroredRunner(tables, mirror, runner_of(model, spec, pools, mirror, kernels, host))


def cpu_kernels(model: HuggingFaceModel) -> AttentionKernels:
    """Those that read rows where they lie know float32 alone."""
    dtype = model.module.dtype
    if dtype != torch.float32:
        return DenseKernels(model.device, dtype)
    if not IN_C:
        what = "stratakv.engine.attention._row_attention or _state_steps is not built"
        _logger.warning("%s: one-token steps run in torch, more slowly", what)
    return _row_kernels()


def any_amount() -> int | None:
    """Of a device that nobody asks: --device-memory is taken at its word."""
    return ANY_AMOUNT


def host_memory() -> int | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(Generic[P]):
    """Everything that an engine is made of on one kind of device, and on no other.

    pools: bytes of the device tier, of any type that gives the runner a tensor for each layer;
    ``transfer``, which copies between them and the host ``arenas``, knows that type. allocator: who
    gives out page ids. kernels: what attends over pages, in the model's dtype. runner: what turns a
    batch into logits. host_rows: what reads rows of host pages in a step; None: no group can have
    its home on the host. executor: how its steps are launched and collected, and, by its
    ``launched``, what copies come after; steps_at_once: its depth. free: bytes of memory of its own
    that are free now; None: the device tier takes host memory. at: where the model runs.
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
    free: Callable[[], int | None] = any_amount
    at: torch.device = HOST


CPU: Final = Device(
    pools=TorchPools,
    transfer=CpuTransferEngine,
    kernels=cpu_kernels,
    host_rows=CpuHostRows,
    free=host_memory,
)

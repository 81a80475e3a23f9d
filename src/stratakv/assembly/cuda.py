"""An engine on a GPU: its ``Device``, of torch's memory, Triton's kernels and CUDA's streams.

Owns what is made when, and the refusal of pools that do not fit. The driver comes in, so that all
of it but torch's own calls runs without a GPU. Must not be imported where there is no Triton.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from stratakv.assembly.device import Device, mirrored_runner
from stratakv.assembly.graphs import capture_on, is_recordable, replaying, runs_eagerly
from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId
from stratakv.core.units import format_bytes
from stratakv.engine.attention.kernels import AttentionKernels
from stratakv.engine.attention.torch_pools import LayerTensors, TensorPools
from stratakv.engine.attention.triton_kernels import TritonKernels
from stratakv.engine.cuda.driver import TorchCuda, trial_memory
from stratakv.engine.cuda.graph_choice import GraphOptions
from stratakv.engine.cuda.graph_runner import GraphRunner, Graphs
from stratakv.engine.cuda.graphs import TorchGraphs
from stratakv.engine.executor import Executor, Runner, TokenSource
from stratakv.engine.huggingface.model import HuggingFaceModel
from stratakv.engine.huggingface.runner import ModelRunner
from stratakv.engine.thread_executor import MirroredRunner, ThreadExecutor
from stratakv.memory.block_table import BlockTable
from stratakv.memory.host_arena import HostArena
from stratakv.spec.budget import device_bytes
from stratakv.spec.groups import CacheSpec
from stratakv.transfer.copy_paths import TRIAL_BYTES, CopyChoice
from stratakv.transfer.copy_trials import copy_trials
from stratakv.transfer.cuda import ANY_CPU, CudaDriver, CudaStreams, CudaTransferEngine, PinOptions
from stratakv.transfer.cuda_host_rows import CudaHostRows
from stratakv.transfer.host_rows import HostRows
from stratakv.transfer.near_cpus import near_cpus, own_cpus
from stratakv.transfer.pinning import Pinning

log = logging.getLogger(__name__)

GRAPHS: Final = GraphOptions()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gpu:
    """One GPU as an engine needs it. ``trials``: how its copies go best, asked once its pools are
    there; ``free``: bytes of its memory; ``idle``: returns when all that it was given is done.
    ``graphs``: what records decode steps, for one engine; None: none is recorded."""

    at: torch.device
    driver: CudaDriver[Any]
    trials: Callable[[], CopyChoice]
    free: Callable[[], int]
    idle: Callable[[], None]
    pinned: PinOptions = ANY_CPU
    graphs: Callable[[], Graphs] | None = None


def cuda_device(index: int, options: GraphOptions = GRAPHS) -> Device[TensorPools]:
    """The GPU ``index`` of this process; what it computes with is made when an engine is."""
    at = torch.device("cuda", index)
    driver = cache(lambda: TorchCuda(at))

    def gpu() -> Gpu:
        here = driver()
        return Gpu(
            at=at,
            driver=here,
            trials=lambda: _tried(here, at),
            free=here.free_bytes,
            idle=lambda: torch.cuda.synchronize(at),
            pinned=PinOptions(near_cpus(here.library.pci(), own_cpus())),
            graphs=(lambda: TorchGraphs(at)) if options.enabled else None,
        )

    return device_over(gpu, at, options)


def device_over(
    gpu: Callable[[], Gpu], at: torch.device, options: GraphOptions = GRAPHS
) -> Device[TensorPools]:
    """A ``Device`` for engines one after the other; ``gpu`` is asked when one is made, or when
    somebody wants to know how much is free."""
    streams: list[CudaStreams[Any]] = []
    pinnings: list[Pinning] = []
    recorders: list[GraphRunner] = []

    def runner(
        model: HuggingFaceModel,
        spec: CacheSpec,
        pools: LayerTensors,
        tables: BlockTable,
        kernels: AttentionKernels,
        host: HostRows | None = None,
    ) -> MirroredRunner:
        recorders.clear()
        if (made := gpu().graphs) is None or runs_eagerly(model, spec):
            return mirrored_runner(model, spec, pools, tables, kernels, host)
        assert isinstance(pools, TensorPools), "pools without a page for what pads a step"
        mirror = BlockTable(len(spec.groups), tables.rows + 1, tables.max_pages)
        eager = ModelRunner(model, spec, pools, mirror, kernels)
        recorders.append(replaying(eager, spec, pools, mirror, made(), options))
        return MirroredRunner(tables, mirror, recorders[0])

    def transfer(
        spec: CacheSpec, pools: TensorPools, arenas: Sequence[HostArena]
    ) -> CudaTransferEngine:
        here = gpu()
        choice = choice_on(at, here.trials, here.free)
        log.info("copies of %s: %s", at, choice)
        streams[:] = [CudaStreams.of(here.driver, choice)]
        engine = CudaTransferEngine(spec, pools, arenas, streams[0], here.pinned)
        pinnings[:] = [engine.pinning]
        return engine

    def host_rows(group: GroupId, pools: TensorPools, arenas: Sequence[HostArena]) -> HostRows:
        return CudaHostRows(group, pools, arenas, streams[0].swaps, pinnings[0].wait)

    def executor(runner: Runner, tokens: TokenSource) -> Executor:
        assert isinstance(runner, MirroredRunner), "a step needs its own copy of the block table"
        gpu().idle()  # weights came by another stream
        while recorders:  # nobody here keeps an engine's memory
            capture_on(at, recorders.pop(), gpu().free)
        return ThreadExecutor(runner, tokens, streams[0].compute)

    return Device(
        pools=lambda spec, pages: pools_on(gpu(), spec, pages),
        transfer=transfer,
        kernels=_kernels,
        runner=runner,
        host_rows=host_rows,
        executor=executor,
        steps_at_once=ThreadExecutor.depth,
        free=lambda: gpu().free(),
        at=at,
    )


def pools_on(gpu: Gpu, spec: CacheSpec, pages: Sequence[int]) -> TensorPools:
    """With a page more of each group, where steps may be recorded. ConfigError where they do not
    fit, which nobody can be sure of before: others may use the GPU too."""
    padding = int(gpu.graphs is not None and is_recordable(spec))
    try:
        return TensorPools(spec, pages, gpu.at, padding)
    except torch.OutOfMemoryError as error:
        wanted = format_bytes(device_bytes(spec, pages))
        raise ConfigError(
            f"--device-memory: the tier takes {wanted} of {gpu.at}, and {format_bytes(gpu.free())} "
            "are free; allowed is less, or a GPU that nobody else uses"
        ) from error


def choice_on(
    at: torch.device, trials: Callable[[], CopyChoice], free: Callable[[], int]
) -> CopyChoice:
    """How copies go best there. ConfigError where the pools leave no room to try that."""
    try:
        return trials()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--device-memory: copies are tried at start with {format_bytes(TRIAL_BYTES)} of {at} "
            f"beside the tier, and {format_bytes(free())} are free; allowed is less, or a GPU that "
            "nobody else uses"
        ) from error


def _kernels(model: HuggingFaceModel) -> AttentionKernels:
    return TritonKernels(model.device)


def _tried(driver: TorchCuda, at: torch.device) -> CopyChoice:
    choice = CopyChoice.of(copy_trials(driver.stream(urgent=False), trial_memory(at)))
    torch.cuda.empty_cache()  # of what was tried with
    return choice

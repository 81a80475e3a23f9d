"""Whose decode steps become CUDA graphs, and the start of those that do.

Owns the refusal, worded once and with its reason, and what the log says of what was recorded. Must
not record anything itself (``engine.cuda.graph_runner``).
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import nn

from stratakv.core.errors import ConfigError
from stratakv.core.units import format_bytes
from stratakv.engine.attention.torch_pools import TensorPools
from stratakv.engine.attention.triton_kernels import SPLIT_TOKENS
from stratakv.engine.cuda.graph_choice import GraphOptions, GraphSizes
from stratakv.engine.cuda.graph_runner import GraphRunner, Graphs
from stratakv.engine.huggingface.model import HuggingFaceModel
from stratakv.engine.huggingface.runner import ModelRunner
from stratakv.memory.block_table import BlockTable
from stratakv.spec.groups import CacheSpec
from stratakv.spec.model_config import ModelConfig
from stratakv.spec.support import latent_places

log = logging.getLogger(__name__)

READS_BACK: Final = frozenset({"dbrx", "phimoe"})
"""Model types whose code in Hugging Face's transformers reads numbers of the device, or tensors of
the host, in each call."""
GROUPS_STAY: Final = frozenset({9, 10})
"""First numbers of compute capabilities: Hopper and Blackwell's B100 to B300, and no later one."""


def is_recordable(spec: CacheSpec) -> bool:
    """Whether a step over such a cache has the same shape each time. Latents are expanded for all
    of a context, by Hugging Face's modules; selected rows are planned on the host."""
    return not (latent_places(spec) or spec.has_home_on_host)


def refusal(model: HuggingFaceModel, spec: CacheSpec) -> str | None:
    """Why its decode steps are not recorded; None where they are."""
    kind = str(model.config["model_type"])
    if not is_recordable(spec):
        return f"{kind} expands or selects what it reads of a context"
    if kind in READS_BACK:
        return f"the code of {kind} goes by the host in each step"
    if "dynamic" in _rope_types(model.config):
        return "rotary angles that change with a request's length are read back from the device"
    if model.ranks > 1:
        return "sums of several ranks are not recorded"
    if model.device.type == "cuda":
        capability = torch.cuda.get_device_capability(model.device)
        if reads_groups(model.module, model.module.dtype, capability):
            return "torch reads the sizes of experts' products back, but in bfloat16 on some GPUs"
    return None


def reads_groups(module: nn.Module, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether a forward multiplies by groups of tokens whose sizes the host reads: torch has a
    kernel that does not for bfloat16 on ``GROUPS_STAY`` alone."""
    if dtype == torch.bfloat16 and capability[0] in GROUPS_STAY:
        return False
    return any("_is_expert_parallel" in vars(part) for part in module.modules())


def runs_eagerly(model: HuggingFaceModel, spec: CacheSpec) -> bool:
    """Whether ``refusal`` has a reason, which the log gets."""
    if reason := refusal(model, spec):
        log.info("decode steps run eagerly, not as CUDA graphs: %s", reason)
    return reason is not None


def replaying(
    eager: ModelRunner,
    spec: CacheSpec,
    pools: TensorPools,
    tables: BlockTable,
    graphs: Graphs,
    options: GraphOptions,
) -> GraphRunner:
    """Before ``eager``, whose ``tables`` have a row more than requests may open, and its pools a
    page more than they may have."""
    sizes = GraphSizes.upto(options.most(tables.rows - 1), SPLIT_TOKENS)
    padding = {group.id: pools.pages[group.id] for group in spec.groups}
    return GraphRunner(eager, tables, padding, graphs, sizes)


def _rope_types(config: Mapping[str, object]) -> set[object]:
    """Of the model, or of each of its kinds of layers."""
    rope = ModelConfig(config).section("rope_parameters")
    kinds = [rope.section(name) for name, value in rope.fields.items() if isinstance(value, dict)]
    return {section.fields.get("rope_type") for section in (rope, *kinds)}


def capture_on(at: torch.device, runner: GraphRunner, free: Callable[[], int]) -> None:
    """Record all sizes. ConfigError where there is no room, and where a step cannot be recorded."""
    before, begin, sizes = free(), time.perf_counter(), runner.sizes.sizes
    try:
        runner.capture()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--cuda-graph-max-bs: CUDA graphs of up to {sizes[-1]} requests do not fit beside the "
            f"device tier; {format_bytes(before)} of {at} were free; allowed is less, "
            "--disable-cuda-graph, or a smaller --device-memory"
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            "--device cuda: decode steps of this model cannot be recorded as CUDA graphs; allowed "
            f"with --disable-cuda-graph: {error}"
        ) from error
    log.info(
        "%s CUDA graphs of up to %s requests, recorded in %.1f s, take %s of %s",
        len(sizes), sizes[-1], time.perf_counter() - begin,
        format_bytes(max(0, before - free())), at,
    )  # fmt: skip

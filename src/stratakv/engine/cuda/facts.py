"""Whether this machine can compute on a GPU, and why not.

Owns the refusals of ``--device cuda``. What torch says of the machine is one record, so that every
answer can be had anywhere; must not take a GPU's memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import torch

from stratakv.core.errors import ConfigError

LEAST_CAPABILITY: Final = (8, 0)
"""Ampere's: bfloat16 on tensor cores, and what kernels are compiled for at least."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFacts:
    """``built_for``: the CUDA release that torch was built with; None: without any. ``visible``:
    the variable that hides GPUs. ``name`` and ``capability``: of the GPU that is to be used, where
    ``index`` is one of ``gpus``. ``has_triton``: whether it is installed."""

    torch_version: str
    built_for: str | None
    gpus: int
    visible: str | None
    index: int
    name: str
    capability: tuple[int, int]
    has_triton: bool


def cuda_facts(environ: Mapping[str, str], index: int) -> CudaFacts:
    """Of this machine, and of the GPU ``index`` in it."""
    built_for = torch.version.cuda
    gpus = 0 if built_for is None else torch.cuda.device_count()
    there = index < gpus
    return CudaFacts(
        torch_version=torch.__version__,
        built_for=built_for,
        gpus=gpus,
        visible=environ.get(VISIBLE),
        index=index,
        name=torch.cuda.get_device_name(index) if there else "",
        capability=torch.cuda.get_device_capability(index) if there else (0, 0),
        has_triton=find_spec("triton") is not None,
    )


def cuda_refusal(found: CudaFacts) -> str | None:
    """Why it cannot be used; None where it can."""
    if found.built_for is None:
        return (
            f"torch {found.torch_version} is built without CUDA; allowed is --device cpu, or a "
            "torch that is built with it"
        )
    if found.index >= found.gpus:
        hidden = "" if found.visible is None else f" ({VISIBLE}={found.visible})"
        seen = "no GPU is" if not found.gpus else f"{found.gpus} of {found.index + 1} GPUs are"
        return f"{seen} visible{hidden}; allowed is --device cpu, or a GPU for each rank of --tp"
    if found.capability < LEAST_CAPABILITY:
        least, has = (".".join(map(str, one)) for one in (LEAST_CAPABILITY, found.capability))
        return (
            f"{found.name} has compute capability {has}; allowed is {least} and more, or "
            "--device cpu"
        )
    if not found.has_triton:
        return "Triton is not installed; allowed after: pip install 'stratakv[cuda]'"
    return None


def own_gpu(environ: Mapping[str, str]) -> int:
    """Which GPU is this process's, one of several ranks on a machine or alone. ConfigError where it
    cannot be used."""
    index = int(environ.get("LOCAL_RANK", 0))
    if reason := cuda_refusal(cuda_facts(environ, index)):
        raise ConfigError(f"--device cuda: {reason}")
    return index

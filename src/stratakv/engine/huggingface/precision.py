"""What decides the arithmetic of a process beside the model and its code.

Owns the list: releases, and the modes in which torch computes with less than a dtype says. Must not
set any.
"""

import os
from typing import Final

import torch
from torch import backends
from transformers import __version__ as transformers_release

from stratakv.engine.in_c import IN_C

_FPMATH: Final = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
"""oneDNN's own setting, and its old name: read from the environment by torch's CPU library."""


def releases() -> tuple[str, ...]:
    """Whose code runs the model: another release is another model, another build of it is not."""
    torch_release = str(torch.__version__).partition("+")[0]
    return (f"transformers {transformers_release}", f"torch {torch_release}")


def computed_on(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """A GPU rounds otherwise than a CPU, and one of another generation otherwise than this: their
    pages are another model's. All CPUs are one, but that float32 attends in C where that is built,
    which rounds otherwise than torch."""
    if device.type != "cpu":
        return (f"{device.type} {torch.cuda.get_device_capability(device)}",)
    return ("float32 in C",) if IN_C and dtype == torch.float32 else ()


def modes() -> tuple[str, ...]:
    """What this process has set so far. Who sets it later, with a model running, is not seen."""
    cuda, cudnn, mkldnn = backends.cuda.matmul, backends.cudnn, backends.mkldnn
    places = (backends, mkldnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn, cuda, cudnn, cudnn.conv)
    sums = (
        cuda.allow_fp16_reduced_precision_reduction,
        cuda.allow_bf16_reduced_precision_reduction,
        cuda.allow_fp16_accumulation,
    )
    cast = [(torch.is_autocast_enabled(at), torch.get_autocast_dtype(at)) for at in ("cpu", "cuda")]
    return (
        f"float32 {[place.fp32_precision for place in (*places, cudnn.rnn)]}",
        f"oneDNN {mkldnn.enabled} {[os.environ.get(name, '').lower() for name in _FPMATH]}",
        f"sums {sums} autocast {cast} dtype {torch.get_default_dtype()}",
    )

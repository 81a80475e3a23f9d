"""Which ``Device`` an engine of some settings runs on.

Owns what ``--device`` means. Must not take memory.
"""

import os
from typing import Any

from stratakv.assembly.device import CPU, Device
from stratakv.core.config import EngineConfig
from stratakv.engine.cuda.facts import own_gpu
from stratakv.engine.cuda.graph_choice import GraphOptions


def device_of(config: EngineConfig) -> Device[Any]:
    """ConfigError where this machine has no such device, or none that it can compute on. Takes no
    memory of it."""
    if config.device == "cpu":
        return CPU
    index = own_gpu(os.environ)
    from stratakv.assembly.cuda import cuda_device  # noqa: PLC0415 - only a GPU needs Triton

    options = GraphOptions(not config.disable_cuda_graph, config.cuda_graph_max_bs)
    return cuda_device(index, options)

"""Weights that Hugging Face's loader has left in mapped files, copied into memory of our own.

Owns the copy. A mapped weight is what its file is from moment to moment: whoever writes that file
would change a running model under its identity. Must not know what weights are for.
"""

import re
from bisect import bisect_right
from pathlib import Path
from typing import Final

import torch
from torch import nn

_MAPS: Final = Path("/proc/self/maps")
_FILE: Final = re.compile(r"(?m)^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d* ")
"""A mapping that has an inode."""


def own_weights(module: nn.Module) -> None:
    """Copy every parameter and buffer that lies in a mapped file, or may do so."""
    found: list[tuple[str, str]] = _FILE.findall(_MAPS.read_text("utf-8", "replace"))
    mapped = sorted((int(low, 16), int(high, 16)) for low, high in found)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and _may_lie_in(tensor.data, mapped):
            tensor.data = tensor.data.clone()


def _may_lie_in(tensor: torch.Tensor, ranges: list[tuple[int, int]]) -> bool:
    if type(tensor) is not torch.Tensor:
        return True  # of parts that are tensors themselves, and says no address
    at = tensor.data_ptr()
    before = bisect_right(ranges, (at, 1 << 64)) - 1
    return before >= 0 and at < ranges[before][1]

"""What a model's weights take in memory, before they are there.

Owns the count. Reads headers of files alone; must not load a tensor.
"""

from math import prod
from pathlib import Path
from typing import Final

from stratakv.core.identity.safetensors_layout import read_layout
from stratakv.spec.groups import DTYPE_BYTES

FLOATS: Final = frozenset(("F32", "BF16", "F16"))
"""Of weights that are loaded as any of these."""


def weights_bytes(directory: Path, dtype: str) -> int:
    """What the weights of a model directory take in memory, as ``dtype``."""
    return sum(_tensor_bytes(path, dtype) for path in directory.glob("*.safetensors"))


def _tensor_bytes(path: Path, dtype: str) -> int:
    with path.open("rb") as file:
        size = path.stat().st_size
        try:
            tensors = read_layout(file.fileno(), size).tensors
        except ValueError:  # whoever loads it will say so
            return size
    return sum(
        prod(tensor.shape) * DTYPE_BYTES[dtype] if tensor.dtype in FLOATS else tensor.size
        for tensor in tensors
    )

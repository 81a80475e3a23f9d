"""Weights that Hugging Face's loader has left in mapped files, moved into memory of our own.

Owns the move. A mapped weight is what its file is from moment to moment: whoever writes that file
would change a running model under its identity. The loader has not touched the pages of such a
weight yet, so nothing is copied out of them: the bytes at its place in the file, as the identity
has read and hashed them, take its place. Must not know what weights are for.
"""

import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, apply_converters

from stratakv.core.identity.file_stat import open_file
from stratakv.core.identity.safetensors_layout import StoredTensor
from stratakv.core.model_identity import ModelIdentity

_MAPS: Final = Path("/proc/self/smaps")
_FILE: Final = re.compile(
    r"(?m)^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+ [1-9]\d* .*)\n"
    r"(?:\w+: .*\n)*?Anonymous: +(\d+) kB\n(?:\w+: .*\n)*?Swap: +(\d+) kB$"
)
"""A mapping that has an inode, and how much of it is not the file's any more."""
_STORED: Final[Mapping[str, str]] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class _Mapping:
    """``offset``: where in its file it begins. ``file``: device, inode and path, as the kernel
    shows them. ``whole``: whether no page of it was written to."""

    low: int
    high: int
    offset: int
    file: str
    whole: bool


def left_by_the_loader(kind: str, dtype: str) -> Callable[[StoredTensor], bool]:
    """Whether Hugging Face leaves a stored tensor as it is while it loads a model of ``kind``, and
    makes none of another dtype of it, nor one fused of several. A guess: it decides only when a
    tensor is read."""
    converters = [
        one
        for one in get_checkpoint_conversion_mapping(kind) or ()
        if isinstance(one, WeightConverter)
    ]

    def left(tensor: StoredTensor) -> bool:
        if tensor.dtype != _STORED[dtype]:
            return False
        return apply_converters(tensor.name, converters)[1] is None

    return left


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Which bytes of a file a tensor is; ``path``: None where that is unknown."""

    tensor: torch.Tensor
    path: Path | None
    begin: int
    end: int


def own_weights(module: nn.Module, identity: ModelIdentity) -> None:
    """Move every parameter and buffer that lies in a mapped file. What lies in a file of the
    identity, unwritten, becomes what the identity has read of it; anything else is copied.
    ConfigError, on every peer of the identity, where there is no memory for them."""
    places = _places(module, identity.paths)
    used: dict[Path, list[tuple[int, int]]] = {}
    for place in places:
        if place.path is not None:
            used.setdefault(place.path, []).append((place.begin, place.end))
    held = identity.take(used)
    try:
        for place in places:
            found = None if place.path is None else held.lookup(place.path, place.begin, place.end)
            data = place.tensor.data
            place.tensor.data = data.clone() if found is None else _view(data, found)
    except (MemoryError, RuntimeError) as error:  # the latter is torch's
        identity.refuse(f"MODEL {identity.directory}: no memory for its weights: {error}")


def _places(module: nn.Module, paths: Sequence[Path]) -> list[_Place]:
    """Of what lies in mapped files, or may do so."""
    mapped, files = _mappings(paths)
    found: list[_Place] = []
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type != "cpu":
            continue
        if type(tensor.data) is not torch.Tensor:
            found.append(_Place(tensor, None, 0, 0))  # of parts that are tensors, has no address
        elif (mapping := _at(tensor.data_ptr(), mapped)) is not None:
            begin = tensor.data_ptr() - mapping.low + mapping.offset
            path = files.get(mapping.file) if mapping.whole and tensor.numel() else None
            found.append(_Place(tensor, path, begin, begin + _span(tensor)))
    return found


def _mappings(paths: Sequence[Path]) -> tuple[Sequence[_Mapping], Mapping[str, Path]]:
    """All of this process, by address, and what the kernel shows for mappings of ``paths``: where
    file systems lie on one another, no look at a file says that."""
    own: list[int] = []
    with ExitStack() as opened:
        for path in paths:
            fd = open_file(path)
            opened.callback(os.close, fd)
            mapping = opened.enter_context(mmap.mmap(fd, 1, access=mmap.ACCESS_READ))
            own.append(np.frombuffer(mapping, np.uint8).ctypes.data)
        text = _MAPS.read_text("utf-8", "replace")
    rows: list[tuple[str, ...]] = _FILE.findall(text)
    found = [
        _Mapping(int(low, 16), int(high, 16), int(offset, 16), file, {"0"} == set(written))
        for low, high, offset, file, *written in rows
    ]
    found.sort(key=_low)
    shown = ((path, _at(address, found)) for path, address in zip(paths, own, strict=True))
    return found, {mapping.file: path for path, mapping in shown if mapping is not None}


def _low(mapping: _Mapping) -> int:
    return mapping.low


def _at(address: int, mapped: Sequence[_Mapping]) -> _Mapping | None:
    before = bisect_right(mapped, address, key=_low) - 1
    return mapped[before] if before >= 0 and address < mapped[before].high else None


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first element to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _view(tensor: torch.Tensor, buffer: memoryview) -> torch.Tensor:
    """Of ``buffer``, shaped and strided as ``tensor``."""
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    if flat.data_ptr() % tensor.element_size():
        flat = flat.clone()
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

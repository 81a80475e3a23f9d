"""The layout of a safetensors file, read from its header.

Owns the checks that make every byte of the data one tensor's: a header that says otherwise is
refused before anything is read by it. Must not read data.

    length of the header, u64 LE | header, JSON | data; offsets count from the start of the data
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, cast

LENGTH_BYTES: Final = 8
MOST_HEADER_BYTES: Final = 100_000_000
"""Safetensors' own limit."""
BITS: Final[Mapping[str, int]] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Of one element, by dtype."""
METADATA: Final = "__metadata__"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """``begin``, ``end``: its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Layout:
    """``tensors``: in the order of their bytes. ``header``: SHA-256 of the header as it stands."""

    tensors: Sequence[StoredTensor]
    metadata: Mapping[str, str]
    header: bytes


def read_layout(fd: int, size: int) -> Layout:
    """Of an open file of ``size`` bytes. ValueError says what is wrong with it."""
    length = int.from_bytes(_read(fd, 0, LENGTH_BYTES), "little")
    if length > min(MOST_HEADER_BYTES, size - LENGTH_BYTES):
        raise ValueError(f"its header claims {length} bytes of {size}")
    text = _read(fd, LENGTH_BYTES, length)
    try:
        header: object = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("its header is nested too deep") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    entries = cast("dict[str, object]", header)
    metadata = entries.pop(METADATA, {})
    start = LENGTH_BYTES + length
    tensors = sorted(
        (_tensor(name, entry, start) for name, entry in entries.items()),
        key=lambda tensor: (tensor.begin, tensor.end, tensor.name),
    )
    at = start
    for tensor in tensors:
        if tensor.begin != at:
            raise ValueError(f"{tensor.name} begins at byte {tensor.begin} and not at {at}")
        at = tensor.end
    if at != size:
        raise ValueError(f"its tensors end at byte {at}, and it has {size}")
    return Layout(tensors, _texts(metadata), hashlib.sha256(text).digest())


def _read(fd: int, at: int, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = os.pread(fd, count - len(found), at + len(found))
        if not part:
            raise ValueError(f"it ends at byte {at + len(found)}, within its header")
        found += part
    return bytes(found)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has a name twice")
    return found


def _texts(metadata: object) -> Mapping[str, str]:
    if not isinstance(metadata, dict):
        raise ValueError(f"its {METADATA} is no JSON object")
    found = cast("dict[str, object]", metadata)
    if not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"its {METADATA} holds what is no text")
    return cast("dict[str, str]", found)


def _tensor(name: str, entry: object, start: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            sizes = cast("list[object]", shape)
        case _:
            raise ValueError(f"{name} has no dtype, shape and data_offsets")
    numbers: list[int] = []
    for number in (*sizes, begin, end):
        if type(number) is not int or number < 0:
            raise ValueError(f"{name} has {number!r} for a size or an offset")
        numbers.append(number)
    *dims, first, last = numbers
    if dtype not in BITS:
        raise ValueError(f"{name} is of unknown dtype {dtype}")
    if prod(dims) * BITS[dtype] != (last - first) * 8:
        raise ValueError(f"{name} of {dtype} {dims} does not take {last - first} bytes")
    return StoredTensor(name, dtype, tuple(dims), start + first, start + last)

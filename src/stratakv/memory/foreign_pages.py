"""Device pages that somebody else has laid out, and that this process can address.

Owns nothing but the way there: the memory stays its owner's, who keeps it for as long as copies may
touch it. Must not allocate or free.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from stratakv.core.ids import GroupId
from stratakv.memory.mapped import Bytes
from stratakv.spec.groups import CacheSpec


@dataclass(frozen=True, slots=True)
class Place:
    """``address``: of page 0, in bytes. ``page_stride_bytes``: from one page to the next."""

    address: int
    page_stride_bytes: int


Places: TypeAlias = Mapping[tuple[GroupId, str, int], Place]
"""By group, buffer and the layer's place in the buffer."""


class ForeignPages:
    """``pages[g]`` pages of group g, each layer of each buffer at its own place: ``DevicePages``.
    ValueError where a place is missing or at no address, or its pages would overlap."""

    def __init__(self, spec: CacheSpec, pages: Sequence[int], places: Places) -> None:
        self.pages = tuple(pages)
        if len(pages) != len(spec.groups):
            raise ValueError(f"{len(pages)} counts of pages for {len(spec.groups)} groups")
        self._layers: dict[tuple[GroupId, str, int], Bytes] = {}
        for group, count in zip(spec.groups, pages, strict=True):
            for buffer in group.buffers:
                for layer in range(len(buffer.layers)):
                    where = (group.id, buffer.name, layer)
                    if where not in places:
                        raise ValueError(
                            f"no place for layer {layer} of {group.name}.{buffer.name}"
                        )
                    self._layers[where] = _view(places[where], count, buffer.layer_bytes)

    def layer_pages(self, group: GroupId, buffer_name: str, layer: int) -> Bytes:
        return self._layers[group, buffer_name, layer]


def _view(place: Place, pages: int, page_bytes: int) -> Bytes:
    stride = place.page_stride_bytes
    if stride < page_bytes:
        raise ValueError(f"pages of {page_bytes} bytes lie {stride} bytes apart")
    if place.address <= 0:
        raise ValueError(f"no memory is at address {place.address}")
    size = (pages - 1) * stride + page_bytes if pages else 0
    if not size:
        return np.empty((pages, page_bytes), np.uint8)
    memory = memoryview((ctypes.c_uint8 * size).from_address(place.address)).cast("B")
    return np.ndarray((pages, page_bytes), np.uint8, memory, strides=(stride, 1))

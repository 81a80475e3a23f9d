"""The device tier's bytes as tensors: what a model's layers read and write. Owns the views, and the
memory where it is a device's own; on the CPU that is ``memory.device_pools``'.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from stratakv.core.ids import GroupId, LayerId
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.foreign_pages import ForeignPages, Place
from stratakv.memory.mapped import Bytes
from stratakv.spec.groups import BufferSpec, CacheSpec

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "uint8": torch.uint8,
    "int8": torch.int8,
}


class LayerTensors(Protocol):
    """Pools of a device, as a model's layers see them."""

    def layer(self, group: GroupId, buffer_name: str, layer_id: LayerId) -> torch.Tensor:
        """[pages, rows_per_page, *row_shape] in the buffer's dtype, where the model runs; what is
        written to it is on the pages."""
        ...


class TorchPools(DevicePools):
    """``DevicePools``, and a tensor over the same memory for each layer of each buffer."""

    def __init__(self, spec: CacheSpec, pages: Sequence[int]) -> None:
        super().__init__(spec, pages)
        self._layers: dict[tuple[GroupId, str, LayerId], torch.Tensor] = {}
        for group in spec.groups:
            for buffer in group.buffers:
                whole = torch.from_numpy(self.raw(group.id, buffer.name))
                for layer_id, layer in zip(buffer.layers, whole, strict=True):
                    self._layers[group.id, buffer.name, layer_id] = _typed(layer, buffer)

    def layer(self, group: GroupId, buffer_name: str, layer_id: LayerId) -> torch.Tensor:
        """As ``LayerTensors.layer``, sharing memory with ``raw``."""
        return self._layers[group, buffer_name, layer_id]


class TensorPools:
    """The same in torch's memory on ``device``. What copies gets addresses: ``layer_pages`` are
    arrays that only the device may follow, where it is not the CPU. ``padding``: pages behind those
    of each group, zeros at first, that layers see and nobody gives out or copies.
    torch.OutOfMemoryError where the device has not so much."""

    def __init__(
        self, spec: CacheSpec, pages: Sequence[int], device: torch.device, padding: int = 0
    ) -> None:
        self._layers: dict[tuple[GroupId, str, LayerId], torch.Tensor] = {}
        places: dict[tuple[GroupId, str, int], Place] = {}
        for group, count in zip(spec.groups, pages, strict=True):
            for buffer in group.buffers:
                shape = (len(buffer.layers), max(count + padding, 1), buffer.layer_bytes)
                whole = torch.empty(shape, dtype=torch.uint8, device=device)
                whole[:, count:].zero_()
                for at, (layer_id, layer) in enumerate(zip(buffer.layers, whole, strict=True)):
                    self._layers[group.id, buffer.name, layer_id] = _typed(
                        layer[: count + padding], buffer
                    )
                    places[group.id, buffer.name, at] = Place(layer.data_ptr(), buffer.layer_bytes)
        self._places = ForeignPages(spec, pages, places)

    @property
    def pages(self) -> Sequence[int]:
        return self._places.pages

    def layer(self, group: GroupId, buffer_name: str, layer_id: LayerId) -> torch.Tensor:
        return self._layers[group, buffer_name, layer_id]

    def layer_pages(self, group: GroupId, buffer_name: str, layer: int) -> Bytes:
        return self._places.layer_pages(group, buffer_name, layer)


def _typed(layer: torch.Tensor, buffer: BufferSpec) -> torch.Tensor:
    typed = layer.view(TORCH_DTYPES[buffer.dtype])
    return typed.view(layer.shape[0], buffer.rows_per_page, *buffer.row_shape)

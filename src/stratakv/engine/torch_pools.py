"""The device tier's bytes as tensors: what a model's layers read and write. Owns the views; the
memory is ``memory.device_pools``'.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from stratakv.core.ids import GroupId, LayerId
from stratakv.memory.device_pools import DevicePools
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


def _typed(layer: torch.Tensor, buffer: BufferSpec) -> torch.Tensor:
    typed = layer.view(TORCH_DTYPES[buffer.dtype])
    return typed.view(layer.shape[0], buffer.rows_per_page, *buffer.row_shape)

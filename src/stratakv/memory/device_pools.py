"""Bytes of the device tier: one tensor per sidecar buffer, addressed by its group's page ids.

Owns the tensors; must not allocate page ids (``allocator``) or know who uses a page.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from stratakv.core.ids import GroupId, LayerId, PageIds
from stratakv.memory.layout import ALIGNMENT_BYTES
from stratakv.spec.groups import BufferSpec, CacheSpec

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "uint8": torch.uint8,
    "int8": torch.int8,
}

POISON: Final = 0xFF
"""All ones is a NaN in every float dtype of ``TORCH_DTYPES``."""


class DevicePools:
    """Every buffer of every group of a spec; ``pages[g]`` pages of group g.

    Contents start undefined: memory is touched when a page is first written, where the device lets
    us.
    """

    def __init__(self, spec: CacheSpec, pages: Sequence[int], device: torch.device) -> None:
        assert len(pages) == len(spec.groups), f"{len(pages)} counts, {len(spec.groups)} groups"
        self.spec = spec
        self.pages = tuple(pages)
        self.device = device
        self._raw: dict[tuple[GroupId, str], torch.Tensor] = {}
        self._layers: dict[tuple[GroupId, str, LayerId], torch.Tensor] = {}
        for group, count in zip(spec.groups, pages, strict=True):
            for buffer in group.buffers:
                shape = (len(buffer.layers), count, buffer.rows_per_page, buffer.row_bytes)
                raw = torch.empty(shape, dtype=torch.uint8, device=device)
                assert raw.data_ptr() % ALIGNMENT_BYTES == 0, "the device's allocator is unaligned"
                self._raw[group.id, buffer.name] = raw
                for index, layer_id in enumerate(buffer.layers):
                    view = _typed(raw[index], buffer)
                    self._layers[group.id, buffer.name, layer_id] = view

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers: exactly pages x ``CacheGroup.page_bytes``, summed over groups."""
        return sum(raw.nbytes for raw in self._raw.values())

    @property
    def bytes_total(self) -> int:
        return self.size_bytes

    def raw(self, group: GroupId, buffer_name: str) -> torch.Tensor:
        """uint8 [layers, pages, rows_per_page, row_bytes]; layers in ``BufferSpec`` order."""
        return self._raw[group, buffer_name]

    def layer(self, group: GroupId, buffer_name: str, layer_id: LayerId) -> torch.Tensor:
        """[pages, rows_per_page, *row_shape] in the buffer's dtype, sharing memory with ``raw``."""
        return self._layers[group, buffer_name, layer_id]

    def poison(self, group: GroupId, pages: PageIds) -> None:
        """Fill pages with NaN (integers: 0xFF bytes), so that reading a stale row shows."""
        index = torch.from_numpy(pages.astype(np.int64)).to(self.device)
        for buffer in self.spec.groups[group].buffers:
            self._raw[group, buffer.name][:, index] = POISON


def _typed(layer: torch.Tensor, buffer: BufferSpec) -> torch.Tensor:
    typed = layer.view(TORCH_DTYPES[buffer.dtype])
    return typed.view(layer.shape[0], buffer.rows_per_page, *buffer.row_shape)

"""Bytes of the device tier: one array per sidecar buffer, addressed by its group's page ids.

Owns memory that the CPU can address, and what an engine of the CPU has to know of any such memory.
Must not allocate page ids (``allocator``) or know who uses a page.
"""

from collections.abc import Sequence
from typing import Protocol

from stratakv.core.ids import GroupId, PageIds
from stratakv.memory.mapped import POISON, Bytes, mapped_bytes, rows_of
from stratakv.spec.groups import CacheSpec


class DevicePages(Protocol):
    """Pages of the device tier, in this process's memory, whoever owns them."""

    @property
    def pages(self) -> Sequence[int]:
        """How many there are of each group."""
        ...

    def layer_pages(self, group: GroupId, buffer_name: str, layer: int) -> Bytes:
        """uint8 [pages, ``BufferSpec.layer_bytes``] of one layer, by its place in the buffer. A
        page lies together; from one page to the next there may be any number of bytes."""
        ...


class DevicePools:
    """Every buffer of every group of a spec; ``pages[g]`` pages of group g.

    Contents start undefined: memory is touched when a page is first written.
    """

    def __init__(self, spec: CacheSpec, pages: Sequence[int]) -> None:
        assert len(pages) == len(spec.groups), f"{len(pages)} counts, {len(spec.groups)} groups"
        self.spec = spec
        self.pages = tuple(pages)
        self._raw: dict[tuple[GroupId, str], Bytes] = {
            (group.id, buffer.name): mapped_bytes(
                len(buffer.layers), count, buffer.rows_per_page, buffer.row_bytes
            )
            for group, count in zip(spec.groups, pages, strict=True)
            for buffer in group.buffers
        }

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers: exactly pages x ``CacheGroup.page_bytes``, summed over groups."""
        return sum(raw.nbytes for raw in self._raw.values())

    def raw(self, group: GroupId, buffer_name: str) -> Bytes:
        """uint8 [layers, pages, rows_per_page, row_bytes]; layers in ``BufferSpec`` order."""
        return self._raw[group, buffer_name]

    def layer_pages(self, group: GroupId, buffer_name: str, layer: int) -> Bytes:
        raw = self._raw[group, buffer_name][layer]
        return raw.reshape(len(raw), raw.shape[1] * raw.shape[2])

    def poison(self, group: GroupId, pages: PageIds) -> None:
        """Fill pages with NaN (integers: 0xFF bytes), so that reading a stale row shows."""
        for buffer in self.spec.groups[group].buffers:
            self._raw[group, buffer.name][:, rows_of(pages)] = POISON

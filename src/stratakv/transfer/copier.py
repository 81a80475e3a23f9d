"""What moves bytes for a CPU transfer engine, and between which two ends.

Owns ``CopyRoute`` (where some segments of a group lie at both ends) and the ``Copier`` protocol.
Must not know threads, tickets or gates (``cpu``).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import LayerId, PageIds
from stratakv.memory.device_pools import DevicePages
from stratakv.memory.host_arena import HostArena
from stratakv.memory.layout import PageSlice
from stratakv.memory.mapped import Bytes
from stratakv.spec.groups import CacheGroup
from stratakv.transfer.copy_plan import PageRows

SegmentRows: TypeAlias = npt.NDArray[np.int64]
"""int64 [segments, 4]: address of device page 0, bytes from one device page to the next, offset in
the host page, bytes."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CopyRoute:
    """Segments of one group that are copied together: all of a page, or those of one layer.

    ``device[i]`` is uint8 [device pages, bytes] and ``rows[i]`` the addresses of ``segments[i]``;
    ``arena`` is uint8 [host pages, stride]. Holding the arrays keeps the addresses valid.
    """

    group: CacheGroup
    segments: tuple[PageSlice, ...]
    device: tuple[Bytes, ...]
    arena: Bytes
    arena_address: int
    rows: SegmentRows

    @classmethod
    def of(
        cls,
        pools: DevicePages,
        arena: HostArena,
        layers: Collection[LayerId],
        buffer: str | None = None,
    ) -> "CopyRoute":
        """The route of the arena's group that takes the segments of ``layers``, of all buffers or
        of one."""
        group = arena.group
        segments = tuple(
            item
            for item in arena.layout.segments
            if item.layer_id in layers and buffer in {None, group.buffers[item.buffer].name}
        )
        device = tuple(
            pools.layer_pages(group.id, group.buffers[item.buffer].name, item.layer)
            for item in segments
        )
        for pages, item in zip(device, segments, strict=True):
            assert pages.dtype == np.uint8, f"device pages are bytes, not {pages.dtype}"
            assert pages.shape[1] == item.bytes, f"{pages.shape[1]} bytes of a page, {item.bytes}"
            together = item.bytes == 1 or pages.strides[1] == 1  # of one byte NumPy says anything
            assert together, "a device page does not lie together"
        rows = [
            (pages.ctypes.data, pages.strides[0], item.offset_bytes, item.bytes)
            for pages, item in zip(device, segments, strict=True)
        ]
        table = np.array(rows, np.int64).reshape(len(segments), 4)
        return cls(
            group=group,
            segments=segments,
            device=device,
            arena=arena.bytes,
            arena_address=arena.bytes.ctypes.data,
            rows=table,
        )


class Copier(Protocol):
    """Copies pages along a route, in the calling thread; returns when every byte is there.

    ``device[i]`` and ``host[i]`` (int32 [n]) are the two ends of copy i. An error may leave the
    destination half written.
    """

    def gather(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        """Device pages into host pages."""
        ...

    def scatter(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        """Host pages into device pages."""
        ...

    def gather_rows(self, route: CopyRoute, device: PageRows, host: PageRows) -> None:
        """Device rows into host rows, of a route of one segment."""
        ...

    def scatter_rows(self, route: CopyRoute, device: PageRows, host: PageRows) -> None:
        """Host rows into device rows, of a route of one segment."""
        ...

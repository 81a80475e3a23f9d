"""What moves bytes for a CPU transfer engine, and between which two ends.

Owns ``Route`` (where some segments of a group lie at both ends) and the ``Copier`` protocol. Must
not know threads, tickets or gates (``cpu``).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import LayerId, PageIds
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.memory.layout import Segment
from stratakv.spec.groups import CacheGroup

SegmentRows: TypeAlias = npt.NDArray[np.int64]
"""int64 [segments, 4]: address of device page 0, bytes from one device page to the next, offset in
the host page, bytes."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Route:
    """Segments of one group that are copied together: all of a page, or those of one layer.

    ``device[i]`` is uint8 [device pages, bytes] and ``rows[i]`` the addresses of ``segments[i]``;
    ``arena`` is uint8 [host pages, stride]. Holding the tensors keeps the addresses valid.
    """

    group: CacheGroup
    segments: tuple[Segment, ...]
    device: tuple[torch.Tensor, ...]
    arena: torch.Tensor
    rows: SegmentRows

    @classmethod
    def of(cls, pools: DevicePools, arena: HostArena, layers: Collection[LayerId]) -> "Route":
        """The route of the arena's group that takes the segments of ``layers``."""
        group = arena.group
        segments = tuple(item for item in arena.layout.segments if item.layer_id in layers)
        device = tuple(
            pools.raw(group.id, group.buffers[item.buffer].name)[item.layer].flatten(1)
            for item in segments
        )
        rows = [
            (pages.data_ptr(), item.bytes, item.offset_bytes, item.bytes)
            for pages, item in zip(device, segments, strict=True)
        ]
        table = np.array(rows, np.int64).reshape(len(segments), 4)
        return cls(group=group, segments=segments, device=device, arena=arena.bytes, rows=table)


class Copier(Protocol):
    """Copies pages along a route, in the calling thread; returns when every byte is there.

    ``device[i]`` and ``host[i]`` (int32 [n]) are the two ends of copy i. An error may leave the
    destination half written.
    """

    def gather(self, route: Route, device: PageIds, host: PageIds) -> None:
        """Device pages into host pages."""
        ...

    def scatter(self, route: Route, device: PageIds, host: PageIds) -> None:
        """Host pages into device pages."""
        ...

"""Rows of host pages for a step that is running: what attention reads of spilled requests.

Owns the protocol, and its implementation where the CPU addresses both ends. Unlike a plan of the
transfer engine a read has no ticket: it is done when the call returns, or, on a device with a
stream, before what is launched next. Pages are pinned by whoever asks.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from stratakv.core.ids import GroupId, LayerId, PageIds
from stratakv.memory.device_pools import DevicePages
from stratakv.memory.host_arena import HostArena
from stratakv.memory.mapped import Bytes
from stratakv.transfer.copier import Copier, CopyRoute
from stratakv.transfer.copy_plan import PageRows
from stratakv.transfer.cpu import DEFAULT_COPIER


class HostRows(Protocol):
    """Of one group, whose layers have one buffer each."""

    def load(self, layer: LayerId, device: PageRows, host: PageRows) -> None:
        """Copy host rows to device rows, one by one."""
        ...

    def pages(self, layer: LayerId, pages: PageIds) -> Bytes:
        """What a layer has on host ``pages``: uint8 [n, bytes], the caller's own."""
        ...


class CpuHostRows:
    """A ``HostRows`` by copies in the calling thread."""

    def __init__(
        self,
        group: GroupId,
        pools: DevicePages,
        arenas: Sequence[HostArena],
        copier: Copier = DEFAULT_COPIER,
    ) -> None:
        arena = arenas[group]
        layers = [layer for buffer in arena.group.buffers for layer in buffer.layers]
        self._routes = {layer: CopyRoute.of(pools, arena, (layer,)) for layer in layers}
        self._copier = copier

    def load(self, layer: LayerId, device: PageRows, host: PageRows) -> None:
        if len(host):
            self._copier.scatter_rows(self._routes[layer], device, host)

    def pages(self, layer: LayerId, pages: PageIds) -> Bytes:
        route = self._routes[layer]
        (segment,) = route.segments
        part = slice(segment.offset_bytes, segment.offset_bytes + segment.bytes)
        return np.ascontiguousarray(route.arena[pages, part])

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
    """Of one group."""

    def load(self, layer: LayerId, device: PageRows, host: PageRows) -> None:
        """Copy host rows to device rows, one by one, in a layer that has one buffer."""
        ...

    def load_pages(self, layer: LayerId, device: PageIds, host: PageIds) -> None:
        """Copy what the layer has on host pages to device pages."""
        ...

    def route(self, layer: LayerId) -> CopyRoute:
        """Where what a layer has lies at both ends, for a device that copies by itself: it may
        follow every address from then on."""
        ...

    def pages(self, layer: LayerId, pages: PageIds) -> Bytes:
        """What a layer has on host ``pages``: uint8 [n, bytes], the caller's own; one buffer after
        the other."""
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

    def load_pages(self, layer: LayerId, device: PageIds, host: PageIds) -> None:
        if len(host):
            self._copier.scatter(self._routes[layer], device, host)

    def route(self, layer: LayerId) -> CopyRoute:
        return self._routes[layer]

    def pages(self, layer: LayerId, pages: PageIds) -> Bytes:
        route = self._routes[layer]
        parts = [
            route.arena[pages, part.offset_bytes : part.offset_bytes + part.bytes]
            for part in route.segments
        ]
        return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, 1)

"""Copies on a device's own streams: which bytes go where, and in what order.

Owns the arithmetic of addresses, and which stream a direction has. What a stream is comes in as
``CopyStream``: a driver's, or in tests one that is late at random. A copy is queued here and made
when the stream comes to it; ``StreamCopier`` is therefore a ``Copier`` and a ``CopyOrder`` at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import GroupId, LayerId, PageIds
from stratakv.memory.mapped import rows_of
from stratakv.transfer.copier import CopyRoute
from stratakv.transfer.copy_plan import Direction, Fence, PageRows

Addresses: TypeAlias = npt.NDArray[np.int64]
WORD_BYTES: Final = 16
"""What a thread of a GPU reads at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """``sizes[i]`` bytes from address ``sources[i]`` to ``targets[i]``, int64 [n] each. No target
    is written twice. ``group`` and ``layers`` are whose they are, for who traces them."""

    group: GroupId
    layers: frozenset[LayerId]
    targets: Addresses
    sources: Addresses
    sizes: Addresses

    @property
    def wide(self) -> bool:
        """Whether all of it goes in words of ``WORD_BYTES``."""
        every = np.bitwise_or.reduce(self.targets) | np.bitwise_or.reduce(self.sources)
        return not (every | np.bitwise_or.reduce(self.sizes)) % WORD_BYTES


class CopyStream(Protocol):
    """Does what it is given in order, while the caller goes on."""

    def after(self, fence: Fence) -> None:
        """What is queued from now on comes after ``fence``; may block its caller."""
        ...

    def copy(self, moves: Moves) -> None:
        """Queue a copy; the arrays are the stream's from now on."""
        ...

    def mark(self) -> Fence:
        """Passes when all that was queued so far is done."""
        ...


Registered: TypeAlias = Callable[[GroupId, int], None]
"""Returns once a device may address the first so many bytes of a group's host pages."""


def _at_once(group: GroupId, size_bytes: int) -> None:
    del group, size_bytes


class StreamCopier:
    """Two streams, one for each direction. ``registered``: host memory that a driver must have
    been told of first is waited for on the thread that copies."""

    def __init__(
        self, streams: Mapping[Direction, CopyStream], registered: Registered = _at_once
    ) -> None:
        self._streams = streams
        self._registered = registered

    def after(self, direction: Direction, fence: Fence) -> None:
        self._streams[direction].after(fence)

    def mark(self, direction: Direction) -> Fence:
        return self._streams[direction].mark()

    def gather(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        self._move(Direction.BACKUP, route, *page_ends(route, device, host), host)

    def scatter(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        self._move(Direction.LOAD, route, *page_ends(route, device, host), host)

    def gather_rows(self, route: CopyRoute, device: PageRows, host: PageRows) -> None:
        self._move(Direction.BACKUP, route, *row_ends(route, device, host), host.pages)

    def scatter_rows(self, route: CopyRoute, device: PageRows, host: PageRows) -> None:
        self._move(Direction.LOAD, route, *row_ends(route, device, host), host.pages)

    def _move(
        self,
        direction: Direction,
        route: CopyRoute,
        device: Addresses,
        host: Addresses,
        sizes: Addresses,
        pages: PageIds,
    ) -> None:
        if not len(sizes):
            return
        group, layers = route.group.id, _layers(route)
        self._registered(group, (int(pages.max()) + 1) * route.arena.shape[1])
        ends = (host, device) if direction is Direction.BACKUP else (device, host)
        self._streams[direction].copy(Moves(group, layers, *ends, sizes))


def page_ends(
    route: CopyRoute, device: PageIds, host: PageIds
) -> tuple[Addresses, Addresses, Addresses]:
    """Addresses on the device and on the host, and bytes, of each segment of each page; pages that
    follow one another in memory stay apart."""
    base, stride, offset, size = route.rows.T
    pages, places = rows_of(device), rows_of(host)
    arena = route.arena
    there = arena.ctypes.data + places[:, None] * arena.shape[1] + offset
    here = base + pages[:, None] * stride
    return here.ravel(), there.ravel(), np.tile(size, len(pages))


def row_ends(
    route: CopyRoute, device: PageRows, host: PageRows
) -> tuple[Addresses, Addresses, Addresses]:
    """The same of single rows, along a route of one segment."""
    ((base, stride, offset, size),) = route.rows.tolist()
    (segment,) = route.segments
    row_bytes = size // route.group.buffers[segment.buffer].rows_per_page
    arena = route.arena
    here = base + rows_of(device.pages) * stride + rows_of(device.offsets) * row_bytes
    there = arena.ctypes.data + rows_of(host.pages) * arena.shape[1] + offset
    there = there + rows_of(host.offsets) * row_bytes
    return here, there, np.full(len(here), row_bytes, np.int64)


def _layers(route: CopyRoute) -> frozenset[LayerId]:
    return frozenset(segment.layer_id for segment in route.segments)

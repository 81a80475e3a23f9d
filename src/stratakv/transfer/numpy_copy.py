"""The copier in plain NumPy: what an installation without a compiler uses, and the second opinion
on the one in C. Owns how NumPy is asked to move rows.
"""

from stratakv.core.ids import PageIds
from stratakv.memory.mapped import Bytes, rows_of
from stratakv.transfer.copier import CopyRoute
from stratakv.transfer.copy_plan import PageRows


class NumpyCopier:
    """Two index operations per segment; IndexError for ids outside the pools."""

    def gather(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        rows, columns = rows_of(device), rows_of(host)
        for pool, arena in _ends(route):
            arena[columns] = pool[rows]

    def scatter(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        rows, columns = rows_of(device), rows_of(host)
        for pool, arena in _ends(route):
            pool[rows] = arena[columns]

    def gather_rows(self, route: CopyRoute, device: PageRows, host: PageRows) -> None:
        pool, arena = _rows(route)
        arena[rows_of(host.pages), host.offsets] = pool[rows_of(device.pages), device.offsets]

    def scatter_rows(self, route: CopyRoute, device: PageRows, host: PageRows) -> None:
        pool, arena = _rows(route)
        pool[rows_of(device.pages), device.offsets] = arena[rows_of(host.pages), host.offsets]


def _rows(route: CopyRoute) -> tuple[Bytes, Bytes]:
    """Both ends of the only segment, uint8 [pages, rows, row_bytes]; views."""
    (segment,), ((pool, arena),) = route.segments, _ends(route)
    rows = route.group.buffers[segment.buffer].rows_per_page
    inside = (rows, segment.bytes // rows)
    return pool.reshape(len(pool), *inside), arena.reshape(len(arena), *inside)


def _ends(route: CopyRoute) -> list[tuple[Bytes, Bytes]]:
    """Both ends of each segment, [pages, bytes]."""
    return [
        (pool, route.arena[:, segment.offset_bytes : segment.offset_bytes + segment.bytes])
        for segment, pool in zip(route.segments, route.device, strict=True)
    ]

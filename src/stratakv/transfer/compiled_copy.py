"""The copier in C. Owns the way into ``_gather``; must not move a byte itself. Importing this
module fails with ImportError where the package was installed without a compiler; ``numpy_copy``
then does the same work.
"""

from stratakv.core.ids import PageIds
from stratakv.transfer import _gather
from stratakv.transfer.copier import CopyRoute
from stratakv.transfer.copy_plan import PageRows
from stratakv.transfer.numpy_copy import NumpyCopier


class CompiledCopier(NumpyCopier):
    """Copies with the GIL released; ValueError for ids outside the pools, before any byte moves.
    Rows that go to the host go NumPy's way."""

    def gather(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        if not route.device:
            return
        arena = route.arena
        _gather.gather(
            *(route.rows, device, host, route.device[0].shape[0]),
            *(arena.shape[0], route.arena_address, arena.shape[1]),
        )

    def scatter(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        if not route.device:
            return
        arena = route.arena
        _gather.scatter(
            *(route.rows, device, host, route.device[0].shape[0]),
            *(arena.shape[0], route.arena_address, arena.shape[1]),
        )

    def scatter_rows(self, route: CopyRoute, device: PageRows, host: PageRows) -> None:
        (segment,), arena = route.segments, route.arena
        _gather.scatter_rows(
            *(route.rows, device.pages, device.offsets, host.pages, host.offsets),
            route.group.buffers[segment.buffer].rows_per_page,
            *(route.device[0].shape[0], arena.shape[0], route.arena_address, arena.shape[1]),
        )

"""Rows of host pages for a step on a GPU, whose kernels read them where they lie.

Owns what is waited for before a GPU may follow an address: that its page is pinned. Bytes are
there by then: a page is read on the host once its copy has ended, and whoever writes to one that
was given up comes after the steps launched before (``tiers.flights``). Must not import torch.
"""

from collections.abc import Sequence

from stratakv.core.ids import GroupId, LayerId
from stratakv.memory.device_pools import DevicePages
from stratakv.memory.host_arena import HostArena
from stratakv.transfer.copier import CopyRoute
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.host_rows import CpuHostRows
from stratakv.transfer.streams import CopyStream, Registered, StreamCopier


class CudaHostRows(CpuHostRows):
    """A ``HostRows``. ``swaps``: queues copies on the stream that computes. ``registered`` blocks
    the thread that computes, and raises RuntimeError where memory cannot be pinned."""

    def __init__(
        self,
        group: GroupId,
        pools: DevicePages,
        arenas: Sequence[HostArena],
        swaps: CopyStream,
        registered: Registered,
    ) -> None:
        super().__init__(group, pools, arenas, StreamCopier({Direction.LOAD: swaps}, registered))
        self._whole = group, arenas[group].size_bytes
        self._registered = registered

    def route(self, layer: LayerId) -> CopyRoute:
        """Returns once all host pages of the group are pinned: nobody knows which a plan that is
        made on the GPU will name."""
        self._registered(*self._whole)
        return super().route(layer)

"""A pin on exactly what a prefix needs at one end.

Owns the record. Taken, moved on and released by ``PrefixTree`` only; released exactly once, a leak
is reported by ``check`` and a second release raises.
"""

from dataclasses import dataclass, field

import numpy as np

from stratakv.core.ids import NONE, NodeIds, TicketId


@dataclass(slots=True, eq=False)
class Lease:
    """Pins ``[starts[g], end)`` of every group g on ``path``, which ends at ``tip``.

    ``loading`` are the loads in flight that this prefix waits for. While a load is planned
    (``host`` set), the rows it will read are pinned on the host, the others on the device.
    ``priority`` is the request's.
    """

    tip: int = NONE
    end: int = 0
    starts: list[int] = field(default_factory=list[int])
    path: NodeIds = field(default_factory=lambda: np.empty(0, np.intp), repr=False)
    loading: tuple[TicketId, ...] = ()
    host: list[NodeIds] | None = None
    priority: int = 0
    parked: bool = False
    released: bool = False

    @property
    def needs_load(self) -> bool:
        return self.host is not None

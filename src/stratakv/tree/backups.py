"""Which pages of a path the device alone has, and which of them are worth a host copy.

Owns these questions. Reads the columns, changes nothing. Whether a copy is made is for the write
policy.
"""

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import GroupId, NodeIds
from stratakv.spec.groups import CacheSpec
from stratakv.tree.effects import Backup
from stratakv.tree.lease import DeviceLease
from stratakv.tree.nodes import CHECKPOINT, NodeTable
from stratakv.tree.residency import Residency


class Backups:
    """``rows`` are always as the tree handed them out, in a ``Backup`` or from here."""

    def __init__(self, spec: CacheSpec, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._keep_all = [group.id for group in spec.groups if group.keeps_all]
        self._partial = [group.id for group in spec.groups if not group.keeps_all]

    def unsaved(self, group: GroupId, rows: NodeIds) -> NodeIds:
        """Those of ``rows`` that are still on the device alone."""
        return rows[self._nodes.state[group][rows] == Residency.DEVICE]

    def hits(self, rows: NodeIds) -> npt.NDArray[np.int32]:
        """How often requests have used each of ``rows``."""
        return self._nodes.hits[rows]

    def needed(self, group: GroupId, rows: NodeIds) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` a checkpoint needs; the others are a milestone's, or nobody's."""
        return self._nodes.need[group][rows] >= CHECKPOINT

    def behind(self, lease: DeviceLease, group: GroupId, start: int) -> NodeIds:
        """What the device alone has of page indices [start, end) of a leased path."""
        return self.unsaved(group, lease.path[start:])

    def whole(self, lease: DeviceLease) -> list[Backup]:
        """What the device alone has of a leased path, of the groups that keep all."""
        found = ((group, self.unsaved(group, lease.path)) for group in self._keep_all)
        return [Backup(group, rows) for group, rows in found if len(rows)]

    def kept(self, lease: DeviceLease) -> list[Backup]:
        """``whole``, and of the other groups what the lease holds and a mark needs."""
        return self.whole(lease) + self._marked(lease, lease.starts)

    def marked(self, lease: DeviceLease) -> list[Backup]:
        """What marks need anywhere on a leased path, of the groups that do not keep all."""
        return self._marked(lease, [0] * len(lease.starts))

    def _marked(self, lease: DeviceLease, starts: list[int]) -> list[Backup]:
        found: list[Backup] = []
        for group in self._partial:
            rows = self.behind(lease, group, starts[group])
            rows = rows[self._nodes.need[group][rows] > 0]
            if len(rows):
                found.append(Backup(group, rows))
        return found

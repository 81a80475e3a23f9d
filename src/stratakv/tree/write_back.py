"""Device pages with and without a host copy, for a cache that writes back late.

Owns the choice of what to save next, and an eviction that takes saved pages first. A page is dirty
where it would be lost though a checkpoint needs it; what milestones alone need is worth a copy too,
where it costs no checkpoint one. Must not copy or free anything itself.
"""

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import GroupId, NodeIds
from stratakv.spec.groups import ANCHOR
from stratakv.tree.effects import Effect, FreeDevice
from stratakv.tree.eviction import LOOK, Evictor
from stratakv.tree.nodes import NodeTable, Tier
from stratakv.tree.order import COLD, WARM
from stratakv.tree.pins import Pins
from stratakv.tree.residency import Residency

DEVICE = Tier.DEVICE


class WriteBackEviction:
    def __init__(self, nodes: NodeTable, pins: Pins, evictor: Evictor) -> None:
        self._nodes = nodes
        self._pins = pins
        self._evictor = evictor

    def saved(self, group: GroupId) -> int:
        """Pages that eviction can take without losing anything, or as soon as their copy has
        ended. One scan of the group."""
        return int(np.count_nonzero(self._saved(group)))

    def saved_warm(self, group: GroupId) -> int:
        """Those of them that a checkpoint needs. One scan of the group."""
        return int(np.count_nonzero(self._saved(group) & (self._nodes.rank[group] >= WARM)))

    def _saved(self, group: GroupId) -> npt.NDArray[np.bool_]:
        state, pins = self._nodes.state[group], self._nodes.pins[DEVICE][group]
        idle = (state == Residency.BOTH) & (pins == 0)
        return idle | ((state == Residency.SAVING) & (pins == 1))

    def coldest(self, group: GroupId, count: int) -> list[NodeIds]:
        """Up to ``count`` dirty pages that nothing pins, coldest and deepest first, sorted into
        paths, top first. One scan of the group."""
        return self._coldest(group, count, self._nodes.rank[group] >= WARM)

    def coldest_spare(self, group: GroupId, count: int) -> list[NodeIds]:
        """``coldest`` of what milestones alone need, which leaves before all that is dirty."""
        return self._coldest(group, count, self._spare(group))

    def spare_room(self, group: GroupId) -> int:
        """Pages that milestones alone need and the host alone has, as many as leave it before any
        that the device has too. Two scans of the group."""
        nodes, ranks = self._nodes, self._nodes.rank[group]
        spare = self._spare(group) & (nodes.pins[Tier.HOST][group] == 0)
        alone = ranks[spare & (nodes.state[group] == Residency.HOST)]
        both = ranks[spare & (nodes.state[group] == Residency.BOTH)]
        return int(np.count_nonzero(alone < both.min())) if len(both) else len(alone)

    def _spare(self, group: GroupId) -> npt.NDArray[np.bool_]:
        ranks = self._nodes.rank[group]
        return (ranks > COLD) & (ranks < WARM)

    def _coldest(self, group: GroupId, count: int, among: npt.NDArray[np.bool_]) -> list[NodeIds]:
        nodes = self._nodes
        ranks = nodes.rank[group]
        idle = (nodes.state[group] == Residency.DEVICE) & (nodes.pins[DEVICE][group] == 0)
        rows = np.flatnonzero(idle & among)
        if len(rows) > count:
            last = np.partition(ranks[rows], count - 1)[count - 1]
            rows = rows[ranks[rows] <= last]
        order = np.lexsort((-nodes.depth[rows], ranks[rows]))
        return nodes.by_run(rows[order[:count]])

    def evict(self, group: GroupId, count: int) -> list[Effect]:
        """Take up to ``count`` pages of ``group`` off the device, clean ones first as far as they
        are found among the coldest; dirty ones only where that is not enough."""
        effects: list[Effect] = []
        left = self._evict_clean(group, count, effects)
        return effects + self._evictor.evict(DEVICE, group, left)

    def evict_spare(self, group: GroupId, count: int) -> list[Effect]:
        """Take up to ``count`` pages of ``group`` off the device whose leaving costs no checkpoint:
        what no checkpoint needs, then what the host has too, as far as it is found among the
        coldest."""
        effects = self._evictor.evict_spare(DEVICE, group, count)
        freed = (one for one in effects if isinstance(one, FreeDevice) and one.group == group)
        self._evict_clean(group, count - sum(len(one.pages) for one in freed), effects)
        return effects

    def _evict_clean(self, group: GroupId, count: int, effects: list[Effect]) -> int:
        """Take clean pages among the coldest; how many of ``count`` were not found."""
        aside: list[tuple[int, NodeIds]] = []
        queue = self._pins.queues[DEVICE][group]
        left, looks = count, LOOK + count
        while left > 0 and looks > 0 and queue.weight:
            looks -= 1
            key, rows = queue.pop()
            clean = ~self._dirty(group, rows)
            if not clean.all():
                aside.append((key, rows))
                rows = rows[:0] if group == ANCHOR else rows[clean]
            if len(rows):
                left -= self._evictor.take(DEVICE, group, key, rows, left, effects)
        for key, rows in aside:
            queue.push(key, self._nodes.depth.item(rows.item(-1)), rows)
        return left

    def _dirty(self, group: GroupId, rows: NodeIds) -> npt.NDArray[np.bool_]:
        """Of the anchor only the last row of a batch can leave; what lies above is offered anew
        when it has."""
        nodes = self._nodes
        rows = rows[-1:] if group == ANCHOR else rows
        alone = nodes.state[group][rows] == Residency.DEVICE
        idle = nodes.pins[DEVICE][group][rows] == 0
        return alone & idle & (nodes.rank[group][rows] >= WARM)

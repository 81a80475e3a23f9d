"""Device pages with and without a host copy, for a cache that writes back late.

Owns the choice of what to save next, and an eviction that takes saved pages first. A page is dirty
where it would be lost though something may need it again. Must not copy or free anything itself.
"""

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import GroupId, NodeIds
from stratakv.spec.groups import ANCHOR
from stratakv.tree.effects import Effect
from stratakv.tree.eviction import LOOK, Evictor
from stratakv.tree.nodes import NodeTable, Tier
from stratakv.tree.order import WARM
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
        nodes = self._nodes
        state, pins = nodes.state[group], nodes.pins[DEVICE][group]
        idle = (state == Residency.BOTH) & (pins == 0)
        return int(np.count_nonzero(idle | ((state == Residency.SAVING) & (pins == 1))))

    def coldest(self, group: GroupId, count: int) -> list[NodeIds]:
        """Up to ``count`` dirty pages that nothing pins, coldest and deepest first, sorted into
        paths, top first. One scan of the group."""
        nodes = self._nodes
        ranks = nodes.rank[group]
        dirty = (nodes.state[group] == Residency.DEVICE) & (nodes.pins[DEVICE][group] == 0)
        rows = np.flatnonzero(dirty & (ranks >= WARM))
        if len(rows) > count:
            last = np.partition(ranks[rows], count - 1)[count - 1]
            rows = rows[ranks[rows] <= last]
        order = np.lexsort((-nodes.depth[rows], ranks[rows]))
        return nodes.by_run(rows[order[:count]])

    def evict(self, group: GroupId, count: int) -> list[Effect]:
        """Take up to ``count`` pages of ``group`` off the device, clean ones first as far as they
        are found among the coldest; dirty ones only where that is not enough."""
        effects: list[Effect] = []
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
        return effects + self._evictor.evict(DEVICE, group, left)

    def _dirty(self, group: GroupId, rows: NodeIds) -> npt.NDArray[np.bool_]:
        """Of the anchor only the last row of a batch can leave; what lies above is offered anew
        when it has."""
        nodes = self._nodes
        rows = rows[-1:] if group == ANCHOR else rows
        alone = nodes.state[group][rows] == Residency.DEVICE
        idle = nodes.pins[DEVICE][group][rows] == 0
        return alone & idle & (nodes.rank[group][rows] >= WARM)

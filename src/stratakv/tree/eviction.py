"""Taking pages off a tier, coldest first.

Owns the cascades: the anchor leaves leaf-first and takes its node along when it was the last copy;
other groups leave anywhere. Returns what must be freed; may take less than asked, because a page in
flight or leased below keeps what is above it. Must not free or copy anything itself.
"""

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, GroupId, NodeIds
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.tree.checkpoints import Checkpoints
from stratakv.tree.effects import Effect, FreeDevice, FreeHost
from stratakv.tree.nodes import ANY, TIERS, NodeTable, Tier
from stratakv.tree.pins import Pins
from stratakv.tree.residency import EVICTED, ON_TIER, Residency

FREE = (FreeDevice, FreeHost)
LOOK = 16  # rows examined beyond the number wanted: a batch may be long, an eviction small


class Evictor:
    def __init__(
        self, spec: CacheSpec, nodes: NodeTable, pins: Pins, checkpoints: Checkpoints
    ) -> None:
        self._nodes = nodes
        self._pins = pins
        self._checkpoints = checkpoints
        self._groups = range(len(spec.groups))
        self._byteless_anchor = spec.groups[ANCHOR].page_bytes == 0

    def evict(self, tier: Tier, group: GroupId, count: int) -> list[Effect]:
        """Take up to ``count`` pages of ``group`` off ``tier``."""
        effects: list[Effect] = []
        queue = self._pins.queues[tier][group]
        while count > 0 and len(queue):
            key, rows = queue.pop()
            if len(rows) > count + LOOK:
                self._pins.queue(tier, group, rows[: -(count + LOOK)])
                rows = rows[-(count + LOOK) :]
            rows = self._due(tier, group, key, rows)
            if group == ANCHOR:
                rows, rest = self._trailing_chain(tier, rows, count)
                taken = self._take_anchor(tier, rows, effects) if len(rows) else 0
                if taken < len(rows):  # still a leaf candidate below what was taken: none is
                    rest = rest[:0]
            else:
                rows, rest = rows[-count:], rows[:-count]
                taken = len(rows)
                if taken:
                    self._take(tier, group, rows, effects)
            if len(rest):
                self._pins.queue(tier, group, rest)
            count -= taken
        return effects

    # -- candidates ----------------------------------------------------------------------------

    def _due(self, tier: Tier, group: int, key: int, rows: NodeIds) -> NodeIds:
        """Resident, unpinned rows whose rank is not above ``key``; warmer ones are queued again."""
        nodes = self._nodes
        free = nodes.pins[tier][group][rows] == 0
        free &= ON_TIER[tier][nodes.state[group][rows]]
        if not free.all():
            rows = rows[free]
        warm = nodes.rank[group][rows] > key
        if not warm.any():
            return rows
        self._pins.queue(tier, group, rows[warm])
        return rows[~warm]

    def _trailing_chain(
        self, tier: Tier, rows: NodeIds, count: int
    ) -> tuple[NodeIds, NodeIds]:
        """The longest leaf-ended chain of at most ``count`` at the end of ``rows``, and the rows
        above it that may still be leaves. Rows that a child outside the chain holds back are not:
        they leave the queue here and come back when that child goes."""
        tail = rows[-count:]
        if not len(tail):
            return tail, tail
        nodes = self._nodes
        held = nodes.kids[tier][tail]
        linked = nodes.parent[tail[1:]] == tail[:-1]
        held[:-1] -= linked
        stuck = np.flatnonzero(held)
        held_at = stuck.item(-1) if len(stuck) else -1
        gaps = np.flatnonzero(~linked)  # on the host a path may have holes
        gap_at = gaps.item(-1) if len(gaps) else -1
        if held_at >= gap_at and held_at >= 0:
            return tail[held_at + 1 :], tail[:0]
        return tail[gap_at + 1 :], rows[: len(rows) - len(tail) + gap_at + 1]

    # -- taking --------------------------------------------------------------------------------

    def _take(self, tier: Tier, group: GroupId, rows: NodeIds, effects: list[Effect]) -> None:
        """Take unpinned pages of a group that is not the anchor."""
        self._leave(tier, group, rows, effects)
        if self._byteless_anchor:
            for row in rows[::-1].tolist():
                self._prune(row, effects)

    def _take_anchor(self, tier: Tier, chain: NodeIds, effects: list[Effect]) -> int:
        """Take a chain of anchor pages, top first, that ends in a leaf of the tier; how many went."""
        nodes = self._nodes
        last_copy = nodes.state[ANCHOR][chain] == (Residency.DEVICE, Residency.HOST)[tier]
        taken = 0
        # Stretches of one kind, deepest first: pages that keep a copy, pages whose node must go.
        cuts = np.flatnonzero(last_copy[1:] != last_copy[:-1]) + 1
        for part in reversed(np.split(chain, cuts) if len(cuts) else [chain]):
            if not last_copy[len(chain) - taken - 1]:
                self._leave_anchor(tier, part, effects)
                taken += len(part)
                continue
            gone = self._drop(tier, part, effects)
            taken += gone
            if gone < len(part):
                break
        return taken

    def _leave_anchor(self, tier: Tier, chain: NodeIds, effects: list[Effect]) -> None:
        """Anchor pages that keep their other copy."""
        nodes = self._nodes
        self._leave(tier, ANCHOR, chain, effects)
        kids = nodes.kids[tier]
        kids[chain] = 0
        top = nodes.parent.item(chain.item(0))
        kids[top] -= 1
        self._offer(top)

    def _leave(self, tier: Tier, group: GroupId, rows: NodeIds, effects: list[Effect]) -> None:
        nodes = self._nodes
        nodes.residency[group].move(rows, EVICTED[tier])
        pages = nodes.page[tier][group]
        effects.append(FREE[tier](group, pages[rows]))
        pages[rows] = NONE
        self._pins.died(tier, group, rows)

    def _drop(self, tier: Tier, chain: NodeIds, effects: list[Effect]) -> int:
        """Remove nodes that hold the anchor on ``tier`` alone; how many of the chain went.

        A node may go only when nothing below it is left on any tier and no group of it is pinned or
        in flight; an idle host-only subtree below a device-only node goes first.
        """
        nodes = self._nodes
        busy = self.busy(chain)
        kids = nodes.kids[ANY][chain]
        kids[:-1] -= 1  # the next of the chain
        for at in np.flatnonzero(busy | (kids > 0))[::-1].tolist():
            if busy[at] or not self._clear_below(chain[at:], int(kids[at]), effects):
                chain = chain[at + 1 :]
                break
        if len(chain):
            self.forget(chain, effects)
        return len(chain)

    def busy(self, rows: NodeIds) -> npt.NDArray[np.bool_]:
        """Whether any group pins the node on any tier; what is in flight is pinned."""
        nodes = self._nodes
        total = np.zeros(len(rows), np.int32)
        for tier in TIERS:
            for group in self._groups:
                total += nodes.pins[tier][group][rows]
        return total > 0

    def _clear_below(self, chain: NodeIds, extra: int, effects: list[Effect]) -> bool:
        """Drop the host-only subtrees beside the chain under ``chain[0]``, if all of them idle."""
        nodes = self._nodes
        top = chain.item(0)
        keep = set(chain.tolist())
        rows = nodes.rows()
        below: list[int] = []
        level = [top]
        while level:  # rare: only where a host-only subtree hangs below a device-only page
            kids = [row for row in rows[np.isin(nodes.parent[rows], level)].tolist() if row not in keep]
            below += kids
            level = kids
        assert len(below) >= extra, "a child count is wrong"
        if self.busy(np.array(below, np.int32)).any():
            return False
        for row in reversed(below):
            self.forget(np.array([row], np.int32), effects)
        return True

    def forget(self, chain: NodeIds, effects: list[Effect]) -> None:
        """Free every page of idle nodes and remove them; the chain ends in a leaf."""
        nodes = self._nodes
        self._checkpoints.forget(chain)
        top = nodes.parent.item(chain.item(0))
        for tier in TIERS:
            nodes.kids[tier][top] -= int(ON_TIER[tier][nodes.state[ANCHOR][chain.item(0)]])
            nodes.kids[tier][chain] = 0
            for group in self._groups:
                here = chain[ON_TIER[tier][nodes.state[group][chain]]]
                if len(here):
                    self._leave(tier, GroupId(group), here, effects)
        nodes.remove(chain)
        self._offer(top)

    def _offer(self, row: int) -> None:
        """Queue a node's anchor wherever it has become a leaf."""
        nodes = self._nodes
        if row == NONE:
            return
        state = nodes.state[ANCHOR].item(row)
        for tier in TIERS:
            if ON_TIER[tier].item(state) and not nodes.kids[tier].item(row):
                self._pins.queue(tier, ANCHOR, nodes.segment(row))

    def _prune(self, row: int, effects: list[Effect]) -> None:
        """An anchor without bytes keeps no node alive: drop leaves that hold no page."""
        nodes = self._nodes
        while row != NONE and nodes.keys[row] is not None and not nodes.kids[ANY].item(row):
            if any(nodes.state[group].item(row) for group in self._groups[1:]):
                return
            one = np.array([row], np.int32)
            if self.busy(one).any():
                return
            row = nodes.parent.item(row)
            self.forget(one, effects)

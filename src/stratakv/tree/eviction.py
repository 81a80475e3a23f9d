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
from stratakv.tree.order import WARM
from stratakv.tree.pins import Pins
from stratakv.tree.residency import EVICTED, ON_DEVICE, ON_TIER, TIERS_OF, Residency

FREE = (FreeDevice, FreeHost)
ABSENT, DEVICE_ALONE = int(Residency.ABSENT), int(Residency.DEVICE)
LAST_COPY = (DEVICE_ALONE, int(Residency.HOST))
EVERY = 1 << 62  # above every rank
LOOK = 16  # rows examined beyond the number wanted: a batch may be long, an eviction small


class Evictor:
    def __init__(
        self, spec: CacheSpec, nodes: NodeTable, pins: Pins, checkpoints: Checkpoints
    ) -> None:
        self._nodes = nodes
        self._pins = pins
        self._checkpoints = checkpoints
        self._gone = pins.policy.gone
        self._groups = range(len(spec.groups))
        self.dropped_dirty = self.dropped_cold = 0
        """Pages that have left the device for good: worth a host copy, and not."""
        self._others = range(1, len(spec.groups))
        self._partial = {group.id for group in spec.groups if not group.keeps_all}
        self._byteless_anchor = spec.groups[ANCHOR].page_bytes == 0

    def evict(self, tier: Tier, group: GroupId, count: int, below: int = EVERY) -> list[Effect]:
        """Take up to ``count`` pages of a group off a tier, coldest first, that rank below
        ``below``; it may be fewer."""
        effects: list[Effect] = []
        queue = self._pins.queues[tier][group]
        while count > 0 and queue.weight and queue.first < below:
            key, rows = queue.pop()
            count -= self.take(tier, group, key, rows, count, effects)
        return effects

    def evict_spare(self, tier: Tier, group: GroupId, count: int) -> list[Effect]:
        """``evict``, but only what no checkpoint needs."""
        return self.evict(tier, group, count, below=WARM)

    def evictable(self, tier: Tier, group: GroupId) -> int:
        """Resident pages that nothing pins; exact but for pages that a copy below them holds."""
        return self._pins.evictable[tier][group]

    def take(
        self, tier: Tier, group: GroupId, key: int, rows: NodeIds, count: int, effects: list[Effect]
    ) -> int:
        """Up to ``count`` pages of one batch that has come up; how many went."""
        take = self._anchor_batch if group == ANCHOR else self._batch
        return take(tier, group, key, rows, count, effects)

    # -- groups that leave anywhere ------------------------------------------------------------

    def _batch(
        self, tier: Tier, group: GroupId, key: int, rows: NodeIds, count: int, effects: list[Effect]
    ) -> int:
        rows, rest = rows[-(count + LOOK) :], rows[: -(count + LOOK)]
        self._requeue_warm(tier, group, key, rows)
        due = rows[self._due(tier, group, key, rows)]
        if len(due) > count:
            due, rest = due[-count:], np.concatenate((rest, due[:-count]))
        if len(rest):
            self._pins.queue(tier, group, rest)
        if len(due):
            self._lose(group, due, LAST_COPY[tier])
            self._leave(tier, group, due, effects)
            if self._byteless_anchor:
                for row in due[::-1].tolist():
                    self._prune(row, effects)
        return len(due)

    def _due(self, tier: Tier, group: int, key: int, rows: NodeIds) -> npt.NDArray[np.bool_]:
        """Resident, unpinned, and ranked no higher than ``key``: a page that has become warmer
        since is queued elsewhere."""
        nodes = self._nodes
        due = nodes.pins[tier][group][rows] == 0
        due &= ON_TIER[tier][nodes.state[group][rows]]
        due &= nodes.rank[group][rows] <= key
        return due

    # -- the anchor ----------------------------------------------------------------------------

    def _anchor_batch(
        self, tier: Tier, group: GroupId, key: int, rows: NodeIds, count: int, effects: list[Effect]
    ) -> int:
        """Take a chain that ends in a leaf of the tier."""
        del group  # the anchor
        nodes = self._nodes
        if tier == Tier.HOST:
            rows = self._to_leaf_of_host(key, rows)
            if not len(rows):
                return 0
        else:  # a path has no holes on the device: above a page that stays, none is a leaf
            last = rows.item(-1)
            if (
                nodes.rank[ANCHOR].item(last) > key
                or nodes.pins[tier][ANCHOR].item(last)
                or nodes.kids[tier].item(last)
                or not ON_DEVICE.item(nodes.state[ANCHOR].item(last))
            ):
                return 0
        chain = rows[-count:]
        if len(chain) > 1 and not self._free_chain(tier, key, chain):
            chain = self._chain(tier, key, chain)
        if tier == Tier.HOST and len(chain) < len(rows):  # holes: leaves may lie above
            self._pins.queue(tier, ANCHOR, rows[: -len(chain)])
        if nodes.state[ANCHOR].item(chain.item(-1)) == LAST_COPY[tier]:
            above = nodes.parent[chain] if self._byteless_anchor else None
            gone = self._drop(chain, effects)
            if above is not None and gone:  # what went may have been all that kept them
                self._prune(above.item(-gone), effects)
            return gone
        self._leave_anchor(tier, chain, effects)
        return len(chain)

    def _free_chain(self, tier: Tier, key: int, rows: NodeIds) -> bool:
        """Whether all of ``rows``, whose last is a due leaf, may go together: the common case, seen
        without a mask. Of a path, no page is warmer than the warmer of its ends."""
        nodes = self._nodes
        states = nodes.state[ANCHOR][rows].tobytes()
        return bool(
            nodes.rank[ANCHOR].item(rows.item(0)) <= key
            and states.count(states[-1]) == len(states)
            and not np.count_nonzero(nodes.pins[tier][ANCHOR][rows])
            and nodes.parent[rows[1:]].tobytes() == rows[:-1].tobytes()
            and np.add.reduce(nodes.kids[tier][rows]) == len(rows) - 1
        )

    def _chain(self, tier: Tier, key: int, rows: NodeIds) -> NodeIds:
        """The longest end of ``rows`` that is one chain of due pages of one kind, given that the
        last row is a due leaf and that not all of ``rows`` are (``_free_chain``). What lies above
        comes back when its child has gone."""
        nodes = self._nodes
        due = self._due(tier, ANCHOR, key, rows)
        state = nodes.state[ANCHOR][rows]
        due &= state == state.item(-1)
        held = nodes.kids[tier][rows]
        linked = nodes.parent[rows[1:]] == rows[:-1]
        due[:-1] &= linked
        held[:-1] -= linked
        due &= held == 0
        return rows[(~due).nonzero()[0].item(-1) + 1 :]

    def _to_leaf_of_host(self, key: int, rows: NodeIds) -> NodeIds:
        """``rows`` down to the last one that is a due leaf of the host."""
        self._requeue_warm(Tier.HOST, ANCHOR, key, rows)
        due = self._due(Tier.HOST, ANCHOR, key, rows)
        leaves = (due & (self._nodes.kids[Tier.HOST][rows] == 0)).nonzero()[0]
        return rows[: leaves.item(-1) + 1] if len(leaves) else rows[:0]

    def _requeue_warm(self, tier: Tier, group: GroupId, key: int, rows: NodeIds) -> None:
        """A batch's key is its coldest page's; and a lease on the device copy warms the host copy
        without ever pinning or queueing it there."""
        nodes = self._nodes
        warm = nodes.rank[group][rows] > key
        if not np.count_nonzero(warm):
            return
        warm &= nodes.pins[tier][group][rows] == 0
        warm &= ON_TIER[tier][nodes.state[group][rows]]
        self._pins.queue(tier, group, rows[warm])

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
        nodes.left_s[tier][group][rows] = nodes.now_s()
        pages = nodes.page[tier][group]
        effects.append(FREE[tier](group, pages[rows]))
        pages[rows] = NONE
        self._pins.died(tier, group, rows)

    def _lose(self, group: GroupId, rows: NodeIds, state: int) -> None:
        """Of ``rows``, which are about to leave, those whose only copy ``state`` names are lost."""
        states = self._nodes.state[group][rows].tobytes()
        count = states.count(state)
        if not count:
            return
        if count < len(states):
            rows = rows[self._nodes.state[group][rows] == state]
        self._gone(group, rows)
        if state == DEVICE_ALONE:
            self._count(group, rows)

    def _count(self, group: int, rows: NodeIds) -> None:
        """``rows`` leave the device without a host copy. One that no checkpoint needed was not
        worth it."""
        warm = int(np.count_nonzero(self._nodes.rank[group][rows] >= WARM))
        self.dropped_dirty += warm
        self.dropped_cold += len(rows) - warm

    def _drop(self, chain: NodeIds, effects: list[Effect]) -> int:
        """Remove nodes that hold the anchor on one tier alone; how many of the chain went.

        A node may go only when nothing below it is left on any tier and no group of it is pinned or
        in flight; an idle host-only subtree below a device-only node goes first.
        """
        nodes = self._nodes
        row = chain.item(-1)
        if len(chain) == 1 and not nodes.kids[ANY].item(row) and not self._pinned_one(row):
            if nodes.checkpoint.item(row) or nodes.milestone.item(row):
                self._checkpoints.forget(chain)
            self._forget_one(row, effects)
            return 1
        kids = nodes.kids[ANY][chain]
        if np.add.reduce(kids) > len(chain) - 1 or (self._others and np.any(self.pinned(chain))):
            kids[:-1] -= 1  # the next of the chain
            kids += self.pinned(chain)
            for at in kids.nonzero()[0][::-1].tolist():
                if not self._clear_below(chain[at:], effects):
                    chain = chain[at + 1 :]
                    break
        if len(chain):
            self.forget(chain, effects)
        return len(chain)

    def pinned(self, rows: NodeIds) -> npt.NDArray[np.int32] | int:
        """Pins of the groups beside the anchor, both tiers; what is in flight is pinned."""
        total: npt.NDArray[np.int32] | int = 0
        for tier in TIERS:
            for group in self._others:
                total = total + self._nodes.pins[tier][group][rows]
        return total

    def _pinned_one(self, row: int) -> bool:
        if not self._others:
            return False
        pins = self._nodes.pins
        return any(pins[tier][group].item(row) for group in self._others for tier in TIERS)

    def _clear_below(self, chain: NodeIds, effects: list[Effect]) -> bool:
        """Drop the host-only subtrees that hang under ``chain[0]`` beside the chain, if all of
        them and ``chain[0]`` are idle."""
        nodes = self._nodes
        keep = set(chain.tolist())
        rows = nodes.rows()
        below = [chain.item(0)]
        level = below[:]
        while level:  # rare: only where a host-only subtree hangs below a device-only page
            kids = rows[np.isin(nodes.parent[rows], level)].tolist()
            level = [row for row in kids if row not in keep]
            below += level
        found = np.array(below, np.intp)
        if np.any(self.pinned(found)) or np.any(nodes.pins[Tier.HOST][ANCHOR][found]):
            return False
        for row in below[:0:-1]:
            self.forget(np.array([row], np.intp), effects)
        return True

    def forget(self, chain: NodeIds, effects: list[Effect]) -> None:
        """Free every page of idle nodes and remove them; the chain ends in a leaf."""
        nodes = self._nodes
        if self._others:
            self._checkpoints.forget(chain)
        if len(chain) == 1:
            self._forget_one(chain.item(0), effects)
            return
        first = chain.item(0)
        top = nodes.parent.item(first)
        from_host = nodes.state[ANCHOR].item(first) != DEVICE_ALONE
        for tier in TIERS:
            if ON_TIER[tier].item(nodes.state[ANCHOR].item(first)):
                nodes.kids[tier][top] -= 1
        for group in self._groups:
            states = nodes.state[group][chain]
            seen = states.tobytes()
            alone = seen.count(DEVICE_ALONE)
            if alone and group in self._partial:
                self._count(group, chain[states == DEVICE_ALONE])
            else:
                self.dropped_dirty += alone
            self._gone(group, chain[states != ABSENT] if ABSENT in seen else chain)
            for tier in TIERS:
                here = ON_TIER[tier][states]
                count = np.count_nonzero(here)
                if count:
                    rows = chain if count == len(chain) else chain[here]
                    self._leave(tier, GroupId(group), rows, effects)
        nodes.remove(chain, from_host=from_host)
        self._offer(top)

    def _forget_one(self, row: int, effects: list[Effect]) -> None:
        """``forget`` of a single leaf, whose checkpoints have been forgotten."""
        nodes = self._nodes
        top = nodes.parent.item(row)
        anchor = nodes.state[ANCHOR].item(row)
        for tier in TIERS_OF[anchor]:
            nodes.kids[tier][top] = nodes.kids[tier].item(top) - 1
        for group in self._groups:
            state = nodes.state[group].item(row)
            if state == ABSENT:
                continue
            self._gone(group, (row,))
            if state == DEVICE_ALONE:
                if nodes.rank[group].item(row) >= WARM:
                    self.dropped_dirty += 1
                else:
                    self.dropped_cold += 1
            for tier in TIERS_OF[state]:
                nodes.residency[group].move_one(row, EVICTED[tier])
                page = nodes.page[tier][group]
                effects.append(FREE[tier](GroupId(group), page[row : row + 1].copy()))
                page[row] = NONE
                self._pins.evictable[tier][group] -= 1
        nodes.remove_one(row, from_host=anchor != DEVICE_ALONE)
        if top != NONE:
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
        while row != NONE and nodes.holds(row) and not nodes.kids[ANY].item(row):
            if any(nodes.state[group].item(row) for group in self._others):
                return
            one = np.array([row], np.intp)
            if any(np.any(nodes.pins[tier][ANCHOR][one]) for tier in TIERS):
                return
            row = nodes.parent.item(row)
            self.forget(one, effects)

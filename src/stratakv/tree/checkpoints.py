"""What is worth keeping in groups that do not keep all.

Owns the checkpoint flags and how many checkpoints need each page. A page that leaves its lease goes
to the cold end unless a checkpoint needs it, and only checkpoint pages are backed up: with four
windows of pool per chat this serves about twice the tokens that plain LRU does. Must not free
pages.
"""

import numpy as np

from stratakv.core.ids import GroupId, NodeIds
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import needed
from stratakv.tree.effects import Backup, Effect
from stratakv.tree.nodes import ANY, NodeTable
from stratakv.tree.pins import Pins
from stratakv.tree.residency import PRESENT, Residency


class Checkpoints:
    def __init__(self, spec: CacheSpec, nodes: NodeTable, pins: Pins) -> None:
        self._nodes = nodes
        self._pins = pins
        self._page_tokens = spec.page_tokens
        self._partial = [g for g in spec.groups if not g.keeps_all]

    def _needed(self, tip: int) -> list[tuple[GroupId, NodeIds]]:
        """Rows that each partial group needs at the end of ``tip``'s page."""
        nodes = self._nodes
        end = nodes.depth.item(tip) + 1
        found: list[tuple[GroupId, NodeIds]] = []
        for group in self._partial:
            span = needed(group.retention, end * self._page_tokens, self._page_tokens)
            found.append((group.id, nodes.tail(tip, len(span))))
        return found

    def keep(self, path: NodeIds, continued: int, instead_of: int = 0) -> list[Effect]:
        """Make the end of ``path`` a checkpoint, if every group still holds what it needs there.

        Checkpoints among the first ``continued`` nodes, which this request grew from, are
        superseded unless the tree branches at them, and so is the one at the end of the first
        ``instead_of``. Returns the backups that keeping implies.
        """
        if not self._partial:
            return []
        nodes, tip = self._nodes, path.item(-1)
        wanted = self._needed(tip)
        if not all(PRESENT[nodes.state[group][rows]].all() for group, rows in wanted):
            return []
        if not nodes.checkpoint.item(tip):
            nodes.checkpoint[tip] = True
            for group, rows in wanted:
                nodes.need[group][rows] += 1
        stamp = self._pins.tick()
        effects: list[Effect] = []
        for group, rows in wanted:
            self._pins.stamp(group, rows, stamp)
            self._pins.cool(group, rows)  # queued at their new rank where nothing pins them
            unsaved = rows[nodes.state[group][rows] == Residency.DEVICE]
            if len(unsaved):
                effects.append(Backup(group, unsaved))
        self._supersede(path[: min(continued, len(path) - 1)])
        if continued < instead_of < len(path):
            self._supersede(path[instead_of - 1 : instead_of])
        return effects

    def _supersede(self, path: NodeIds) -> None:
        nodes = self._nodes
        marked = path[nodes.checkpoint[path]]
        for tip in marked[nodes.kids[ANY][marked] <= 1].tolist():
            for group, rows in self._unmark(tip):
                self._pins.cool(group, rows)

    def _unmark(self, tip: int) -> list[tuple[GroupId, NodeIds]]:
        nodes = self._nodes
        nodes.checkpoint[tip] = False
        wanted = self._needed(tip)
        for group, rows in wanted:
            nodes.need[group][rows] -= 1
        return wanted

    def forget(self, chain: NodeIds) -> None:
        """The nodes are about to go: withdraw their checkpoints' needs from the rows above."""
        for tip in chain[self._nodes.checkpoint[chain]].tolist():
            for group, rows in self._unmark(tip):
                self._pins.cool(group, rows[~np.isin(rows, chain)])

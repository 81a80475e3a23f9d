"""What is worth keeping in groups that do not keep all.

Owns the marks and what they need. An end is marked as a *checkpoint*, where somebody is expected to
continue, or as a *milestone*, where somebody might: inside a prompt or an answer. A page that
leaves its lease goes to the cold end unless a mark needs it, or right behind the cold end where
milestones alone do, so that no milestone ever costs a checkpoint. Only marked pages are backed up:
with four windows of pool per chat this serves about twice the tokens that plain LRU does. Must not
free pages, nor choose where milestones are.
"""

from collections.abc import Sequence

import numpy as np

from stratakv.core.ids import NONE, GroupId, NodeIds
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import needed
from stratakv.tree.effects import Backup
from stratakv.tree.lease import DeviceLease, HostHold
from stratakv.tree.nodes import ANY, CHECKPOINT, MILESTONE, NodeTable
from stratakv.tree.pins import Pins
from stratakv.tree.residency import PRESENT, Residency

Wanted = Sequence[tuple[GroupId, NodeIds]]
"""Rows that each partial group needs at some end."""


class Checkpoints:
    def __init__(self, spec: CacheSpec, nodes: NodeTable, pins: Pins) -> None:
        self._nodes = nodes
        self._pins = pins
        self._page_tokens = spec.page_tokens
        self._partial = [g for g in spec.groups if not g.keeps_all]

    def _needed(self, tip: int) -> Wanted:
        """Rows that each partial group needs at the end of ``tip``'s page."""
        nodes = self._nodes
        end = nodes.depth.item(tip) + 1
        found: list[tuple[GroupId, NodeIds]] = []
        for group in self._partial:
            span = needed(group.retention, end * self._page_tokens, self._page_tokens)
            found.append((group.id, nodes.tail(tip, len(span))))
        return found

    def _present(self, tip: int) -> Wanted | None:
        """``_needed``; None where some of it is nowhere."""
        wanted = self._needed(tip)
        state = self._nodes.state
        return wanted if all(PRESENT[state[group][rows]].all() for group, rows in wanted) else None

    # -- marking -------------------------------------------------------------------------------

    def at(self, lease: DeviceLease, end: int) -> bool:
        """Whether there is a checkpoint at ``end`` pages of a leased path."""
        return 0 < end <= lease.end and self._nodes.checkpoint.item(lease.path.item(end - 1))

    def keep(
        self, lease: DeviceLease | HostHold, end: int, continued: int, instead_of: int = 0
    ) -> list[Backup]:
        """Make ``end`` (pages, at most the lease's) a checkpoint of the lease's path, if every
        group still holds what it needs there.

        Checkpoints among the first ``continued`` nodes, which this request grew from, are
        superseded unless the tree branches at them, and so is the one at the end of the first
        ``instead_of``: milestones are left of them. ``continued`` is a checkpoint too if the tree
        branches there by now. Returns the backups that keeping implies.
        """
        if not self._partial or not 0 < end <= lease.end:
            return []
        path = lease.path[:end]
        tip = path.item(-1)
        wanted = self._present(tip)
        if wanted is None:
            return []
        self._mark(tip, wanted, CHECKPOINT)
        effects = self._use(wanted)
        continued = min(continued, len(path) - 1)
        self._supersede(path[:continued])
        if continued < instead_of < len(path):
            self._supersede(path[instead_of - 1 : instead_of])
        return effects + self.branch(lease, continued)

    def branch(self, lease: DeviceLease | HostHold, end: int) -> list[Backup]:
        """Make ``end`` of a leased path, from which a request went on, a checkpoint if the tree
        branches there by now and every group still holds what it needs there: where two have
        parted a third one may. Returns the backups that it implies."""
        nodes, tip = self._nodes, lease.path.item(end - 1) if end else NONE
        if not self._partial or not end or nodes.checkpoint.item(tip):
            return []
        wanted = self._present(tip) if nodes.kids[ANY].item(tip) > 1 else None
        return [] if wanted is None else self._use(self._mark(tip, wanted, CHECKPOINT))

    def pave(self, lease: DeviceLease, end: int) -> list[Backup]:
        """Make ``end`` of a leased path a milestone, if it is no checkpoint and every group still
        holds what it needs there. Returns the backups that it implies."""
        tip = lease.path.item(end - 1)
        wanted = self._present(tip)
        if not self._partial or wanted is None or self._nodes.checkpoint.item(tip):
            return []
        self._mark(tip, wanted, MILESTONE)
        return self._use(wanted)

    def milestones(self, lease: DeviceLease) -> list[int]:
        """The milestones on a leased path, in pages and ascending, that the tree does not branch
        at."""
        nodes, path = self._nodes, lease.path
        there = nodes.milestone[path] & (nodes.kids[ANY][path] <= 1)
        return (there.nonzero()[0] + 1).tolist()

    def clear(self, lease: DeviceLease, ends: Sequence[int]) -> None:
        """Milestones at ``ends`` of a leased path are not worth it any more."""
        for end in ends:
            tip = lease.path.item(end - 1)
            for group, rows in self._mark(tip, self._needed(tip), 0):
                self._pins.cool(group, rows)

    def _mark(self, tip: int, wanted: Wanted, weight: int) -> Wanted:
        """Give the end of ``tip`` this ``weight``, 0 for nothing; returns ``wanted``."""
        nodes = self._nodes
        before = CHECKPOINT * nodes.checkpoint.item(tip) + MILESTONE * nodes.milestone.item(tip)
        if weight != before:
            nodes.checkpoint[tip] = weight == CHECKPOINT
            nodes.milestone[tip] = weight == MILESTONE
            for group, rows in wanted:
                nodes.need[group][rows] += weight - before
        return wanted

    def _use(self, wanted: Wanted) -> list[Backup]:
        nodes, stamp = self._nodes, self._pins.tick()
        effects: list[Backup] = []
        for group, rows in wanted:
            self._pins.stamp(group, rows, stamp)
            self._pins.cool(group, rows)  # queued at their new rank where nothing pins them
            unsaved = rows[nodes.state[group][rows] == Residency.DEVICE]
            if len(unsaved):
                effects.append(Backup(group, unsaved))
        return effects

    # -- what becomes of marks -----------------------------------------------------------------

    def _supersede(self, path: NodeIds) -> None:
        nodes = self._nodes
        marked = path[nodes.checkpoint[path]]
        for tip in marked[nodes.kids[ANY][marked] <= 1].tolist():
            for group, rows in self._mark(tip, self._needed(tip), MILESTONE):
                self._pins.cool(group, rows)

    def need_everything(self) -> None:
        """Of an empty tree, for a baseline: every page of every group counts as needed for good, so
        that its last use alone ranks it."""
        for need in self._nodes.need:
            need[:] = CHECKPOINT

    def forget(self, chain: NodeIds) -> None:
        """The nodes are about to go: withdraw their marks' needs from the rows above."""
        nodes = self._nodes
        marked = nodes.checkpoint[chain] | nodes.milestone[chain]
        for tip in chain[marked].tolist():
            for group, rows in self._mark(tip, self._needed(tip), 0):
                self._pins.cool(group, rows[~np.isin(rows, chain)])

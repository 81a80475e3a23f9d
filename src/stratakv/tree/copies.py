"""Nodes whose pages are being copied between device and host.

Owns the steps of a backup and of a load. A page under a copy is pinned on both tiers it touches
until the copy has ended. Must not allocate pages or move bytes.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, TicketId
from stratakv.spec.groups import ANCHOR
from stratakv.tree.effects import Effect, FreeHost
from stratakv.tree.lease import DeviceLease
from stratakv.tree.nodes import TIERS, NodeTable, Tier
from stratakv.tree.pins import Pins
from stratakv.tree.residency import ResidencyEvent
from stratakv.tree.stored import StorageMarks

DEVICE, HOST = Tier.DEVICE, Tier.HOST


class Copies:
    """``rows`` are always of one path, top first, as the tree handed them out."""

    def __init__(self, nodes: NodeTable, pins: Pins, stored: StorageMarks) -> None:
        self._nodes = nodes
        self._pins = pins
        self._stored = stored
        self.loads = 0  # pages that are LOADING: a match of none need not look for tickets

    def begin_backup(self, group: GroupId, rows: NodeIds, pages: PageIds) -> PageIds:
        """Give ``rows`` host ``pages``; returns the device pages to copy from."""
        nodes = self._nodes
        nodes.residency[group].move(rows, ResidencyEvent.BACKUP_BEGUN)
        nodes.page[HOST][group][rows] = pages
        self._pins.pin(DEVICE, group, rows)
        self._pins.born_pinned(HOST, group, rows, 1)
        if group == ANCHOR:
            np.add.at(nodes.kids[HOST], nodes.parent[rows], 1)
        return nodes.page[DEVICE][group][rows]

    def end_backup(self, group: GroupId, rows: NodeIds, *, ok: bool) -> list[Effect]:
        """The copy has ended; a failed one gives its host pages back, a good one may be stored."""
        nodes = self._nodes
        nodes.residency[group].move(
            rows, ResidencyEvent.BACKUP_DONE if ok else ResidencyEvent.BACKUP_FAILED
        )
        effects: list[Effect] = []
        if not ok:
            effects.append(FreeHost(group, nodes.page[HOST][group][rows]))
            nodes.page[HOST][group][rows] = NONE
            nodes.pins[HOST][group][rows] = 0
            if group == ANCHOR:
                parents = nodes.parent[rows]
                np.subtract.at(nodes.kids[HOST], parents, 1)
                for parent in parents[~np.isin(parents, rows)].tolist():
                    if parent != NONE:  # it may have become a leaf of the host
                        self._pins.queue(HOST, ANCHOR, nodes.segment(parent))
        self._pins.unpin(DEVICE, group, rows)
        if ok:
            self._pins.unpin(HOST, group, rows)
            effects += self._stored.wanted(group, rows)
        self._pins.offer_nodes(group, rows)
        return effects

    def sources(self, host: Sequence[NodeIds]) -> list[PageIds]:
        """The host pages that a load of ``host`` rows (by group) reads."""
        return [self._nodes.page[HOST][group][rows] for group, rows in enumerate(host)]

    def landing(self, lease: DeviceLease, group: GroupId, indices: npt.NDArray[np.int64]) -> bool:
        """Whether a load of any of the pages at ``indices`` of a leased path is under way."""
        return bool(self.loads and (self._nodes.ticket[group][lease.path[indices]] != NONE).any())

    def begin_load(
        self, host: Sequence[NodeIds], pages: Sequence[PageIds], ticket: TicketId
    ) -> None:
        """Land ``host`` rows, pinned there by a lease, on device ``pages`` (both by group) with the
        plan ``ticket``. Its host pins are the copy's from now on."""
        nodes = self._nodes
        for group, rows in enumerate(host):
            if not len(rows):
                continue
            nodes.residency[group].move(rows, ResidencyEvent.LOAD_BEGUN)
            nodes.page[DEVICE][group][rows] = pages[group]
            nodes.ticket[group][rows] = ticket
            self.loads += len(rows)
            self._pins.born_pinned(DEVICE, group, rows, 2)  # the lease's and the copy's
            if group == ANCHOR:
                np.add.at(nodes.kids[DEVICE], nodes.parent[rows], 1)

    def end_load(self, group: GroupId, rows: NodeIds) -> None:
        nodes = self._nodes
        nodes.residency[group].move(rows, ResidencyEvent.LOAD_DONE)
        nodes.ticket[group][rows] = NONE
        self.loads -= len(rows)
        for tier in TIERS:
            self._pins.unpin(tier, group, rows)
        self._pins.offer_nodes(group, rows)

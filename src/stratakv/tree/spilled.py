"""Requests that run and read the full pages of some groups on the host.

Owns what of such a lease is pinned where: on the host what can be read there, on the device the
rest, which is ``near``. So a page that is on both tiers may leave the device at any time, as one
that nobody stands on. Must not open or end a lease (``leases``).
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, PageKey
from stratakv.spec.groups import CacheSpec
from stratakv.tree.lease import DeviceLease
from stratakv.tree.nodes import NodeTable, Tier
from stratakv.tree.pins import Pins
from stratakv.tree.residency import READABLE_ON_HOST, Residency

DEVICE, HOST = Tier.DEVICE, Tier.HOST
NO_NODES: Final[NodeIds] = np.empty(0, np.intp)


class SpilledPrice(NamedTuple):
    """Of a group that would be spilled: pages that become unevictable on the device, and on the
    host, and how many of the prefix are read there."""

    to_pin: int
    to_pin_on_host: int
    away: int


class Spilled:
    """``groups``: those that have their home on the host, all of which a request spills at once."""

    def __init__(self, spec: CacheSpec, nodes: NodeTable, pins: Pins) -> None:
        self.groups = [group.id for group in spec.groups if group.at_home_on_host]
        self._nodes = nodes
        self._pins = pins

    def price(self, keys: Sequence[PageKey], end: int, group: GroupId) -> SpilledPrice:
        """What a lease at ``end`` that spills ``group`` would take of it. Read-only."""
        if not end:
            return SpilledPrice(0, 0, 0)
        nodes = self._nodes
        rows = nodes.tail(nodes.index[keys[end - 1]], end)
        there = READABLE_ON_HOST[nodes.state[group][rows]]
        away, near = rows[there], rows[~there]
        loose = (nodes.pins[HOST][group][away] == 0, nodes.pins[DEVICE][group][near] == 0)
        to_pin_on_host, to_pin = map(int, map(np.count_nonzero, loose))
        return SpilledPrice(to_pin, to_pin_on_host, len(away))

    def pin(self, group: GroupId, rows: NodeIds) -> NodeIds:
        """Pin on the host what of ``rows`` can be read there; the others, which are not pinned."""
        there = READABLE_ON_HOST[self._nodes.state[group][rows]]
        self._pins.pin(HOST, group, rows[there])
        return rows[~there]

    def unpin(self, group: GroupId, rows: NodeIds, near: Mapping[GroupId, NodeIds]) -> NodeIds:
        """Of ``rows`` take from those that are not ``near`` their pin on the host; the others. All
        of them where the group is not spilled."""
        if group not in near:
            return rows
        self._pins.unpin(HOST, group, rows[~np.isin(rows, near[group])])
        return near[group]

    def spill(self, lease: DeviceLease) -> None:
        """What a lease holds of these groups may leave the device as soon as ``settle`` finds it
        on the host."""
        for group in self.groups:
            lease.near[group] = lease.path[lease.starts[group] :]

    def saved(self, group: GroupId, rows: NodeIds) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` are whole on both tiers by now."""
        return self._nodes.state[group][rows] == Residency.BOTH

    def due(self, group: GroupId, rows: NodeIds, *, alone: bool) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` are whole on both tiers by now, or, with ``alone``, on the device with
        no copy under way."""
        state = self._nodes.state[group][rows]
        found = state == Residency.BOTH
        return found | (state == Residency.DEVICE) if alone else found

    def settle(self, lease: DeviceLease) -> list[tuple[GroupId, NodeIds]]:
        """Of what a lease has near, the rows by group that are whole on both tiers by now: it holds
        them on the host alone from now on."""
        moved: list[tuple[GroupId, NodeIds]] = []
        for group, rows in lease.near.items():
            both = self.saved(GroupId(group), rows)
            if both.any():
                lease.near[group] = rows[~both]
                self._pins.pin(HOST, group, rows[both])
                self._pins.unpin(DEVICE, group, rows[both])
                moved.append((group, rows[both]))
        return moved

    def leavable(
        self, nodes: NodeIds, counts: npt.NDArray[np.int64], group: GroupId
    ) -> npt.NDArray[np.int64]:
        """Device pages, of each lease, that nobody would hold any more if its request were
        spilled. Of its ``nodes`` the first lease has the first ``counts[0]``, and so on."""
        leave = self.saved(group, nodes) & (self._nodes.pins[DEVICE][group][nodes] == 1)
        upto = np.concatenate(([0], np.cumsum(leave)))
        ends = np.concatenate(([0], np.cumsum(counts)))
        return upto[ends[1:]] - upto[ends[:-1]]

    def host_pages(self, lease: DeviceLease, group: GroupId) -> PageIds:
        """Host pages of [0, ``end``) of a group that a lease has spilled; NONE for what is near."""
        pages = self._nodes.page[HOST][group][lease.path]
        pages[np.isin(lease.path, lease.near[group])] = NONE
        return pages

    def places(self, group: GroupId, rows: NodeIds) -> tuple[PageIds, PageIds]:
        """Page indices of ``rows``, and their host pages."""
        return self._nodes.depth[rows], self._nodes.page[HOST][group][rows]

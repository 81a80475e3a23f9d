"""Requests that run without all of their pages on the device.

A request is *resident* while there is room: then nothing here is concerned with it. It is
*spilled* where it was admitted without room for all, or where others need the room: of the groups
that have their home on the host its full pages are read there, row by row, through a buffer of its
own. A page leaves the device when its copy on the host is whole, not before: the tree's own backup
makes it, so that a spilled page is cached, stored and shared as any other.

Owns the buffers, and which page of such a row is read where. Must not copy a byte.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from stratakv.cache.sequence_states import SequenceState, SequenceStates
from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, RowIds
from stratakv.memory.block_table import BlockTable
from stratakv.policy.admission import Pages
from stratakv.policy.spilling import SpillRules
from stratakv.spec.groups import ANCHOR
from stratakv.tiers.tiered_cache import TieredCache
from stratakv.tree.effects import Backup
from stratakv.tree.lease import DeviceLease
from stratakv.tree.leases import NO_ROWS
from stratakv.tree.nodes import Tier

NearNodes: TypeAlias = dict[GroupId, tuple[RowIds, NodeIds]]


class Spilling:
    """``tables`` has the buffers' sizes; none, where every group's home is the device."""

    def __init__(self, tiers: TieredCache, tables: BlockTable, sequences: SequenceStates) -> None:
        self._tree = tiers.tree.spilled
        self._unsaved = tiers.tree.backups.unsaved
        self._pools = tiers.pools
        self._to_save = tiers.copies.backups
        self._wait = tiers.progress.wait
        self._tables = tables
        self._sequences = sequences
        self._places = tables.spilled
        self._behind = {g: len(tiers.spec.groups) + at for at, g in enumerate(tables.spilled)}
        buffers = {group: spilled.buffer.shape[1] for group, spilled in tables.spilled.items()}
        assert list(buffers) == self._tree.groups, "a group at home on the host has no buffers"
        self.rules = SpillRules(tiers.spec.page_tokens, buffers)
        self._near: set[int] = set()  # rows that hold something near, or have just committed
        self._all_near: NearNodes | None = None  # of these rows; None: it has changed
        self._staging: dict[int, int] = {}  # of spilled rows

    def __bool__(self) -> bool:
        """Whether there is anything to spill."""
        return bool(self._places)

    def __contains__(self, row: int) -> bool:
        return row in self._staging

    # -- what a request would take ---------------------------------------------------------------

    def available(self, group: GroupId) -> int:
        """Host pages that are free or could be made free now."""
        stats = self._pools.tiers[Tier.HOST][group].available()
        return stats + self._pools.evictable(Tier.HOST, group)

    # -- rows ------------------------------------------------------------------------------------

    def open(self, row: int, lease: DeviceLease, tokens: int) -> None:
        """Seat a request that was admitted spilled, and computes ``tokens`` at once."""
        self._staging[row] = self.rules.staging(tokens)
        self._comes_near(row)
        for group, spilled in self._places.items():
            self._take_buffer(row, group)
            spilled.host[row, : lease.end] = self._tree.host_pages(lease, group)
            self._sequences.grow(_one(row), group, np.array([spilled.buffer.shape[1]]))

    def _take_buffer(self, row: int, group: GroupId) -> None:
        spilled = self._places[group]
        spilled.open(row, self._pools.take(group, spilled.buffer.shape[1], self._wait))

    def peak(self, row: int, peak: Pages, tokens: int) -> Pages:
        """``peak`` by group of the request at ``row``, which computes ``tokens`` at once."""
        if row not in self._staging:
            return peak
        buffers, staging = self.rules.buffers, self.rules.staging(tokens)
        return tuple(
            buffers[group] + staging if (group := GroupId(at)) in buffers else pages
            for at, pages in enumerate(peak)
        )

    def decodes(self, row: int, tokens: int) -> None:
        """The row computes ``tokens`` at once from now on."""
        if row not in self._staging:
            return
        self._staging[row] = staging = self.rules.staging(tokens)
        for group, buffer in self.rules.buffers.items():
            self._sequences.rebook(row, group, staging, buffer + staging)

    def committed(self, row: int) -> None:
        """Pages of the row have entered the tree."""
        if row in self._staging:
            self._comes_near(row)

    def _comes_near(self, row: int) -> None:
        self._near.add(row)
        self._all_near = None

    def close(self, row: int) -> None:
        """The request at ``row`` ends, and with it its buffer."""
        if self._staging.pop(row, None) is None:
            return
        self._near.discard(row)
        self._all_near = None
        for group, spilled in self._places.items():
            self._pools.tiers[Tier.DEVICE][group].free(spilled.buffer[row].copy())

    def owned(self, group: GroupId) -> list[PageIds]:
        """Device pages of buffers, for ``check``."""
        spilled = self._places.get(group)
        return [] if spilled is None else [spilled.buffer[row] for row in self._staging]

    def check(self) -> None:
        """AssertionError unless every page of a spilled row is read in one place, and on the host
        where its lease holds it there."""
        for row in self._staging:
            lease = self._sequences[row].lease
            for group, spilled in self._places.items():
                host, wanted = spilled.host[row], self._tree.host_pages(lease, group)
                assert np.array_equal(host[: lease.end], wanted), f"row {row} reads other pages"
                here = self._tables.pages(group)[row] != NONE
                assert not (here & (host != NONE)).any(), f"row {row} has a page in two places"

    # -- from the device to the host -------------------------------------------------------------

    def make_room(self, lacking: Sequence[int]) -> bool:
        """Spill one of the requests that run, where that makes room in what is ``lacking``; of
        those that the host can hold to their end that which has most pages to give."""
        if not self._places or not set(lacking) <= self._places.keys():
            return False
        best, most = NONE, 0
        for row, sequence in self._sequences.items():
            if row in self._staging or sequence.apart or sequence.receives:
                continue
            if not self._host_holds(sequence):
                continue
            if (gain := self._gain(sequence)) > most:
                best, most = row, gain
        if best == NONE:
            return False
        self._spill(best, self._sequences[best])
        return True

    def _host_holds(self, sequence: SequenceState) -> bool:
        pools = self._pools.tiers[Tier.HOST]
        return all(sequence.demand.peak[ANCHOR] <= pools[group].capacity for group in self._places)

    def _gain(self, sequence: SequenceState) -> int:
        """Device pages that become free if a request is spilled, of the group that gives least."""
        return min(
            self._tree.leavable(sequence.lease, group) - buffer
            for group, buffer in self.rules.buffers.items()
        )

    def _spill(self, row: int, sequence: SequenceState) -> None:
        self._tree.spill(sequence.lease)
        self._staging[row] = staging = self.rules.staging(1)
        self._pools.counters.add(spilled=1)
        self._settle(row, sequence)
        for group, buffer in self.rules.buffers.items():
            self._take_buffer(row, group)
            self._sequences.rebook(row, group, staging, buffer + staging)
            near = len(sequence.lease.near[group])
            left = self._sequences.left(row, ANCHOR) + near + 1
            most = sequence.demand.peak[ANCHOR]  # it has a page for every page of its anchor
            self._sequences.rebook(row, self._behind[group], left, most)
        self._comes_near(row)

    def settle(self) -> None:
        """What has got its copy on the host is read there from now on; what could not be saved for
        want of host pages is asked for again. One look finds the few that this concerns."""
        due: set[int] = set()
        for group, (rows, nodes) in self._near_nodes().items():
            alone = self.available(group) > 0  # or asking once more is in vain
            due.update(rows[self._tree.due(group, nodes, alone=alone)].tolist())
        for row in sorted(due):
            self._settle(row, self._sequences[row])

    def _near_nodes(self) -> "NearNodes":
        """Rows and nodes, side by side, of all that is near; rows that have nothing near go."""
        if self._all_near is None:
            near = {row: self._sequences[row].lease.near for row in sorted(self._near)}
            near = {row: held for row, held in near.items() if any(map(len, held.values()))}
            self._near = set(near)
            rows = np.array(list(near), np.int32)
            self._all_near = {
                group: (
                    np.repeat(rows, [len(held[group]) for held in near.values()]),
                    np.concatenate([NO_ROWS, *(held[group] for held in near.values())]),
                )
                for group in self._places
            }
        return self._all_near

    def _settle(self, row: int, sequence: SequenceState) -> None:
        lease = sequence.lease
        for group, nodes in self._tree.settle(lease):
            at, host = self._tree.places(group, nodes)
            self._tables.pages(group)[row, at] = NONE
            self._places[group].host[row, at] = host
            self._sequences.give_back(row, group, len(at), self._staging[row])
            self._sequences.grow(_one(row), GroupId(self._behind[group]), np.array([len(at)]))
            self._all_near = None
        for group, nodes in lease.near.items():
            if len(rows := self._unsaved(group, nodes)):
                self._to_save.want([Backup(group, rows)])

    @property
    def starved(self) -> bool:
        """Whether something stays on the device for want of host pages."""
        return any(not self.available(backup.group) for backup in self._staying())

    def save(self) -> None:
        """Ask once more for host copies of what must leave the device: what was asked for while the
        host was full is forgotten."""
        self._to_save.want(list(self._staying()))

    def _staying(self) -> Iterator[Backup]:
        """What the device alone has of those that are spilled; of a request that runs alone in any
        case, for nobody else can make room for it."""
        for row in sorted(self._near):
            for group, near in self._sequences[row].lease.near.items():
                if len(nodes := self._unsaved(group, near)):
                    yield Backup(group, nodes)
        if len(self._sequences) > 1:
            return
        for row, sequence in self._sequences.items():
            if row in self._staging or sequence.apart:
                continue
            for group in self._places:
                if len(nodes := self._unsaved(group, sequence.lease.path)):
                    yield Backup(group, nodes)


def _one(row: int) -> RowIds:
    return np.array([row], np.int32)

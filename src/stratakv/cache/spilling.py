"""Requests that run without all of their pages on the device.

A request is *resident* while there is room: then nothing here is concerned with it. It is
*spilled* where it was admitted without room for all, or where others need the room: of the groups
that have their home on the host its full pages are read there, row by row, through a buffer of its
own. A page leaves the device when its copy on the host is whole, not before: the tree's own backup
makes it, so that a spilled page is cached, stored and shared as any other.

Owns the buffers, and which page of such a row is read where. Must not copy a byte.
"""

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np

from stratakv.cache.sequence_states import SequenceState, SequenceStates
from stratakv.cache.spill_candidates import SpillCandidates
from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, RowIds
from stratakv.memory.block_table import BlockTable
from stratakv.policy.admission import Pages
from stratakv.policy.spilling import SpillRules
from stratakv.spec.groups import ANCHOR
from stratakv.tiers.tiered_cache import TieredCache
from stratakv.tree.effects import Backup
from stratakv.tree.leases import NO_ROWS
from stratakv.tree.nodes import Tier

NearNodes: TypeAlias = dict[GroupId, tuple[RowIds, NodeIds]]
MOST_FAILURES: Final = 8
"""Plans of copies to the host in a row. What makes one fail is seldom over by the next step, and a
step that waits for what cannot come never ends."""
NO_BATCH: Final[RowIds] = np.empty(0, np.int32)


class Spilling:
    """``tables`` has the buffers' sizes; none, where every group's home is the device."""

    def __init__(self, tiers: TieredCache, tables: BlockTable, sequences: SequenceStates) -> None:
        self._tree = tiers.tree.spilled
        self._leases = tiers.tree.leases
        self._unsaved = tiers.tree.backups.unsaved
        self._pools = tiers.pools
        self._copies = tiers.copies
        self._to_save = tiers.copies.backups
        self._wait = tiers.progress.wait
        self._tables = tables
        self._sequences = sequences
        self._groups = [group.id for group in tiers.spec.groups]
        self._places = tables.spilled
        self._behind = {g: len(tiers.spec.groups) + at for at, g in enumerate(tables.spilled)}
        buffers = {group: spilled.buffer.shape[1] for group, spilled in tables.spilled.items()}
        assert list(buffers) == self._tree.groups, "a group at home on the host has no buffers"
        self.rules = SpillRules(tiers.spec.page_tokens, buffers)
        self._near: NearNodes = dict.fromkeys(self._places, (NO_BATCH, NO_ROWS))
        self._changed: set[int] = set()  # rows of which that is not true any more
        self._candidates = SpillCandidates(self._tree, self._pools, sequences, self.rules)
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

    def open_resident(self, row: int) -> None:
        """A request was admitted that has all of its pages on the device."""
        self._candidates.change(row)

    def open(self, row: int, sequence: SequenceState) -> None:
        """Seat a request that was admitted spilled."""
        self._staging[row] = self.rules.staging(sequence.at_once)
        self._changed.add(row)
        lease = sequence.lease
        for group, spilled in self._places.items():
            self._take_buffer(row, group)
            spilled.host[row, : lease.end] = self._tree.host_pages(lease, group)
            self._sequences.grow(_one(row), group, np.array([spilled.buffer.shape[1]]))

    def reserve(self, row: int, group: GroupId, first: int, end: int) -> int:
        """Host pages for [first, end) of a request at ``row`` that receives them. Behind what it
        has now: the page that is not full is on the device."""
        if first >= end:
            return first
        pages = self._pools.take(group, end - first, self._wait, Tier.HOST)
        self._places[group].host[row, first:end] = pages
        behind = GroupId(self._behind[group])
        self._sequences.grow(_one(row), behind, np.array([end - first]))
        return end

    def received(self, row: int) -> None:
        """What the request at ``row`` has received is the tree's: it reads what its lease holds."""
        if row not in self._staging:
            self._candidates.change(row)
            return
        lease = self._sequences[row].lease
        for group, spilled in self._places.items():
            spilled.host[row, : lease.end] = self._tree.host_pages(lease, group)
            there = self._leases.pages(lease, group)
            self._tables.pages(group)[row, : lease.end] = there
            near, behind = len(lease.near[group]), self._behind[group]
            self._sequences.give_back(row, behind, near, self._sequences[row].demand.peak[behind])
        self._changed.add(row)

    def received_pages(self, group: GroupId) -> list[PageIds]:
        """Host pages that requests are receiving, for ``check``."""
        if group not in self._places:
            return []
        return [self._receiving(row, group) for row in self._staging]

    def _receiving(self, row: int, group: GroupId) -> PageIds:
        pages = self._places[group].host[row, self._sequences[row].lease.end :]
        return pages[pages != NONE]

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
        self._sequences[row].computes(tokens)
        if row not in self._staging:
            self._candidates.change(row)
            return
        self._staging[row] = staging = self.rules.staging(tokens)
        for group, buffer in self.rules.buffers.items():
            self._sequences.rebook(row, group, staging, buffer + staging)

    def committed(self, row: int) -> None:
        """Pages of the row have entered the tree."""
        (self._changed.add if row in self._staging else self._candidates.change)(row)

    def close(self, row: int) -> None:
        """The request at ``row`` ends, and with it its buffer."""
        if self._staging.pop(row, None) is None:
            self._candidates.change(row)
            return
        self._changed.add(row)
        for group, spilled in self._places.items():
            self._pools.tiers[Tier.DEVICE][group].free(spilled.buffer[row].copy())
            self._pools.tiers[Tier.HOST][group].free(self._receiving(row, group))

    def owned(self, group: GroupId) -> list[PageIds]:
        """Device pages of buffers, for ``check``."""
        spilled = self._places.get(group)
        return [] if spilled is None else [spilled.buffer[row] for row in self._staging]

    def check(self) -> None:
        """AssertionError unless every page of a spilled row is read in one place, and on the host
        where its lease holds it there."""
        if self._places:
            self._candidates.check()
        for row in self._staging:
            lease = self._sequences[row].lease
            for group, spilled in self._places.items():
                host, wanted = spilled.host[row], self._tree.host_pages(lease, group)
                assert np.array_equal(host[: lease.end], wanted), f"row {row} reads other pages"
                here = self._tables.pages(group)[row] != NONE
                assert not (here & (host != NONE)).any(), f"row {row} has a page in two places"

    # -- back to the device ----------------------------------------------------------------------

    def roomy(self) -> list[int]:
        """Rows, oldest first, of requests whose pages are all on the host, and for any one of which
        the device has room for all of them now, as far as it has booked, beside its buffer."""
        if not self._staging or self.copies_fail:
            return []
        budget, device = self._sequences.budget, self._pools.available
        rooms = budget.room([device(group) for group in self._groups] + self._free_on_host())
        room = min(rooms[group] for group in self._places)
        return [
            row
            for row in sorted(self._staging)
            if (sequence := self._sequences[row]).lease.end + self._sequences.left(row, ANCHOR)
            < room
            and not sequence.receives
            and not any(map(len, sequence.lease.near.values()))
        ]

    def _free_on_host(self) -> list[int]:
        return [self.available(group) for group in self._places]

    # -- from the device to the host -------------------------------------------------------------

    def make_room(self, lacking: Sequence[int]) -> bool:
        """Spill one of the requests that run, where that makes room in what is ``lacking``; of
        those that the host can hold to their end that which has most pages to give."""
        if not self._places or not set(lacking) <= self._places.keys():
            return False
        row = self._candidates.best()
        if row is None:
            return False
        self._spill(row, self._sequences[row])
        return True

    def _spill(self, row: int, sequence: SequenceState) -> None:
        self._tree.spill(sequence.lease)
        self._staging[row] = staging = self.rules.staging(sequence.at_once)
        self._candidates.change(row)
        self._pools.counters.add(spilled=1)
        self._settle(row, sequence)
        for group, buffer in self.rules.buffers.items():
            self._take_buffer(row, group)
            self._sequences.rebook(row, group, staging, buffer + staging)
            near = len(sequence.lease.near[group])
            left = self._sequences.left(row, ANCHOR) + near + 1
            most = sequence.demand.peak[ANCHOR]  # it has a page for every page of its anchor
            self._sequences.rebook(row, self._behind[group], left, most)
        self._changed.add(row)

    def settle(self) -> None:
        """What has got its copy on the host is read there from now on; what could not be saved is
        asked for again, where that is not in vain. One look finds the few that this concerns."""
        due: set[int] = set()
        for group, (rows, nodes) in self._near_nodes().items():
            alone = self.available(group) > 0 and not self.copies_fail
            due.update(rows[self._tree.due(group, nodes, alone=alone)].tolist())
        for row in sorted(due):
            self._settle(row, self._sequences[row])

    def _near_nodes(self) -> "NearNodes":
        """Rows and nodes, side by side, of all that is near. Only those that have changed are
        looked at one by one."""
        if self._changed:
            changed = sorted(self._changed)
            gone = np.array(changed, np.int32)
            here = [row for row in changed if row in self._staging]
            for group, (rows, nodes) in self._near.items():
                kept = ~np.isin(rows, gone)
                held = [self._sequences[row].lease.near[group] for row in here]
                more = np.repeat(np.array(here, np.int32), [len(one) for one in held])
                self._near[group] = (
                    np.concatenate((rows[kept], more)),
                    np.concatenate((nodes[kept], *held)),
                )
            self._changed.clear()
        return self._near

    def _settle(self, row: int, sequence: SequenceState) -> None:
        lease = sequence.lease
        for group, nodes in self._tree.settle(lease):
            at, host = self._tree.places(group, nodes)
            self._tables.pages(group)[row, at] = NONE
            self._places[group].host[row, at] = host
            self._sequences.give_back(row, group, len(at), self._staging[row])
            self._sequences.grow(_one(row), GroupId(self._behind[group]), np.array([len(at)]))
            self._changed.add(row)
        for group, nodes in lease.near.items():
            if len(rows := self._unsaved(group, nodes)):
                self._to_save.want([Backup(group, rows)])

    @property
    def starved(self) -> bool:
        """Whether something stays on the device for want of host pages."""
        return any(not self.available(backup.group) for backup in self._staying())

    @property
    def copies_fail(self) -> bool:
        """Whether copies to the host have failed so often that nothing is asked for twice, until
        one succeeds: those of pages that become full are tried in any case."""
        return self._copies.failed_in_a_row >= MOST_FAILURES

    def save(self) -> None:
        """Ask once more for host copies of what must leave the device: what was asked for while the
        host was full is forgotten."""
        if not self.copies_fail:
            self._to_save.want(list(self._staying()))

    def _staying(self) -> Iterator[Backup]:
        """What the device alone has of those that are spilled; of a request that runs alone in any
        case, for nobody else can make room for it."""
        for group, (_, near) in self._near_nodes().items():
            if len(nodes := self._unsaved(group, near)):
                _, first = np.unique(nodes, return_index=True)  # some may share a prefix
                yield Backup(group, nodes[np.sort(first)])
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

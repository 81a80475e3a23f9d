"""What a step is to save on the host: asked for, then begun in the tree, then taken by a plan.

Owns which of the backups that the tree asks for are begun, by the write policy and by the host's
room. Must not submit a copy (``transfer_manager``).
"""

from collections.abc import Sequence

import numpy as np

from stratakv.agreement.agreement import DigestInputs
from stratakv.core.ids import GroupId, NodeIds
from stratakv.policy.write import WritePolicy, safe_wanted, to_clean, weighs_uses, worth_backup
from stratakv.tiers.flights import Part
from stratakv.tiers.pools import Pools
from stratakv.tree.effects import Backup
from stratakv.tree.lease import DeviceLease
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree


class BackupQueue:
    def __init__(self, tree: PrefixTree, pools: Pools, write: WritePolicy) -> None:
        self._moves, self._backups = tree.copies, tree.backups
        self._eviction, self._write_back = tree.eviction, tree.write_back
        self._pools = pools
        self._write = write
        self._weighs_uses = weighs_uses(write)
        self._safe_wanted = [safe_wanted(write, s.capacity) for s in pools.tiers[Tier.DEVICE]]
        self._wanted: list[Backup] = []  # not yet begun in the tree
        self._begun: list[Part] = []  # and not yet taken

    def __bool__(self) -> bool:
        return bool(self._wanted or self._begun)

    def figures(self) -> DigestInputs:
        """What waits, for ranks to compare."""
        return {"backups wanted": len(self._wanted), "backups begun": len(self._begun)}

    def take(self) -> list[Part]:
        """Begin what is wanted; all that has begun, given once."""
        self.begin()
        begun, self._begun = self._begun, []
        return begun

    def want(self, backups: Sequence[Backup]) -> None:
        """Remember what the tree wants saved. Its nodes stay what they are only until the next
        eviction: ``begin`` comes first."""
        self._wanted += backups

    def used(self, lease: DeviceLease) -> None:
        """A request has leased ``lease``: some of it may be worth a backup now."""
        if self._weighs_uses:
            self.want(self._backups.kept(lease))

    def clean(self) -> bool:
        """Back up the coldest pages, where too few of a group are free or saved. Whether anything
        has begun that no plan has taken."""
        for group, wanted in enumerate(self._safe_wanted):
            free = self._pools.tiers[Tier.DEVICE][group].available()
            if free >= wanted:
                continue
            id_ = GroupId(group)
            saved = self._write_back.saved(id_)
            if count := to_clean(wanted, free + saved):
                self._clean(id_, count)
        return bool(self._begun)

    def _clean(self, group: GroupId, count: int) -> None:
        """Back up ``count`` pages, those first that milestones alone need, as they leave first: but
        on the host they have only what no checkpoint needs, now or before."""
        host, write_back = self._pools.tiers[Tier.HOST][group], self._write_back
        # A copy that pushes another page's copy off the host saves nothing, and would be made and
        # lost for ever.
        room = host.available() + write_back.spare_room(group)
        spare = write_back.coldest_spare(group, min(count, room)) if room else []
        count -= sum(map(len, spare))
        room = host.available() + self._eviction.evictable(Tier.HOST, group)
        count = min(count, max(host.available(), room - write_back.saved_warm(group)))
        paths = write_back.coldest(group, count) if count else []
        if paths:
            self._pools.make_room(Tier.HOST, group, sum(map(len, paths)))
            self._begin_paths(group, paths)
        if spare:
            self._pools.make_spare_room(Tier.HOST, group, sum(map(len, spare)))
            self._begin_paths(group, spare)

    def _begin_paths(self, group: GroupId, paths: Sequence[NodeIds]) -> None:
        """Of those that have not gone with what made room for them."""
        for rows in paths:
            self._begin_rows(group, self._backups.unsaved(group, rows))

    def begin(self) -> None:
        """Begin the backups that the write policy wants, as many pages of each, from the root
        down, as the host has room for. It makes room once per group: an eviction costs far more
        than a page of it."""
        if not self._wanted:
            return
        unsaved = self._backups.unsaved
        backups, self._wanted = self._wanted, []
        kept: dict[GroupId, list[NodeIds]] = {}
        spare: dict[GroupId, list[NodeIds]] = {}
        for backup in backups:
            worth = backup.nodes[worth_backup(self._write, self._backups.hits(backup.nodes))]
            rows = unsaved(backup.group, worth)
            needed = self._backups.needed(backup.group, rows)
            for by_group, some in ((kept, rows[needed]), (spare, rows[~needed])):
                if len(some):
                    by_group.setdefault(backup.group, []).append(some)
        # What milestones need comes last, and has only what no checkpoint needs.
        for by_group, make_room in (
            (kept, self._pools.make_room),
            (spare, self._pools.make_spare_room),
        ):
            for group in sorted(by_group):
                paths = by_group[group]
                wanted = paths[0] if len(paths) == 1 else np.unique(np.concatenate(paths))
                make_room(Tier.HOST, group, len(wanted))
            for group, paths in by_group.items():
                self._begin_paths(group, paths)  # one may be here twice

    def _begin_rows(self, group: GroupId, rows: NodeIds) -> None:
        space = self._pools.tiers[Tier.HOST][group]
        room = space.available()
        self._pools.counters.add(dropped_backup_pages=max(0, len(rows) - room))
        rows = rows[:room]
        if not len(rows):
            return
        host = space.alloc(len(rows))
        assert host is not None, "the host pool has lost pages"
        device = self._moves.begin_backup(group, rows, host)
        self._begun.append(Part(group, rows.copy(), device, host))

    def save(self, group: GroupId, rows: NodeIds) -> int:
        """Back up what of ``rows`` has no host copy, whatever the write policy: host pages for it
        are free. Returns how many pages that is."""
        rows = self._backups.unsaved(group, rows)
        self._begin_rows(group, rows)
        return len(rows)

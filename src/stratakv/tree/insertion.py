"""Pages that enter the tree: a request's, storage's, or saved from a foreign engine's.

Owns what becomes of each page whose place is taken already. Mutators return effects in the order in
which they must be executed. Must not choose what is kept.
"""

from collections.abc import Sequence

import numpy as np

from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, PageKey
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.tree.backups import Backups
from stratakv.tree.effects import Backup, Effect, FreeDevice, FreeHost, Inserted, Remap
from stratakv.tree.nodes import TIERS, NodeTable, Tier
from stratakv.tree.pins import Pins
from stratakv.tree.residency import ON_TIER, READABLE_ON_HOST, Residency, ResidencyEvent
from stratakv.tree.stored import StorageMarks

DEVICE, HOST = Tier.DEVICE, Tier.HOST


class Insertion:
    """Verbs and arguments are those of ``PrefixTree``."""

    def __init__(
        self,
        spec: CacheSpec,
        nodes: NodeTable,
        pins: Pins,
        stored: StorageMarks,
        backups: Backups,
    ) -> None:
        self._nodes, self._pins, self._stored = nodes, pins, stored
        self._backups = backups
        self._groups = [group.id for group in spec.groups]
        self._keep_all = [group.id for group in spec.groups if group.keeps_all]

    def insert(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> Inserted:
        return self._place(ResidencyEvent.INSERTED, keys, first, pages)

    def land(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> list[Effect]:
        return self._place(ResidencyEvent.FETCHED, keys, first, pages).effects

    def adopt_saved(
        self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]
    ) -> list[Effect]:
        effects = self._place(ResidencyEvent.SAVED, keys, first, pages).effects
        if first < len(keys):
            rows = self._nodes.tail(self._nodes.index[keys[-1]], len(keys) - first)
            for group in self._groups:
                there = rows[READABLE_ON_HOST[self._nodes.state[group][rows]]]
                effects += self._stored.wanted(group, there)
        return effects

    def _place(
        self, event: ResidencyEvent, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]
    ) -> Inserted:
        tier = DEVICE if event is ResidencyEvent.INSERTED else HOST
        nodes, pins = self._nodes, self._pins
        found = Inserted([], [])
        if first >= len(keys):
            return found
        known = nodes.reach(keys, first, len(keys))
        stamp = pins.tick()
        rows = None
        if known > first:
            rows = nodes.tail(nodes.index[keys[known - 1]], known - first)
            for group in self._groups:
                mine = pages[group][: known - first]
                self._meet(event, group, rows, mine, found)
        if known < len(keys):
            parent = nodes.index[keys[known - 1]] if known else NONE
            fresh_rows = nodes.grow(tier, parent, keys[known:])
            rows = fresh_rows if known == first else None
            self._stored.grown(fresh_rows)
            fetched = event is ResidencyEvent.FETCHED
            for group in self._groups:
                mine = pages[group][known - first :]
                fresh = fresh_rows
                if group != ANCHOR:
                    held = mine != NONE
                    fresh, mine = fresh[held], mine[held]
                if len(fresh):
                    self._adopt(event, group, fresh, mine)
                    self._stored.entered(group, fresh, fetched=fetched)
                    pins.arrive(tier, group, fresh, stamp)
        if tier == DEVICE:
            if rows is None:
                rows = nodes.tail(nodes.index[keys[-1]], len(keys) - first)
            found.effects.extend(self._unsaved(rows, met=known - first))
        return found

    def _adopt(self, event: ResidencyEvent, group: GroupId, rows: NodeIds, pages: PageIds) -> None:
        """Pages of one path that enter a tier; to pin or to queue them is the caller's."""
        tier = DEVICE if event is ResidencyEvent.INSERTED else HOST
        nodes = self._nodes
        nodes.residency[group].move(rows, event)
        nodes.page[tier][group][rows] = pages

    def _meet(
        self, event: ResidencyEvent, group: GroupId, rows: NodeIds, mine: PageIds, found: Inserted
    ) -> None:
        """A request's (or storage's) pages for nodes that exist already."""
        tier = DEVICE if event is ResidencyEvent.INSERTED else HOST
        nodes = self._nodes
        state = nodes.state[group][rows]
        held = mine != NONE
        there = ON_TIER[tier][state]
        take = held & ~there
        if take.any():
            adopted = rows[take]
            absent = state[take] == Residency.ABSENT  # a second copy is no use of the first
            if absent.any():
                self._pins.enter(group, adopted[absent], self._pins.tick())
            if tier == HOST or absent.any():
                fetched = event is ResidencyEvent.FETCHED
                self._stored.entered(group, adopted[absent | (tier == HOST)], fetched=fetched)
            self._adopt(event, group, adopted, mine[take])
            self._pins.born(tier, group, adopted)
            if group == ANCHOR:
                np.add.at(nodes.kids[tier], nodes.parent[adopted], 1)
            # The other copy is not the last one any more.
            other = TIERS[1 - tier]
            free = nodes.pins[other][group][adopted] == 0
            free &= ON_TIER[other][nodes.state[group][adopted]]
            self._pins.queue(other, group, adopted[free])
        spare = held & there
        if tier == DEVICE:
            spare &= (state != Residency.LOADING) & (nodes.page[DEVICE][group][rows] != mine)
        if not spare.any():
            return
        if tier == HOST:
            found.effects.append(FreeHost(group, mine[spare]))
            return
        canonical = nodes.page[DEVICE][group][rows[spare]]
        at = nodes.depth[rows[spare]].astype(np.int64)
        found.remaps.append(Remap(group, at, canonical))
        found.effects.append(FreeDevice(group, mine[spare]))

    def _unsaved(self, rows: NodeIds, met: int) -> list[Effect]:
        """Pages without a host copy among those just inserted, of the groups that keep all; those
        behind the first ``met`` are new and have none."""
        effects: list[Effect] = []
        for group in self._keep_all:
            found = rows
            if met or group != ANCHOR:
                found = self._backups.unsaved(group, rows)
            if len(found):
                effects.append(Backup(group, found))
        return effects

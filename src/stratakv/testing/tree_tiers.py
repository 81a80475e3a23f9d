"""Plays the two tiers under a prefix tree: pools, evictions, copies, and what bytes a page holds.

Owns the pools, the copies in flight and the bytes (named by the prefix that they belong to). Every
verb does one thing to tree and model and compares. Must not know requests.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias, assert_never

import numpy as np

from stratakv.core.ids import GroupId, NodeIds, PageIds, PageKey, TicketId
from stratakv.memory.allocator import PageAllocator
from stratakv.spec.groups import CacheSpec
from stratakv.testing.tree_books import DEVICE, HOST, EffectSet, Freed, PageAt, Prefix
from stratakv.testing.tree_model import WARM, TreeModel
from stratakv.testing.tree_records import Copy, keys_of
from stratakv.tree.effects import Backup, Effect, FreeDevice, FreeHost, Persist, Remap
from stratakv.tree.lease import HostHold
from stratakv.tree.nodes import Tier
from stratakv.tree.policies import EVICTION_POLICIES
from stratakv.tree.prefix_tree import PrefixTree
from stratakv.tree.residency import Residency


def _class(rank: int) -> int:
    """What leaves before any of the next, under any policy: cold, needed by milestones, others."""
    return (rank > 0) + (rank >= WARM)


OnLost: TypeAlias = Callable[[Sequence[PageAt], Sequence[HostHold]], None]
OnPersist: TypeAlias = Callable[[Persist], None]


class TierDriver:
    """``policy``: whose order is held against the model's under LRU, which it predicts. Under any
    other, only who may leave is, and that what is cold goes first."""

    def __init__(
        self,
        spec: CacheSpec,
        device_pages: Sequence[int],
        host_pages: Sequence[int],
        policy: str = "lru",
    ) -> None:
        self.spec = spec
        self.tree = PrefixTree(spec, device_pages[0] + host_pages[0], EVICTION_POLICIES[policy])
        self._predicted = policy == "lru"
        self.model = TreeModel(spec)
        self.pools = [[PageAllocator(n) for n in tier] for tier in (device_pages, host_pages)]
        self.bytes: dict[Freed, Prefix] = {}
        self.copies: list[Copy] = []
        self.did: Counter[str] = Counter()
        self._on_lost: OnLost = _nobody_stands_there
        self._on_persist: OnPersist = lambda effect: None
        self.prefix_of: dict[PageKey, Prefix] = {}
        self._serial = 0

    def when_lost(self, call: OnLost) -> None:
        """With places whose backup has failed, before their host pages go."""
        self._on_lost = call

    def when_persisted(self, call: OnPersist) -> None:
        """With pages that a store should get; who drops them may have them later."""
        self._on_persist = call

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def keys(self, prompt: Prefix) -> list[PageKey]:
        keys = keys_of(prompt, self.spec.page_tokens)
        for index, key in enumerate(keys):
            self.prefix_of[key] = prompt[: index + 1]
        return keys

    # -- pages ---------------------------------------------------------------------------------

    def alloc(self, tier: Tier, group: int, count: int) -> PageIds | None:
        """Pages of a pool; where it is short, evict once, then give up."""
        pool = self.pools[tier][group]
        if pool.available() < count:
            self.evict(tier, group, count - pool.available())
        return pool.alloc(count)

    def evict(self, tier: Tier, group: int, count: int) -> int:
        """Evict, and hold order, cascades and progress against the model; pages taken."""
        return self._evicted(
            tier, group, count, self.tree.eviction.evict(tier, GroupId(group), count)
        )

    def evict_saved(self, group: int, count: int) -> int:
        """``evict`` from the device as a write-back cache does, which breaks the policy's order."""
        predicted, self._predicted = self._predicted, False
        effects = self.tree.write_back.evict(GroupId(group), count)
        taken = self._evicted(DEVICE, group, count, effects)
        self._predicted = predicted
        return taken

    def evict_spare(self, tier: Tier, group: int, count: int) -> int:
        """``evict``, of what no checkpoint needs; on the device also of what the host has too."""
        if tier == Tier.HOST:
            effects = self.tree.eviction.evict_spare(tier, GroupId(group), count)
            return self._evicted(tier, group, count, effects, below=WARM)
        nodes = self.model.nodes.items()
        saved = {p for p, spots in nodes if spots[group].state == Residency.BOTH}
        predicted, self._predicted = self._predicted, False
        effects = self.tree.write_back.evict_spare(GroupId(group), count)
        taken = self._evicted(tier, group, count, effects, WARM, saved)
        self._predicted = predicted
        return taken

    def _evicted(
        self,
        tier: Tier,
        group: int,
        count: int,
        effects: Sequence[Effect],
        below: int = 1 << 62,
        saved: AbstractSet[Prefix] = frozenset(),
    ) -> int:
        """``below``: only pages of a lower rank might leave, or ``saved`` ones."""
        expected, taken = EffectSet(), 0
        for effect in effects:
            if isinstance(effect, (FreeDevice, FreeHost)[tier]) and effect.group == group:
                taken += self._taken(tier, group, effect.pages.tolist(), expected, below, saved)
        assert self.model.byteless or taken <= count, f"asked for {count}, took {taken}"
        left = self.model.candidates(tier, group) if taken < count else {}
        left = {prefix: rank for prefix, rank in left.items() if rank < below}
        assert not left, f"took {taken} of {count} while {tier.name} {group} could give {left}"
        self.apply(effects, expected)
        self.did[f"evict {tier.name} {'anchor' if group == 0 else 'other'}"] += taken
        return taken

    def _taken(
        self,
        tier: Tier,
        group: int,
        pages: list[int],
        expected: EffectSet,
        below: int,
        saved: AbstractSet[Prefix],
    ) -> int:
        """One batch of one path, top first. A node above a leaf may go only after it."""
        owner = {spots[group].pages[tier]: p for p, spots in self.model.nodes.items()}
        ranks = self.model.candidates(tier, group)
        for page in reversed(pages):
            if (tier, group, page) in expected.freed:  # pruned together with what was taken
                continue
            prefix = owner[page]
            if group == 0:
                ranks = self.model.candidates(tier, group)
            assert prefix in ranks, f"{tier.name} page {page} of {prefix} must not leave"
            rank, least = ranks.pop(prefix), min(ranks.values(), default=1 << 62)
            in_order = rank <= least if self._predicted else _class(rank) <= _class(least)
            may = rank < below or prefix in saved
            in_order = (in_order and may) or self.model.maybe_cold((prefix, group))
            assert in_order, f"{prefix} of rank {rank} left before rank {least}"
            self.model.take(tier, group, prefix, expected)
        return len(pages)

    # -- copies --------------------------------------------------------------------------------

    def backup(self, tip: Prefix, group: int, count: int) -> bool:
        """Begin to copy up to ``count`` unsaved pages above ``tip``; host short: evict once."""
        wanted = len(self.unsaved(tip, group)[:count])
        ids = self.alloc(HOST, group, wanted)
        if ids is None or not wanted:
            self.did["backup dropped"] += ids is None
            return False
        # Making room may have cost host-only nodes of this very path, and what hangs on them.
        places = self.unsaved(tip[: self.model.reach(tip)], group)[: len(ids)]
        self.pools[HOST][group].free(ids[len(places) :])
        ids = ids[: len(places)]
        if not places:
            return False
        self.begin_backup({group: places}, {group: ids})
        return True

    def begin_backup(self, places: dict[int, list[PageAt]], ids: dict[int, PageIds]) -> None:
        """One copy of unsaved places of one path into host pages ``ids``, by group."""
        rows = {g: np.array([self.row(p) for p, _ in mine], np.intp) for g, mine in places.items()}
        self.submit(load=False, rows=rows, places=places)
        for group, mine in places.items():
            device = self.tree.copies.begin_backup(GroupId(group), rows[group], ids[group])
            assert device.tolist() == [self.model.spot(p).pages[DEVICE] for p in mine]
            self.model.begin_backup(mine, ids[group].tolist())
        self.did["backup"] += 1

    def unsaved(self, tip: Prefix, group: int) -> list[PageAt]:
        if not tip:
            return []
        path = [(tip[: at + 1], group) for at in range(len(tip))]
        places = [p for p in path if self.model.spot(p).state == Residency.DEVICE]
        rows = self.tree.backups.unsaved(
            GroupId(group), self.tree.internals.nodes.path(self.row(tip))
        )
        assert self.places_of(rows, group) == places, "what is unsaved"
        return places

    def submit(
        self, *, load: bool, rows: dict[int, NodeIds], places: dict[int, list[PageAt]]
    ) -> TicketId:
        self.copies.append(Copy(TicketId(self.next_serial()), load, rows, places))
        return self.copies[-1].ticket

    def end_copy(self, copy: Copy, *, ok: bool) -> None:
        """A copy ends: bytes arrive where they went. Loads cannot fail."""
        self.copies.remove(copy)
        source, target = (HOST, DEVICE) if copy.load else (DEVICE, HOST)
        for group, places in copy.places.items():
            for place in places if ok or copy.load else ():
                pages = self.model.spot(place).pages
                self.bytes[target, group, pages[target]] = self.bytes[source, group, pages[source]]
            if copy.load and places:
                self.tree.copies.end_load(GroupId(group), copy.rows[group])
                self.model.end_load(places)
            elif places:
                if not ok:
                    self._on_lost(places, self.tree.leases.lose(GroupId(group), copy.rows[group]))
                effects = self.tree.copies.end_backup(GroupId(group), copy.rows[group], ok=ok)
                self.apply(effects, self.model.end_backup(places, ok=ok))
        self.did["load done" if copy.load else "backup done" if ok else "backup failed"] += 1

    # -- comparing -----------------------------------------------------------------------------

    def apply(
        self, effects: Sequence[Effect], expected: EffectSet, remaps: Sequence[Remap] = ()
    ) -> EffectSet:
        """Execute effects in order; together they must be exactly the expected ones."""
        found = EffectSet()
        for remap in remaps:
            at = [(int(remap.group), index) for index in remap.indices.tolist()]
            found.remapped.update(zip(at, remap.canonical.tolist(), strict=True))
        for effect in effects:
            match effect:
                case FreeDevice(group, pages) | FreeHost(group, pages):
                    tier = DEVICE if isinstance(effect, FreeDevice) else HOST
                    gone = [(tier, int(group), page) for page in pages.tolist()]
                    found.freed.update(gone)
                    self.give_back(gone)
                case Backup(group, rows):
                    saved = [p for p, _ in self.places_of(rows, group)]
                    found.backups.setdefault(int(group), []).extend(saved)
                case Persist(group, rows):
                    found.persists[int(group)] = [p for p, _ in self.places_of(rows, group)]
                case _:
                    assert_never(effect)
        assert found == expected, f"effects {found}, not {expected}"
        for effect in effects:
            if isinstance(effect, Persist):
                self._on_persist(effect)
        return found

    def give_back(self, pages: Sequence[Freed]) -> None:
        for tier, group, page in pages:
            self.pools[tier][group].free(np.array([page], np.int32))
            self.bytes.pop((tier, group, page), None)

    def row(self, prefix: Prefix) -> int:
        return self.tree.internals.nodes.index[self.keys(prefix)[-1]]

    def places_of(self, rows: NodeIds, group: int) -> list[PageAt]:
        prefix_at = {
            row: self.prefix_of[key] for key, row in self.tree.internals.nodes.index.items()
        }
        return [(prefix_at[row], group) for row in rows.tolist()]


def _nobody_stands_there(places: Sequence[PageAt], ended: Sequence[HostHold]) -> None:
    del places, ended

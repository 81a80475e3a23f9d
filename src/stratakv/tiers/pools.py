"""The page spaces of both tiers, and the execution of the tree's effects on them.

Owns every way a page is taken or given back. Must not decide what is evicted (``tree``) or when to
copy (``copies``).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never

from stratakv.core.ids import GroupId, PageIds
from stratakv.memory.allocator import PageAllocator
from stratakv.spec.groups import CacheSpec
from stratakv.tiers.statistics import Counters, PoolStats
from stratakv.tree.effects import Backup, Effect, FreeDevice, FreeHost, Persist
from stratakv.tree.nodes import TIERS, Tier
from stratakv.tree.prefix_tree import PrefixTree

Allocators = Sequence[PageAllocator]
Evict = Callable[[GroupId, int], list[Effect]]


class Pools:
    """``tiers[tier][g]`` hands out the pages of group g. ``persist``: what is done with pages that
    are worth a stored object. ``evict_device``: how device pages are taken, None: coldest first."""

    def __init__(
        self,
        spec: CacheSpec,
        tree: PrefixTree,
        tiers: tuple[Allocators, Allocators],
        persist: Callable[[Persist], None],
        evict_device: Evict | None = None,
    ) -> None:
        self._spec = spec
        self._eviction = tree.eviction
        self.tiers = tiers
        self.counters = Counters()
        self._evict_device = evict_device or partial(tree.eviction.evict, Tier.DEVICE)
        self._evict_host = partial(tree.eviction.evict, Tier.HOST)
        self._persist = persist

    def execute(self, effects: Sequence[Effect]) -> list[Backup]:
        """Carry out ``effects`` in order. Returns the backups asked for, which are the write
        policy's to weigh."""
        backups: list[Backup] = []
        for effect in effects:
            match effect:
                case FreeDevice(group, pages):
                    self.tiers[Tier.DEVICE][group].free(pages)
                case FreeHost(group, pages):
                    self.tiers[Tier.HOST][group].free(pages)
                case Backup():
                    backups.append(effect)
                case Persist():
                    self._persist(effect)
                case _:
                    assert_never(effect)
        return backups

    def available(self, group: GroupId) -> int:
        """Device pages that are free or could be made free now."""
        free = self.tiers[Tier.DEVICE][group].available()
        return free + self._eviction.evictable(Tier.DEVICE, group)

    def make_room(self, tier: Tier, group: GroupId, count: int) -> int:
        """Evict once towards ``count`` free pages; returns how many are free then."""
        on_device = tier == Tier.DEVICE
        return self._make_room(
            tier, group, count, self._evict_device if on_device else self._evict_host
        )

    def make_spare_room(self, tier: Tier, group: GroupId, count: int) -> int:
        """``make_room`` from what no checkpoint needs."""
        return self._make_room(tier, group, count, partial(self._eviction.evict_spare, tier))

    def _make_room(self, tier: Tier, group: GroupId, count: int, evict: Evict) -> int:
        space = self.tiers[tier][group]
        short = count - space.available()
        if short > 0:
            dirty, cold = self._eviction.dropped_dirty, self._eviction.dropped_cold
            effects = evict(group, short)
            self.counters.dropped_dirty_pages += self._eviction.dropped_dirty - dirty
            self.counters.dropped_cold_pages += self._eviction.dropped_cold - cold
            taken = sum(
                len(effect.pages) for effect in effects if isinstance(effect, FreeDevice | FreeHost)
            )
            if tier == Tier.DEVICE:
                self.counters.evicted_device_pages += taken
            else:
                self.counters.evicted_host_pages += taken
            self.execute(effects)
        return space.available()

    def take(self, group: GroupId, count: int, wait: Callable[[], bool]) -> PageIds:
        """Device pages that admission has promised. Where a copy in flight still holds one back,
        ``wait`` for it; it says False when nothing is in flight any more."""
        while True:
            self.make_room(Tier.DEVICE, group, count)
            pages = self.tiers[Tier.DEVICE][group].alloc(count)
            if pages is not None:
                return pages
            self.counters.copy_waits += 1
            assert wait(), f"admission promised {count} pages of group {group}"

    def stats(self) -> tuple[PoolStats, ...]:
        return tuple(
            PoolStats(
                group=group.name,
                tier=tier.name.lower(),
                total=self.tiers[tier][group.id].capacity,
                free=self.tiers[tier][group.id].available(),
                evictable=self._eviction.evictable(tier, group.id),
            )
            for tier in TIERS
            for group in self._spec.groups
        )

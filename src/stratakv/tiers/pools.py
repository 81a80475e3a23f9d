"""The page spaces of both tiers, and the execution of the tree's effects on them.

Owns every way a page is taken or given back. Must not decide what is evicted (``tree``) or when to
copy (``copies``).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never

import numpy as np

from stratakv.core.ids import NONE, GroupId, PageIds
from stratakv.memory.allocator import PageAllocator
from stratakv.spec.groups import CacheSpec
from stratakv.tiers.statistics import Counters, PoolStats
from stratakv.tree.effects import Backup, Effect, FreeDevice, FreeHost, Persist
from stratakv.tree.nodes import TIERS, Tier
from stratakv.tree.prefix_tree import PrefixTree

Allocators = Sequence[PageAllocator]
Evict = Callable[[GroupId, int], list[Effect]]


def check_pages(
    verb: str,
    pages: Sequence[PageIds],
    lengths: Sequence[int],
    capacity: Sequence[int],
    what: str,
) -> None:
    """ValueError unless ``pages`` are ``lengths[g]`` pages of each group g as int32, each below
    ``capacity[g]`` or NONE. ``what`` they are is for the error."""
    if len(pages) != len(lengths):
        raise ValueError(f"{verb}: pages of {len(pages)} groups for {len(lengths)}")
    for group, (mine, length) in enumerate(zip(pages, lengths, strict=True)):
        if not isinstance(mine, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance] - from outside
            raise ValueError(
                f"{verb}: group {group} takes an int32 array, this is a {type(mine).__name__}"
            )
        if mine.dtype != np.int32:
            raise ValueError(f"{verb}: group {group} takes pages as int32, these are {mine.dtype}")
        if mine.shape != (length,):
            shape = list(mine.shape)
            raise ValueError(f"{verb}: group {group} takes {length} pages, these are {shape}")
        if length and (mine - NONE).view(np.uint32).max() > capacity[group]:
            taken, has = mine[mine != NONE], capacity[group]
            there = f"0 to {has - 1}" if has else "none"
            raise ValueError(
                f"{verb}: group {group} has {what} {there}, not {taken.min()} to {taken.max()}"
            )


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
        self._evict_spare_device = tree.write_back.evict_spare
        self._evict_spare_host = partial(tree.eviction.evict_spare, Tier.HOST)
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

    def evictable(self, tier: Tier, group: GroupId) -> int:
        """Pages of a tier that nothing pins."""
        return self._eviction.evictable(tier, group)

    def make_room(self, tier: Tier, group: GroupId, count: int) -> int:
        """Evict once towards ``count`` free pages; returns how many are free then."""
        on_device = tier == Tier.DEVICE
        return self._make_room(
            tier, group, count, self._evict_device if on_device else self._evict_host
        )

    def push_out(self, tier: Tier) -> None:
        """Take everything that nothing pins off a tier; what the tier below has of it stays."""
        for group in reversed(self._spec.groups):
            self.make_room(tier, group.id, self.tiers[tier][group.id].capacity)

    def unowned(self, tier: Tier, group: GroupId) -> PageIds:
        """Pages that are nobody's, int32."""
        space = self.tiers[tier][group]
        return space.next(space.capacity).copy()

    def make_spare_room(self, tier: Tier, group: GroupId, count: int) -> int:
        """``make_room`` that costs no checkpoint."""
        on_device = tier == Tier.DEVICE
        return self._make_room(
            tier, group, count, self._evict_spare_device if on_device else self._evict_spare_host
        )

    def _make_room(self, tier: Tier, group: GroupId, count: int, evict: Evict) -> int:
        space = self.tiers[tier][group]
        short = count - space.available()
        if short > 0:
            dirty, cold = self._eviction.dropped_dirty, self._eviction.dropped_cold
            effects = evict(group, short)
            self.counters.add(dropped_dirty_pages=self._eviction.dropped_dirty - dirty)
            self.counters.add(dropped_cold_pages=self._eviction.dropped_cold - cold)
            taken = sum(
                len(effect.pages) for effect in effects if isinstance(effect, FreeDevice | FreeHost)
            )
            if tier == Tier.DEVICE:
                self.counters.add(evicted_device_pages=taken)
            else:
                self.counters.add(evicted_host_pages=taken)
            self.execute(effects)
        return space.available()

    def take(
        self, group: GroupId, count: int, wait: Callable[[], bool], tier: Tier = Tier.DEVICE
    ) -> PageIds:
        """Pages that admission has promised. Where a copy in flight still holds one back, ``wait``
        for it; it returns False when nothing is in flight any more."""
        while True:
            self.make_room(tier, group, count)
            pages = self.tiers[tier][group].alloc(count)
            if pages is not None:
                return pages
            self.counters.add(copy_waits=1)
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

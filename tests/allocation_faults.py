"""Pages that are not there, at every moment at which somebody asks for some.

``Faults(parts, kind, nth)`` counts the chances of an engine to run short, by what asks for pages of
which group, and lets it run short once, at the chance of that kind and number. Where a caller has
just seen that there are free pages, or was promised some, nothing can take them away in between;
there the shortage is what it can be: seen beforehand, or pages that a copy in flight still holds
for a moment. A request that is alone is not refused.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from stratakv.assembly.models import EngineParts
from stratakv.cache.footprint import Footprint
from stratakv.core.ids import GroupId
from stratakv.policy.prefetch import HostSpace
from stratakv.tree.lease import DeviceLease
from stratakv.tree.nodes import TIERS, Tier

Wrapped = Callable[..., Any]


class Faults:
    """``seen``: the chances so far; ``hit``: whether it has run short."""

    def __init__(self, parts: EngineParts, kind: str, nth: int) -> None:
        self._parts = parts
        self._cache = cache = parts.cache
        self._chosen = kind, nth
        self.seen: Counter[str] = Counter()
        self.hit = False
        self._sure = 0
        self._held_by_a_copy = False
        self._short: set[tuple[Tier, int]] = set()
        for tier in TIERS:
            for group, space in enumerate(cache.tiers.pools.tiers[tier]):
                self._wrap(space, "alloc", partial(self._alloc, tier, group))
                self._wrap(space, "available", partial(self._available, tier, group))
        prefetcher = cache.storage.prefetcher
        self._wrap(cache.tiers.pools, "take", self._take)
        self._wrap(cache.tiers.pools, "available", self._evictable)
        self._wrap(cache.tiers.copies.backups, "_begin_rows", self._begin_backup)
        self._wrap(cache.retraction, "_room", self._room_to_retract)
        self._wrap(cache.retraction, "_save", self._surely)
        self._wrap(cache._live, "give", self._give)
        self._wrap(cache.admission, "_price", self._price)
        self._wrap(cache.admission, "resume", self._resume)
        self._wrap(cache._tables, "open_row", self._open_row)
        self._wrap(cache, "fits", self._fits)
        self._wrap(prefetcher._fetches, "room", self._room_to_fetch)
        self._wrap(prefetcher._fetches, "make_room", self._make_room_to_fetch)

    def _wrap(self, owner: object, name: str, instead: Wrapped) -> None:
        setattr(owner, name, partial(instead, getattr(owner, name)))

    def _due(self, what: str) -> bool:
        if self._sure:
            return False
        due = (what, self.seen[what]) == self._chosen
        self.seen[what] += 1
        self.hit |= due
        return due

    @contextmanager
    def _without(self, tier: Tier, group: int) -> Iterator[None]:
        """Pages of a group are all taken, for as long as this lasts."""
        self._short.add((tier, group))
        yield
        self._short.clear()

    @property
    def _alone(self) -> bool:
        return not len(self._parts.engine._running) and not self._cache.progress.busy

    # -- the allocators --------------------------------------------------------------------------

    def _alloc(self, tier: Tier, group: int, right: Wrapped, count: int):
        if (tier, group) in self._short:
            return None if count else right(count)
        if count and self._due(f"alloc {tier.name} {group}"):
            self._held_by_a_copy = True
            return None
        return right(count)

    def _available(self, tier: Tier, group: int, right: Wrapped) -> int:
        return 0 if (tier, group) in self._short else right()

    def _evictable(self, right: Wrapped, group: GroupId) -> int:
        return 0 if (Tier.DEVICE, group) in self._short else right(group)

    def _take(self, right: Wrapped, group: GroupId, count: int, wait: Callable[[], bool]):
        """What was promised comes, at the latest when a copy has ended."""

        def ended() -> bool:
            if self._held_by_a_copy:
                self._held_by_a_copy = False
                return True
            return wait()

        return right(group, count, ended)

    # -- what asks them --------------------------------------------------------------------------

    def _surely(self, right: Wrapped, *arguments):
        self._sure += 1
        try:
            return right(*arguments)
        finally:
            self._sure -= 1

    def _begin_backup(self, right: Wrapped, group: GroupId, rows):
        if len(rows) and self._due(f"backup {group}"):
            with self._without(Tier.HOST, group):
                return right(group, rows)
        return self._surely(right, group, rows)

    def _room_to_retract(self, right: Wrapped, lease: DeviceLease, need: Footprint) -> bool:
        for group in range(len(need.starts)):
            if self._due(f"retract {group}"):
                with self._without(Tier.HOST, group):
                    return right(lease, need)
        return right(lease, need)

    def _give(self, right: Wrapped, *arguments, **ends):
        for group in self._cache._live.groups:
            if self._due(f"snapshot {group}"):
                with self._without(Tier.DEVICE, group):
                    return right(*arguments, **ends)
        return right(*arguments, **ends)

    def _price(self, right: Wrapped, *arguments):
        if not self._alone and self._due("admit"):
            return None
        return right(*arguments)

    def _resume(self, right: Wrapped, *arguments):
        return (self._surely if self._alone else _plainly)(right, *arguments)

    def _open_row(self, right: Wrapped):
        if not self._alone and self._due("row"):
            return None
        return right()

    def _fits(self, right: Wrapped, starts, ends) -> bool:
        if len(self._parts.engine._running) > 1 and self._due("growth"):
            return False
        return right(starts, ends)

    def _room_to_fetch(self, right: Wrapped) -> HostSpace:
        room = right()
        for group in range(len(room.free)):
            if self._due(f"fetch {group}"):
                return HostSpace(_zeroed(room.free, group), _zeroed(room.evictable, group))
        return room

    def _make_room_to_fetch(self, right: Wrapped, pages):
        for group in range(len(pages)):
            if self._due(f"room for a fetch {group}"):
                with self._without(Tier.HOST, group):
                    return right(pages)
        return right(pages)


def _plainly(right: Wrapped, *arguments):
    return right(*arguments)


def _zeroed(pages: tuple[int, ...], group: int) -> tuple[int, ...]:
    return tuple(0 if at == group else count for at, count in enumerate(pages))

"""Pages that are not there, at every moment at which somebody asks for some.

``Faults(parts, tables, kind, nth)`` counts the chances of an engine to run short, by what asks for
pages of which group, and lets it run short once, at the chance of that kind and number. Where a
caller has just seen that there are free pages, or was promised some, nothing can take them away in
between; there the shortage is what it can be: seen when it looks, and there until it is done, or
pages that a copy in flight still holds for a moment. A request that is alone is not refused.

It wraps public verbs alone: those of the allocators, and those from which they are asked.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from stratakv.assembly.models import EngineParts
from stratakv.core.ids import GroupId
from stratakv.memory.block_table import BlockTable
from stratakv.spec.groups import ANCHOR
from stratakv.tree.nodes import TIERS, Tier

Wrapped = Callable[..., Any]

LOOKS: Final = {
    "backup": Tier.HOST,
    "retract": Tier.HOST,
    "fetch": Tier.HOST,
    "snapshot": Tier.DEVICE,
}
"""Who looks how many pages there are, and acts on it, and where."""
PROMISED: Final = frozenset({"backup", "retract"})
"""Who takes no more than it has seen, and counts on it."""


class Faults:
    """``seen``: the chances so far; ``hit``: whether it has run short. ``tables``: the engine's."""

    def __init__(self, parts: EngineParts, tables: BlockTable, kind: str, nth: int) -> None:
        self._parts = parts
        self._cache = cache = parts.cache
        self._chosen = kind, nth
        self.seen: Counter[str] = Counter()
        self.hit = False
        self._sure = 0
        self._asks = ""
        self._held_by_a_copy = False
        self._short: set[tuple[Tier, int]] = set()
        for tier in TIERS:
            for group, space in enumerate(cache.tiers.pools.tiers[tier]):
                self._wrap(space, "alloc", partial(self._alloc, tier, group))
                self._wrap(space, "available", partial(self._available, tier, group))
        self._wrap(cache.tiers.tree.eviction, "evictable", self._evictable)
        self._wrap(cache.tiers.pools, "take", self._take)
        self._wrap(cache.tiers.pools, "available", self._for_admission)
        backups = cache.tiers.copies.backups
        for owner, verb, what in (
            (backups, "begin", "backup"),
            (backups, "clean", "backup"),
            (cache.retraction, "retract", "retract"),
            (cache.storage.prefetcher, "queried", "fetch"),
            (cache, "commit", "snapshot"),
            (cache.admission, "admit", "admit"),
        ):
            self._wrap(owner, verb, partial(self._asking, what))
        self._wrap(backups, "save", self._surely)
        self._wrap(cache.admission, "resume", self._resume)
        self._wrap(tables, "open_row", self._open_row)
        self._wrap(cache, "fits", self._fits)

    def _wrap(self, owner: object, name: str, instead: Wrapped) -> None:
        setattr(owner, name, partial(instead, getattr(owner, name)))

    def _due(self, what: str) -> bool:
        if self._sure:
            return False
        due = (what, self.seen[what]) == self._chosen
        self.seen[what] += 1
        self.hit |= due
        return due

    @property
    def _running(self) -> int:
        return self._parts.engine.stats().running

    @property
    def _alone(self) -> bool:
        return not self._running and not self._cache.progress.busy

    # -- the allocators --------------------------------------------------------------------------

    def _alloc(self, tier: Tier, group: int, right: Wrapped, count: int):
        if (tier, group) in self._short:
            return None if count else right(count)
        chance = count and self._asks not in PROMISED
        if chance and self._due(f"alloc {tier.name} {group}"):
            self._held_by_a_copy = True
            return None
        return right(count)

    def _available(self, tier: Tier, group: int, right: Wrapped) -> int:
        if LOOKS.get(self._asks) == tier and self._due(f"{self._asks} {group}"):
            self._short.add((tier, group))
        return 0 if (tier, group) in self._short else right()

    def _evictable(self, right: Wrapped, tier: Tier, group: GroupId) -> int:
        return 0 if (tier, group) in self._short else right(tier, group)

    def _take(self, right: Wrapped, group: GroupId, count: int, wait: Callable[[], bool]):
        """What was promised comes, at the latest when a copy has ended."""

        def ended() -> bool:
            if self._held_by_a_copy:
                self._held_by_a_copy = False
                return True
            return wait()

        return right(group, count, ended)

    # -- what asks them --------------------------------------------------------------------------

    def _asking(self, what: str, right: Wrapped, *arguments):
        """What is short now is so until this is over."""
        before = self._asks, self._short
        self._asks, self._short = what, set(self._short)
        try:
            return right(*arguments)
        finally:
            self._asks, self._short = before

    def _surely(self, right: Wrapped, *arguments):
        self._sure += 1
        try:
            return right(*arguments)
        finally:
            self._sure -= 1

    def _for_admission(self, right: Wrapped, group: GroupId) -> int:
        """Refused once, so that it may come in with less than it has asked for first."""
        asked = self._asks == "admit" and group == ANCHOR
        return 0 if asked and not self._alone and self._due("admit") else right(group)

    def _resume(self, right: Wrapped, *arguments):
        back = partial(self._asking, "admit", right)
        return self._surely(back, *arguments) if self._alone else back(*arguments)

    def _open_row(self, right: Wrapped):
        if not self._alone and self._due("row"):
            return None
        return right()

    def _fits(self, right: Wrapped, starts, ends) -> bool:
        if self._running > 1 and self._due("growth"):
            return False
        return right(starts, ends)

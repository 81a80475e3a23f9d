"""How old cached pages grow: their time on a tier, idle before they leave, and between two uses.

Owns these times, in seconds, of every page of a tree, and their sums. A few array operations for
each path that moves; must not be read by any decision.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.clock import Clock
from stratakv.core.ids import GroupId, NodeIds
from stratakv.spec.groups import CacheSpec
from stratakv.tiers.statistics import AGE_BOUNDS_S, AgeCounts, PageAgeStats
from stratakv.tree.nodes import TIERS, Tier
from stratakv.tree.residency import EVICTED, ResidencyEvent

Seconds = npt.NDArray[np.float64]
BOUNDS: Final = np.array(AGE_BOUNDS_S)
FOLDED: Final = 4096
"""Ages that wait to be counted, at most: counting them together costs less."""
ENTERED: Final = {
    ResidencyEvent.INSERTED: Tier.DEVICE,
    ResidencyEvent.LOAD_BEGUN: Tier.DEVICE,
    ResidencyEvent.FETCHED: Tier.HOST,
    ResidencyEvent.SAVED: Tier.HOST,
    ResidencyEvent.BACKUP_BEGUN: Tier.HOST,
}
LEFT: Final = {EVICTED[tier]: tier for tier in TIERS}
NEW: Final = (ResidencyEvent.INSERTED, ResidencyEvent.FETCHED, ResidencyEvent.SAVED)
"""Who comes with one of these brings the page for somebody: a use."""


class _Ages:
    """Counts by bound, and their sum."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(BOUNDS) + 1, np.int64)
        self._sum_s = 0.0
        self._waiting: list[Seconds] = []
        self._count = 0

    def add(self, ages: Seconds) -> None:
        self._waiting.append(ages)
        self._count += len(ages)
        if self._count >= FOLDED:
            self._fold()

    def _fold(self) -> None:
        if not self._waiting:
            return
        ages = np.concatenate(self._waiting)
        self._counts += np.bincount(np.searchsorted(BOUNDS, ages), minlength=len(BOUNDS) + 1)
        self._sum_s += float(ages.sum())
        self._waiting, self._count = [], 0

    def counts(self, tier: str, group: str) -> AgeCounts:
        self._fold()
        return AgeCounts(tier, group, tuple(self._counts.tolist()), self._sum_s)


class PageAges:
    """A ``PageWatcher`` of a tree of at most ``rows`` nodes."""

    def __init__(self, spec: CacheSpec, rows: int, clock: Clock) -> None:
        self._names = [group.name for group in spec.groups]
        self._clock = clock
        groups = range(len(self._names))
        self._entered_s = [[np.zeros(rows) for _ in groups] for _ in TIERS]
        self._used_s = [np.zeros(rows) for _ in groups]
        self._lifetime = [[_Ages() for _ in groups] for _ in TIERS]
        self._idle = [[_Ages() for _ in groups] for _ in TIERS]
        self._gap = [_Ages() for _ in groups]

    def moved(self, group: GroupId, rows: NodeIds, event: ResidencyEvent) -> None:
        if (left := LEFT.get(event)) is not None:
            now_s = self._clock.now_s()
            self._lifetime[left][group].add(now_s - self._entered_s[left][group][rows])
            self._idle[left][group].add(now_s - self._used_s[group][rows])
        elif (entered := ENTERED.get(event)) is not None:
            now_s = self._clock.now_s()
            self._entered_s[entered][group][rows] = now_s
            if event in NEW:
                self._used_s[group][rows] = now_s

    def used(self, group: int, rows: NodeIds, *, hit: bool) -> None:
        used_s, now_s = self._used_s[group], self._clock.now_s()
        if hit:
            self._gap[group].add(now_s - used_s[rows])
        used_s[rows] = now_s

    def stats(self) -> PageAgeStats:
        return PageAgeStats(
            lifetime=self._by_tier(self._lifetime),
            idle_before_evict=self._by_tier(self._idle),
            reuse_gap=tuple(
                ages.counts("", name) for name, ages in zip(self._names, self._gap, strict=True)
            ),
        )

    def _by_tier(self, found: Sequence[Sequence[_Ages]]) -> tuple[AgeCounts, ...]:
        return tuple(
            ages.counts(tier.name.lower(), name)
            for tier in TIERS
            for name, ages in zip(self._names, found[tier], strict=True)
        )

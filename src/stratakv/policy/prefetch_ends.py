"""At which ends storage makes a prefix usable, and what each end costs.

Owns the geometry of a prefetch: whole-path arrays over the ``needed_starts`` tables, so that no
question loops over pages and no rule has a path of its own. Pure; must not choose among ends.

All ends are in pages. Flags over ends are bool [limit + 1], flags over pages bool [limit].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import complete_ends, needed_starts

Flags: TypeAlias = npt.NDArray[np.bool_]
Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """What the tree has of a prompt, leased while a prefetch counts on it.

    ``base``: where the prefix is usable without storage, the ``end`` of a match. ``present[g][i]``:
    page i of group g is on a tier that a load can use. Their length is the last end that the
    request can use, which leaves one token to compute.
    """

    base: int
    present: tuple[Flags, ...]

    @property
    def limit(self) -> int:
        return len(self.present[0])


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """Pages of groups, one storage object each, shallowest page first: object i is page
    ``pages[i]`` of group ``groups[i]``; int64 [n]."""

    groups: Int64s
    pages: Int64s

    def flags(self, among: Flags, groups: int, limit: int) -> tuple[Flags, ...]:
        """The objects that ``among`` (bool [n]) marks, as flags over pages by group."""
        marked = np.zeros((groups, limit), np.bool_)
        marked[self.groups[among], self.pages[among]] = True
        return tuple(marked)


@dataclass(frozen=True, slots=True, eq=False)
class FetchPlan:
    """What ``end`` takes. ``allocate[g]``: the page indices of group g that need a host page, also
    of a group without bytes; ``objects``: those of them that storage must deliver. ``first``: the
    shallowest page of any group, at which ``PrefixTree.land`` begins."""

    end: int
    first: int
    allocate: tuple[Int64s, ...]
    objects: Objects


class Ends:
    """The tables of one spec, grown to the longest prompt seen. ``stored``: what storage has, or
    has delivered, of the pages that it was asked for."""

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self._groups = range(len(spec.groups))
        self._with_bytes = tuple(group.page_bytes > 0 for group in spec.groups)
        self._tables: list[Int64s] = []
        self._grow(64)

    def _grow(self, ends: int) -> None:
        page = self._spec.page_tokens
        self._tables = [needed_starts(g.retention, page, ends) for g in self._spec.groups]

    def _starts(self, limit: int) -> list[Int64s]:
        """First page that each group needs at every end of [0, limit]."""
        if limit >= len(self._tables[0]):
            self._grow(2 * limit)
        return [table[: limit + 1] for table in self._tables]

    def question(self, held: CachedPrefix) -> Objects:
        """What to ask storage for: every page that the tree lacks and some end beyond ``base``
        needs."""
        starts, first = self._starts(held.limit), held.base + 1
        wanted: list[Flags] = []
        for group in self._groups:
            # +1 where the pages of an end begin, -1 behind them: positive is "some end needs it".
            steps = np.zeros(held.limit + 1, np.int64)
            np.add.at(steps, starts[group][first:], 1)
            steps[first:] -= 1
            some = np.cumsum(steps[:-1]) > 0
            wanted.append(some & ~held.present[group] & self._with_bytes[group])
        return _objects(wanted)

    def usable(self, held: CachedPrefix, stored: Sequence[Flags]) -> Flags:
        """The ends beyond ``base`` at which every group has what it needs, in the tree or among
        ``stored``. What has no bytes is never missing."""
        usable = np.ones(held.limit + 1, np.bool_)
        for group in self._groups:
            usable &= self._complete(held, stored, group)
        usable[: held.base + 1] = False
        return usable

    def known(self, held: CachedPrefix, stored: Sequence[Flags]) -> int:
        """How far the prefix is known to have been computed before: a page's key names all that is
        above it."""
        ends = ((held.present[group] | stored[group]).nonzero()[0] for group in self._groups)
        return max((int(pages[-1]) + 1 for pages in ends if len(pages)), default=0)

    def blockers(self, held: CachedPrefix, stored: Sequence[Flags], end: int) -> list[int]:
        """The groups that lack something at ``end``."""
        return [group for group in self._groups if not self._complete(held, stored, group)[end]]

    def _complete(self, held: CachedPrefix, stored: Sequence[Flags], group: int) -> Flags:
        if not self._with_bytes[group]:
            return np.ones(held.limit + 1, np.bool_)
        starts = self._starts(held.limit)[group]
        return complete_ends(starts, held.present[group] | stored[group])

    def stored_end(self, held: CachedPrefix, stored: Sequence[Flags], usable: Flags) -> int:
        """How far storage takes the prefix at best, whether it can be used there or not: as far as
        the groups that keep all go without a hole, but not beyond the last page that storage has
        and the tree lacks. ``base`` where storage adds nothing."""
        reach, last = held.limit, held.base
        for group in self._groups:
            if not self._with_bytes[group]:
                continue
            fresh = np.flatnonzero(stored[group] & ~held.present[group])
            last = max(last, int(fresh[-1]) + 1) if len(fresh) else last
            if self._spec.groups[group].keeps_all:
                holes = np.flatnonzero(~(stored[group] | held.present[group]))
                reach = min(reach, int(holes[0])) if len(holes) else reach
        return max(held.base, min(reach, last), last_of(usable))

    def costs(self, held: CachedPrefix) -> Int64s:
        """Host pages that each end needs and the tree lacks, by group; int64 [groups, limit + 1].
        A page without bytes is a page of its group's space too."""
        costs = np.zeros((len(self._groups), held.limit + 1), np.int64)
        for group, starts in enumerate(self._starts(held.limit)):
            absent = np.zeros(held.limit + 1, np.int64)
            np.cumsum(~held.present[group], out=absent[1:])
            costs[group] = absent - absent[starts]
        return costs

    def plan(self, held: CachedPrefix, end: int) -> FetchPlan:
        starts = self._starts(held.limit)
        lacking = [np.zeros(held.limit, np.bool_) for _ in self._groups]
        for group in self._groups:
            needed = slice(int(starts[group][end]), end)
            lacking[group][needed] = ~held.present[group][needed]
        with_bytes = [pages & there for pages, there in zip(lacking, self._with_bytes, strict=True)]
        allocate = tuple(np.flatnonzero(pages) for pages in lacking)
        first = min((int(pages[0]) for pages in allocate if len(pages)), default=end)
        return FetchPlan(end, first, allocate, _objects(with_bytes))

    def kept(self, held: CachedPrefix, plan: FetchPlan, end: int) -> tuple[Flags, ...]:
        """Which pages of ``plan.allocate`` a landing at ``end`` needs; the others are freed."""
        starts = self._starts(held.limit)
        return tuple(
            (pages >= starts[group][end]) & (pages < end)
            for group, pages in enumerate(plan.allocate)
        )


def last_of(flags: Flags) -> int:
    """The largest end that is marked; 0 if none is."""
    marked = np.flatnonzero(flags)
    return int(marked[-1]) if len(marked) else 0


def _objects(wanted: Sequence[Flags]) -> Objects:
    """By page, then group: what has arrived at any moment then goes as far as it can."""
    pages, groups = np.nonzero(np.stack(wanted, axis=1))
    return Objects(groups, pages)

"""Host pages that a fetch fills: taken before it, handed to the tree or given back after it.

Owns these two steps; whoever submits the fetch owns the pages in between. Must not decide how much
to fetch or to land (``policy.prefetch``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, GroupId, PageIds, PageKey
from stratakv.policy.prefetch import HostSpace, Landed
from stratakv.policy.prefetch_ends import FetchPlan
from stratakv.policy.prefetch_reasons import Arrivals, FetchOutcome
from stratakv.storage.backend import ReadStatus
from stratakv.storage.io_jobs import Ending, Fetched
from stratakv.tiers.object_keys import HostBytes
from stratakv.tiers.pools import Pools
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree

_ARRIVALS: Final = {
    ReadStatus.HIT: FetchOutcome.ARRIVED,
    ReadStatus.MISS: FetchOutcome.MISSED,
    ReadStatus.CORRUPT: FetchOutcome.CORRUPT,
    ReadStatus.FAILED: FetchOutcome.FAILED,
}


@dataclass(frozen=True, slots=True, eq=False)
class FromStorage:
    """What a request's prefetch has landed: pages [base, end) of the prefix were not usable before;
    ``pages[g]``: the page indices of group g that came, int64."""

    base: int
    end: int
    pages: tuple[npt.NDArray[np.int64], ...]


def nobody_reads() -> None:
    """Where no step reads host pages."""


class Fetches:
    """``wait_for_readers``: returns when nobody reads host pages any more that were freed before; a
    store, which fills them, waits for nobody."""

    def __init__(
        self,
        tree: PrefixTree,
        pools: Pools,
        arenas: Sequence[HostBytes],
        wait_for_readers: Callable[[], None] = nobody_reads,
    ) -> None:
        self._wait_for_readers = wait_for_readers
        self._tree = tree
        self._pools = pools
        self._host = pools.tiers[Tier.HOST]
        self._arenas = arenas

    def room(self) -> HostSpace:
        groups = range(len(self._host))
        return HostSpace(
            tuple(space.available() for space in self._host),
            tuple(self._tree.eviction.evictable(Tier.HOST, GroupId(group)) for group in groups),
        )

    def make_room(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Evict once towards ``pages`` free ones of every group; how many are free then."""
        for group, count in enumerate(pages):
            self._pools.make_room(Tier.HOST, GroupId(group), count)
        return tuple(space.available() for space in self._host)

    def allocate(self, plan: FetchPlan) -> tuple[PageIds, ...] | None:
        """Host pages for all of ``plan``, by group, or none. They may be written at once."""
        taken: list[PageIds] = []
        for space, wanted in zip(self._host, plan.allocate, strict=True):
            pages = space.alloc(len(wanted))
            if pages is None:
                self.free(taken)
                return None
            taken.append(pages)
        self._wait_for_readers()
        return tuple(taken)

    def free(self, pages: Sequence[PageIds]) -> None:
        """Pages of the first ``len(pages)`` groups are nobody's."""
        for group, some in enumerate(pages):
            self._host[group].free(some)

    def buffers(self, plan: FetchPlan, pages: Sequence[PageIds]) -> list[memoryview]:
        """Where each of ``plan.objects`` goes."""
        by_group = [
            iter(arena.views(mine)) for arena, mine in zip(self._arenas, pages, strict=True)
        ]
        # Of each group the objects are in the order of its pages.
        return list(map(next, map(by_group.__getitem__, plan.objects.groups.tolist())))

    def land(self, keys: Sequence[PageKey], landed: Landed, mine: Sequence[PageIds]) -> FromStorage:
        """Hand what ``landed`` keeps of ``mine`` to the tree, below pages that are held."""
        plan, end = landed.plan, landed.end
        first = min(plan.first, end)
        columns: list[PageIds] = []
        came: list[npt.NDArray[np.int64]] = []
        for group, keep in enumerate(landed.keep):
            at, pages = plan.allocate[group], mine[group]
            column = np.full(end - first, NONE, np.int32)
            column[at[keep] - first] = pages[keep]
            columns.append(column)
            came.append(at[keep])
            self._host[group].free(pages[~keep])
        self._pools.execute(self._tree.land(keys[:end], first, columns))
        return FromStorage(landed.tally.base, end, tuple(came))


def arrivals_of(answer: Fetched, objects: int) -> Arrivals:
    """What became of each object; those behind the last status were not tried, or could not be."""
    failed = answer.ending in {Ending.FAILED, Ending.OFF}
    rest = FetchOutcome.FAILED if failed else FetchOutcome.NOT_TRIED
    arrivals = np.full(objects, rest, np.uint8)
    statuses = list(answer.statuses)
    if statuses.count(ReadStatus.HIT) == objects:  # as a rule; an Enum's hash is slow
        return np.zeros(objects, np.uint8)
    arrivals[: len(statuses)] = [_ARRIVALS[status] for status in statuses]
    return arrivals

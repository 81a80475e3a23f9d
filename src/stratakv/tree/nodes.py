"""The nodes: one page of one prefix each, as rows of arrays, in runs.

Owns the page index, the parent links, the runs and every column. A run is a chain of nodes that
shares one array of rows, so a path is a few slices. Must not decide anything: what may be matched,
pinned or evicted is for the modules beside it.

Row -1, the last element of every column, stands for the root: ``parent`` of a first page is -1 and
indexing with it needs no special case.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stratakv.core.clock import NowS, never
from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, PageKey
from stratakv.spec.groups import CacheSpec
from stratakv.tree.gone import Gone
from stratakv.tree.journal import Journal
from stratakv.tree.observer import CacheObserver, PageWatcher
from stratakv.tree.path_columns import DEFAULT_PATH_COLUMNS, TIER_BITS, MakePathColumns, PathColumns
from stratakv.tree.residency import Moved, ResidencyColumn

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]


class Tier(IntEnum):
    """Indexes the per-tier columns."""

    DEVICE = 0
    HOST = 1


CHECKPOINT: Final = 1 << 32
MILESTONE: Final = 1
"""What each adds to the need of a page: nobody has so many milestones that they look like one."""
ANY: Final = 2
"""Third of ``kids``, whose first are the tiers': children whose anchor is on either tier."""
TIERS: Final = (Tier.DEVICE, Tier.HOST)


@dataclass(slots=True, eq=False)
class Run:
    """``rows[:len(keys)]`` is a chain, top first; page ``start`` of the prefix is ``rows[0]``, and
    hangs under ``parent``, a row of the run ``above``."""

    rows: NodeIds
    keys: list[PageKey]
    parent: int
    start: int
    above: "Run | None"


class NodeTable:
    """Columns of every node. ``groups`` columns are lists indexed by group, ``[tier][group]`` first
    by tier. Capacity is exact: a node exists only while its anchor owns a page."""

    def __init__(
        self,
        spec: CacheSpec,
        capacity: int,
        observer: CacheObserver | None = None,
        watcher: PageWatcher | None = None,
        now_s: NowS = never,
        path_columns: MakePathColumns = DEFAULT_PATH_COLUMNS,
    ) -> None:
        groups = range(len(spec.groups))
        size = capacity + 1  # the root's row
        self.capacity = capacity
        self.index: dict[PageKey, int] = {}
        self.gone = Gone(capacity, now_s)
        # When a page of a group left a tier, while its node stayed; 0: never. For figures alone.
        self.now_s = now_s
        self.left_s: list[list[Float64s]] = [[np.zeros(size) for _ in groups] for _ in TIERS]
        self.parent: NodeIds = np.full(size, NONE, np.intp)
        self.depth: Int32s = np.full(size, NONE, np.int32)  # page index in the prefix
        self.kids: list[Int32s] = [np.zeros(size, np.int32) for _ in (*TIERS, ANY)]
        self.hits: Int32s = np.zeros(size, np.int32)
        self.priority: Int32s = np.zeros(size, np.int32)  # of any request that used it, the highest
        self._journal = None if observer is None else Journal(size, observer)
        self.residency = [
            ResidencyColumn(size, self._moved(GroupId(group), watcher)) for group in groups
        ]
        self.state = [column.states for column in self.residency]
        self.page = [[np.full(size, NONE, np.int32) for _ in groups] for _ in TIERS]
        self.pins = [[np.zeros(size, np.int32) for _ in groups] for _ in TIERS]
        self.rank: list[Int64s] = [np.zeros(size, np.int64) for _ in groups]
        # Who needs the page: CHECKPOINT for each checkpoint, MILESTONE for each milestone. A group
        # that keeps all needs each of its pages for good.
        whole = [group.keeps_all * CHECKPOINT for group in spec.groups]
        self.need: list[Int64s] = [np.full(size, need, np.int64) for need in whole]
        self.ticket = [np.full(size, NONE, np.int64) for _ in groups]  # load that is landing it
        self.checkpoint: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.milestone: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)
        device, host = self.pins
        self.paths: PathColumns = path_columns(
            self.hits, device, host, self.rank, self.need, self.state, TIER_BITS
        )
        self._run_of: Int32s = np.full(size, NONE, np.int32)
        self._runs: dict[int, Run] = {}
        self._next_run = 0
        self._depths: Int32s = np.arange(size, dtype=np.int32)
        self._free: NodeIds = np.arange(capacity - 1, -1, -1, dtype=np.intp)
        self._free_rows = capacity

    def _moved(self, group: GroupId, watcher: PageWatcher | None) -> tuple[Moved, ...]:
        """Who is notified of a group's moves."""
        found = [] if self._journal is None else [self._journal.of_group(group)]
        if watcher is not None:
            found.append(partial(watcher.moved, group))
        return tuple(found)

    def __len__(self) -> int:
        return self.capacity - self._free_rows

    # -- paths -------------------------------------------------------------------------------

    def path(self, tip: int) -> NodeIds:
        """Rows from page 0 down to ``tip``; [depth + 1]. May be a view: read, do not keep
        past a change of the tree unless the path is pinned."""
        return self.tail(tip, self.depth.item(tip) + 1)

    def tail(self, tip: int, count: int) -> NodeIds:
        """The last ``count`` rows of the path to ``tip``, top first."""
        if not count:
            return np.empty(0, np.intp)
        run = self._runs[self._run_of.item(tip)]
        stop = self.depth.item(tip) - run.start + 1
        if count <= stop:
            return run.rows[stop - count : stop]
        rows = np.empty(count, np.intp)
        while count > stop:
            rows[count - stop : count] = run.rows[:stop]
            count -= stop
            above = run.above
            assert above is not None, "the path is shorter"
            run, stop = above, run.start - above.start
        rows[:count] = run.rows[stop - count : stop]
        return rows

    def keys_to(self, tip: int, count: int) -> list[PageKey]:
        """Keys of ``tail(tip, count)``."""
        parts: list[list[PageKey]] = []
        while count > 0:
            run = self._runs[self._run_of.item(tip)]
            stop = self.depth.item(tip) - run.start + 1
            parts.append(run.keys[max(0, stop - count) : stop])
            count -= len(parts[-1])
            tip = run.parent
        return [key for part in reversed(parts) for key in part]

    def reach(self, keys: Sequence[PageKey], low: int, high: int) -> int:
        """Largest n in [low, high] with page n - 1 in the tree (presence is prefix-closed)."""
        index = self.index
        if high <= low or keys[high - 1] in index:
            return max(low, high)
        if keys[low] not in index:  # as a rule nothing of a new turn is there
            return low
        high -= 1
        while low < high:
            middle = (low + high + 1) >> 1
            if keys[middle - 1] in index:
                low = middle
            else:
                high = middle - 1
        return low

    def segment(self, row: int) -> NodeIds:
        """The part of ``row``'s run that ends with it: what becomes evictable after its child."""
        run = self._runs[self._run_of.item(row)]
        return run.rows[: self.depth.item(row) - run.start + 1]

    def by_run(self, rows: NodeIds) -> list[NodeIds]:
        """``rows``, in no order, as parts of single paths, top first."""
        if not len(rows):
            return []
        rows = rows[np.lexsort((self.depth[rows], self._run_of[rows]))]
        return np.split(rows, np.flatnonzero(np.diff(self._run_of[rows])) + 1)

    # -- shape -------------------------------------------------------------------------------

    def grow(self, tier: Tier, parent: int, keys: Sequence[PageKey]) -> NodeIds:
        """Hang a chain of new nodes under ``parent`` (NONE: the root) whose anchor enters ``tier``;
        its pages and residency are the caller's to set."""
        count = len(keys)
        assert count <= self._free_rows, "more nodes than anchor pages"
        self._free_rows -= count
        rows = self._free[self._free_rows : self._free_rows + count][::-1].copy()
        self.index.update(zip(keys, rows.tolist(), strict=True))
        start = self.depth.item(parent) + 1
        self.depth[rows] = self._depths[start : start + count]
        above = rows[:-1]
        self.parent[rows[1:]] = above
        self.parent[rows.item(0)] = parent
        for kids in (self.kids[tier], self.kids[ANY]):
            kids[above] = 1  # a row that is free has none
            kids[parent] = kids.item(parent) + 1
        for columns in self.left_s:
            for left_s in columns:
                left_s[rows] = 0.0
        self._run_of[rows] = self._append(parent, start, rows, keys)
        if self._journal is not None:
            self._journal.grown(rows, keys)
        return rows

    def _append(self, parent: int, start: int, rows: NodeIds, keys: Sequence[PageKey]) -> int:
        """Lengthen the parent's run where ``parent`` ends it, else open a run; returns its id."""
        run = None
        if parent >= 0:
            run_id = self._run_of.item(parent)
            run = self._runs[run_id]
            length = len(run.keys)
            if run.start + length == start:
                grown = length + len(rows)
                if grown > len(run.rows):
                    wider = np.empty(grown + grown // 2, np.intp)
                    wider[:length] = run.rows[:length]
                    run.rows = wider
                run.rows[length:grown] = rows
                run.keys += keys
                return run_id
        self._next_run += 1
        self._runs[self._next_run] = Run(rows.copy(), list(keys), parent, start, run)
        return self._next_run

    def remove(self, chain: NodeIds, *, from_host: bool) -> None:
        """Forget a chain that ends in a leaf and owns no page any more; top first. ``from_host``:
        its last copy was there."""
        count = len(chain)
        self.kids[ANY][self.parent.item(chain.item(0))] -= 1
        for kids in self.kids:
            kids[chain] = 0
        self.hits[chain] = 0
        row, left = chain.item(-1), count
        while left:  # run by run, deepest first
            run_id = self._run_of.item(row)
            run = self._runs[run_id]
            cut = max(0, len(run.keys) - left)
            deque(map(self.index.pop, run.keys[cut:]), maxlen=0)
            self.gone.add(run.keys[cut:], from_host=from_host)
            if self._journal is not None:
                self._journal.gone(run.keys[cut:])
            left -= len(run.keys) - cut
            del run.keys[cut:]
            if not cut:
                del self._runs[run_id]
            row = run.parent
        self._run_of[chain] = NONE
        self._free[self._free_rows : self._free_rows + count] = chain
        self._free_rows += count

    def remove_one(self, row: int, *, from_host: bool) -> None:
        """``remove`` of a single leaf: taking one page under pressure is too common for arrays."""
        run_id = self._run_of.item(row)
        run = self._runs[run_id]
        key = run.keys.pop()
        del self.index[key]
        self.gone.add_one(key, from_host=from_host)
        if self._journal is not None:
            self._journal.gone((key,))
        if not run.keys:
            del self._runs[run_id]
        top = self.parent.item(row)
        kids = self.kids[ANY]
        kids[top] = kids.item(top) - 1
        self.hits[row] = 0
        self._run_of[row] = NONE
        self._free[self._free_rows] = row
        self._free_rows += 1

    def holds(self, row: int) -> bool:
        """Whether the row is a node of the tree at present."""
        return self._run_of.item(row) != NONE

    def newest_key(self) -> PageKey | None:
        """The last key of the newest chain that is still there; None: there is none."""
        run = next(reversed(self._runs.values()), None)
        return run.keys[-1] if run is not None else None

    def key_of(self, row: int) -> PageKey:
        run = self._runs[self._run_of.item(row)]
        return run.keys[self.depth.item(row) - run.start]

    def rows(self) -> NodeIds:
        """Every node, in no order; for checks and rebuilds, not for the hot path."""
        return np.fromiter(self.index.values(), np.intp, len(self.index))

    def columns(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Every array by name, for those who compare two tables; what nodes that are gone have left
        in them counts."""
        yield from (("parent", self.parent), ("depth", self.depth))
        yield from (
            (f"kids {of}", kids)
            for of, kids in zip(("device", "host", "any"), self.kids, strict=True)
        )
        yield from (("hits", self.hits), ("priority", self.priority), ("run", self._run_of))
        yield from (("checkpoint", self.checkpoint), ("milestone", self.milestone))
        yield ("free row", self._free)
        by_group = {"state": self.state, "rank": self.rank, "need": self.need, "load": self.ticket}
        by_tier = {"page": self.page, "pins": self.pins}
        for tier in TIERS:
            by_group |= {f"{name} on {tier.name.lower()}": of[tier] for name, of in by_tier.items()}
        for name, columns in by_group.items():
            yield from ((f"{name} of group {at}", column) for at, column in enumerate(columns))

    def pages(self, tier: Tier, group: GroupId, rows: NodeIds) -> PageIds:
        return self.page[tier][group][rows]

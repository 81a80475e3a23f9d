"""What a lease does to every row of one path, for all groups at once.

Owns the loops over rows that taking and ending a lease are made of, in NumPy and, where it was
built, in C (``_path_columns``): there a call costs as much as one of NumPy's does. Must not decide
anything: ranks, needs and queues are for ``pins``.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NodeIds
from stratakv.spec.groups import ANCHOR
from stratakv.tree.residency import TIERS_OF

Columns: TypeAlias = Sequence[npt.NDArray[Any]]
EvictionRanks: TypeAlias = int | npt.NDArray[np.int64]
"""One rank > 0 for all rows of a call, or int64 [n]."""
PathRanks: TypeAlias = list[EvictionRanks]
"""By group."""
SOME_WARM: Final = -1
"""Of ``release``: pages have come free, and one of their group has pins or is needed."""
TIER_BITS: Final = bytes(sum(1 << tier for tier in tiers) for tiers in TIERS_OF)
"""Indexed by state: the tiers on which a group owns a page."""


class PathColumns(Protocol):
    """Columns of a table, those in plural by group. ``path``: distinct rows of the table;
    ``starts``: of its rows, the first that each group has."""

    def lease(
        self,
        path: NodeIds,
        starts: list[int],
        ranks: PathRanks,
        hits: int,
        evictable: list[int],
        /,
    ) -> None:
        """Rank and pin each group's rows on the device; those that had no pin are taken from
        ``evictable`` of their group."""
        ...

    def release(
        self, path: NodeIds, starts: list[int], ranks: PathRanks, evictable: list[int], /
    ) -> list[int]:
        """The reverse. By group: 0 where no row has lost its last pin, and else, of the anchor, the
        rank of its last row; of another group, where nothing pins any of its rows on any tier and
        nothing needs them, the tiers that have some, as bits, and all of them have gone to the cold
        end; else ``SOME_WARM``, and none has."""
        ...


MakePathColumns: TypeAlias = Callable[
    [npt.NDArray[np.int32], Columns, Columns, Columns, Columns, Columns, bytes], PathColumns
]
"""Of hits, pins on the device and on the host, ranks, needs, states, and ``TIER_BITS``."""


class NumpyPathColumns:
    def __init__(
        self,
        hits: npt.NDArray[np.int32],
        pins: Columns,
        host_pins: Columns,
        rank: Columns,
        need: Columns,
        state: Columns,
        tiers_of: bytes,
    ) -> None:
        self._hits = hits
        self._pins, self._host_pins = pins, host_pins
        self._rank, self._need, self._state = rank, need, state
        self._tiers_of = np.frombuffer(tiers_of, np.uint8)

    def lease(
        self,
        path: NodeIds,
        starts: list[int],
        ranks: PathRanks,
        hits: int,
        evictable: list[int],
        /,
    ) -> None:
        if hits:
            self._hits[path] += hits
        for group, start in enumerate(starts):
            rows = path[start:]
            self._rank[group][rows] = ranks[group]
            before = self._pins[group][rows]
            self._pins[group][rows] = before + 1
            evictable[group] -= len(rows) - int(np.count_nonzero(before))

    def release(
        self, path: NodeIds, starts: list[int], ranks: PathRanks, evictable: list[int], /
    ) -> list[int]:
        found: list[int] = []
        for group, start in enumerate(starts):
            rows = path[start:]
            self._rank[group][rows] = ranks[group]
            left = self._pins[group][rows] - 1
            self._pins[group][rows] = left
            freed = len(rows) - int(np.count_nonzero(left))
            evictable[group] += freed
            if not freed:
                found.append(0)
            elif group == ANCHOR:
                found.append(self._rank[group].item(rows.item(-1)))
            else:
                found.append(self._cool(group, rows) if freed == len(rows) else SOME_WARM)
        return found

    def _cool(self, group: int, rows: NodeIds) -> int:
        if any(np.count_nonzero(of[group][rows]) for of in (self._host_pins, self._need)):
            return SOME_WARM
        self._rank[group][rows] = 0
        return int(np.bitwise_or.reduce(self._tiers_of[self._state[group][rows]]))


_fastest: MakePathColumns = NumpyPathColumns
try:  # not built without a compiler
    from stratakv.tree import _path_columns

    _fastest = _path_columns.PathColumns
except ImportError:
    pass
DEFAULT_PATH_COLUMNS: Final = _fastest

"""At which ends a prefix can go on, where some pools need all of its pages and others the last few.

Owns that arithmetic, on arrays of flags. Must not know a store, nor an engine's classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PoolPages:
    """Beside the KV pool. ``present``: bool [n], by page of the prefix. ``trailing``: how many of
    the last pages an end needs; None: all."""

    name: str
    present: Flags
    trailing: int | None


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """``pages``: the longest prefix that every pool can go on from. ``ends``: all of them, in
    pages. ``by_pool``: the longest of each pool alone, where there is one."""

    pages: int
    ends: Sequence[int]
    by_pool: Mapping[str, int]


def prefix_hits(kv_present: Flags, pools: Sequence[PoolPages]) -> PrefixHits:
    """``kv_present``: bool [n], by page."""
    whole = leading(kv_present)
    usable = np.ones(whole, np.bool_)  # [at]: the end at + 1
    by_pool: dict[str, int] = {}
    for pool in pools:
        ends = _ends(pool.present[:whole], pool.trailing)
        usable &= ends
        longest = np.flatnonzero(ends)
        if len(longest):
            by_pool[pool.name] = int(longest[-1]) + 1
    ends = [int(at) + 1 for at in np.flatnonzero(usable)]
    return PrefixHits(pages=ends[-1] if ends else 0, ends=ends, by_pool=by_pool)


def leading(present: Flags) -> int:
    """How many of the first are there without a gap."""
    gaps = np.flatnonzero(~present)
    return int(gaps[0]) if len(gaps) else len(present)


def _ends(present: Flags, trailing: int | None) -> Flags:
    """[at]: whether the pool can go on at the end at + 1."""
    count = np.arange(1, len(present) + 1)
    missing = np.concatenate([[0], np.cumsum(~present)])
    needed = count if trailing is None else np.minimum(count, trailing)
    return missing[count] == missing[count - needed]

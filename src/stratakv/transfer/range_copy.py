"""Copies ranges of this process's memory, all in one call with the GIL released.

Owns how ``_gather`` is asked for that; without a compiler ``memmove`` takes range by range, and
the lock between any two. Must not know whose memory it is.
"""

import ctypes
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

try:
    from stratakv.transfer import _gather
except ImportError:  # installed without a compiler
    _gather = None

Addresses: TypeAlias = npt.NDArray[np.uint64]
_PAGE = np.zeros(1, np.int32)


def copy_ranges(sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
    """``sizes[i]`` bytes, at least one, from address ``sources[i]`` to ``targets[i]``; [n] each.
    Targets overlap neither each other nor sources."""
    if _gather is None:
        move_ranges(sources, targets, sizes)
    elif len(sizes):
        # Segments of one page, which begins at the first target.
        first = targets.min()
        table = np.stack([sources, sizes, targets - first, sizes], axis=1).view(np.int64)
        span = int((targets + sizes).max() - first)
        _gather.gather(table, _PAGE, _PAGE, 1, 1, int(first), span)


def move_ranges(sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
    """The same in plain Python."""
    columns = (targets.tolist(), sources.tolist(), sizes.tolist())
    for target, source, size in zip(*columns, strict=True):
        ctypes.memmove(target, source, size)

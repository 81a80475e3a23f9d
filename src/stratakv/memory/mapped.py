"""Memory of the two tiers: anonymous mappings as NumPy arrays. Owns how it is asked for; must not
know what lies in it.
"""

import mmap
import sys
from contextlib import suppress
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import PageIds

Bytes: TypeAlias = npt.NDArray[np.uint8]

POISON: Final = 0xFF
"""All ones is a NaN in every float dtype that a buffer may have."""


_LARGE: Final = 4 << 20
"""From here on huge pages are asked for, as NumPy does for its own: scattered pages are found
faster, and a transport that pins memory has less to do."""


def mapped_bytes(*shape: int) -> Bytes:
    """uint8 of ``shape``, which begins at a page of the machine and so at any alignment that a copy
    or a driver asks for. Zeros that take no memory until they are written; given back with the last
    array over them. Large ones take it 2 MiB at a time. MemoryError where the machine has no room
    for as much."""
    size = int(np.prod(shape, dtype=np.int64))
    if not size:
        return np.empty(shape, np.uint8)
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    if size >= _LARGE and sys.platform == "linux":
        with suppress(OSError):  # of a kernel that has none
            region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8).reshape(shape)


def rows_of(pages: PageIds) -> npt.NDArray[np.int64]:
    """Page ids as an index that wraps nowhere: -1 is beyond every array, not its last row."""
    return pages.astype(np.uint32).astype(np.int64)

"""What the tree asks the cache to do. Owns the effects: the tree decides, the cache executes them
in order.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import GroupId, NodeIds, PageIds


@dataclass(frozen=True, slots=True, eq=False)
class FreeDevice:
    group: GroupId
    pages: PageIds


@dataclass(frozen=True, slots=True, eq=False)
class FreeHost:
    group: GroupId
    pages: PageIds


@dataclass(frozen=True, slots=True, eq=False)
class Remap:
    """Point the inserting request at the tree's own pages before its duplicates are freed.

    ``indices`` are page indices of the request's prefix, ``canonical`` the pages to use there.
    """

    group: GroupId
    indices: npt.NDArray[np.int64]
    canonical: PageIds


@dataclass(frozen=True, slots=True, eq=False)
class Backup:
    """Pages worth a host copy, root-first; the write policy may thin them out."""

    group: GroupId
    nodes: NodeIds


@dataclass(frozen=True, slots=True, eq=False)
class Persist:
    """Pages on the host worth a stored object, root-first."""

    group: GroupId
    nodes: NodeIds


Effect: TypeAlias = FreeDevice | FreeHost | Backup | Persist
"""What the owner of the pages carries out, in order."""


class Inserted(NamedTuple):
    """What an insert asks for. ``remaps`` come first, and are for whoever owns the request's rows:
    the pages that it reads no more are freed by ``effects``."""

    remaps: list[Remap]
    effects: list[Effect]

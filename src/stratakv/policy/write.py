"""Which pages get a host copy, and when. Owns the policies, a closed union.

Pure; must not touch the tree. Uses of a page are counted alike under all of them.
"""

from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class WriteThrough:
    """Every page, as soon as it is inserted: device eviction then never has to wait."""


@dataclass(frozen=True, slots=True)
class WriteThroughSelective:
    """A page once it has been used ``hits`` times; the request that computed it is the first."""

    hits: int = 2

    def __post_init__(self) -> None:
        if self.hits < 1:
            raise ValueError(f"hits {self.hits}: allowed is 1 and more")


@dataclass(frozen=True, slots=True)
class WriteBack:
    """The coldest pages, shortly before their place is needed: so many that ``reserve`` of a
    group's device pool is free or has a host copy. Eviction takes those first."""

    reserve: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.reserve <= 1:
            raise ValueError(f"reserve {self.reserve}: allowed is above 0, and 1 at most")


@dataclass(frozen=True, slots=True)
class NoBackup:
    """There is no host tier: an evicted page is recomputed."""


WritePolicy: TypeAlias = WriteThrough | WriteThroughSelective | WriteBack | NoBackup


def worth_backup(policy: WritePolicy, hits: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Which of the pages that the tree offers to back up now. ``hits``: how often each was leased
    since it was inserted."""
    match policy:
        case WriteThrough():
            return np.ones(len(hits), np.bool_)
        case WriteThroughSelective(uses):
            return hits + 1 >= uses
        case WriteBack() | NoBackup():
            return np.zeros(len(hits), np.bool_)
        case _:
            assert_never(policy)


def weighs_uses(policy: WritePolicy) -> bool:
    """Whether a use may make a page worth a backup that was not before."""
    match policy:
        case WriteThroughSelective():
            return True
        case WriteThrough() | WriteBack() | NoBackup():
            return False
        case _:
            assert_never(policy)


def safe_wanted(policy: WritePolicy, total: int) -> int:
    """How many of a group's ``total`` device pages are to be free, or to have a host copy."""
    match policy:
        case WriteBack(reserve):
            return int(np.ceil(reserve * total))
        case WriteThrough() | WriteThroughSelective() | NoBackup():
            return 0
        case _:
            assert_never(policy)


def to_clean(wanted: int, safe: int) -> int:
    """Pages to back up now, where ``safe`` of the ``wanted`` ones are free or have a host copy.
    A quarter more than is short, so that not every step looks for a few."""
    return wanted + wanted // 4 - safe if safe < wanted else 0

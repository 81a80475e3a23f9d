"""A copy, described completely before anything moves: what, between where, and after what. Owns the
records; must not touch memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import GroupId, LayerId, PageIds


class Direction(Enum):
    """Counted apart, because ranks agree on completions per kind."""

    BACKUP = "backup"  # device -> host
    LOAD = "load"  # host -> device


class Fence(Protocol):
    """Work of the device that was launched before a plan: its last write to what the plan reads,
    its last look at what the plan overwrites."""

    def wait(self) -> None:
        """Return (or make the stream that copies wait) once that work is done."""
        ...

    def passed(self) -> bool:
        """Whether it is done."""
        ...


class _Passed:
    def wait(self) -> None:
        pass

    def passed(self) -> bool:
        return True


NOTHING_LAUNCHED: Final[Fence] = _Passed()
"""Of a device that computes before its caller goes on."""
Launched: TypeAlias = Callable[[], Fence]
"""Says what a plan that is made now comes after: all that a device was given so far."""


def nothing_launched() -> Fence:
    return NOTHING_LAUNCHED


@dataclass(frozen=True, slots=True, eq=False)
class GroupCopy:
    """Pages of one group: ``device[i]`` and ``host[i]`` are the two ends of copy i; int32 [n]."""

    group: GroupId
    device: PageIds
    host: PageIds

    def __post_init__(self) -> None:
        if len(self.device) != len(self.host):
            raise ValueError(f"{len(self.device)} device pages for {len(self.host)} host pages")


@dataclass(frozen=True, slots=True, eq=False)
class PageRows:
    """Rows of pages: row ``offsets[i]`` of page ``pages[i]``, in rows of one buffer, as a rule a
    token each; int32 [n] both."""

    pages: PageIds
    offsets: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        if len(self.pages) != len(self.offsets):
            raise ValueError(f"{len(self.pages)} pages for {len(self.offsets)} offsets")

    def __len__(self) -> int:
        return len(self.pages)


@dataclass(frozen=True, slots=True, eq=False)
class RowCopy:
    """Some rows of one layer of one buffer: ``device`` and ``host`` row i are the two ends. No row
    is written twice in a plan."""

    group: GroupId
    buffer: str
    layer: LayerId
    device: PageRows
    host: PageRows

    def __post_init__(self) -> None:
        if len(self.device) != len(self.host):
            raise ValueError(f"{len(self.device)} device rows for {len(self.host)} host rows")


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Everything one submission moves: of the pages of ``copies`` all sidecars and layers, and
    ``rows``. No byte of it is read or written before ``after`` has passed."""

    direction: Direction
    copies: tuple[GroupCopy, ...]
    rows: tuple[RowCopy, ...] = ()
    after: Fence = NOTHING_LAUNCHED

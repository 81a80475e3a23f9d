"""A copy, described completely before anything moves. Owns the records; must not touch memory."""

from dataclasses import dataclass
from enum import Enum

from stratakv.core.ids import GroupId, PageIds


class Direction(Enum):
    """Counted apart, because ranks agree on completions per kind."""

    BACKUP = "backup"  # device -> host
    LOAD = "load"  # host -> device


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
class CopyPlan:
    """Everything one submission moves; all sidecars and layers of the named pages go along."""

    direction: Direction
    copies: tuple[GroupCopy, ...]

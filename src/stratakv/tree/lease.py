"""Pins on exactly what a prefix needs at one end: three kinds, by what they stand on.

Owns the records. Taken, moved on and released by ``Leases`` only; released exactly once, a leak is
reported by ``check`` and a second release raises. ``path`` are the rows of pages [0, end) of the
prefix; a lease is for pages [starts[g], end) of every group g.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from stratakv.core.ids import GroupId, NodeIds, TicketId


@dataclass(slots=True, eq=False)
class DeviceLease:
    """A request stands on its pages on the device, and moves on with it. ``loading`` are the loads
    in flight that this prefix waits for, ``priority`` is the request's. ``near``: of groups that it
    has spilled, the rows that are pinned on the device nonetheless, since the host cannot be read
    there yet; their others are pinned on the host."""

    end: int
    starts: list[int]
    path: NodeIds
    loading: tuple[TicketId, ...] = ()
    priority: int = 0
    near: dict[GroupId, NodeIds] = field(default_factory=dict[GroupId, NodeIds])

    def move(self, end: int, starts: list[int], path: NodeIds) -> None:
        """For ``Leases``, which pins what it holds from now on."""
        self.end, self.starts, self.path = end, starts, path


@dataclass(frozen=True, slots=True, eq=False)
class LoadLease:
    """A load is planned: ``host[g]`` are the rows that it will read, pinned on the host; the others
    are pinned on the device, or, of spilled groups, as ``near`` says. ``Leases.begin_load`` makes a
    ``DeviceLease`` of it."""

    end: int
    starts: list[int]
    path: NodeIds
    host: Sequence[NodeIds]
    loading: tuple[TicketId, ...]
    priority: int
    near: dict[GroupId, NodeIds] = field(default_factory=dict[GroupId, NodeIds])


@dataclass(frozen=True, slots=True, eq=False)
class HostHold:
    """Somebody counts on the host alone: ``host[g]`` are the rows that are pinned there, all of
    the prefix's or what there was of them."""

    end: int
    starts: list[int]
    path: NodeIds
    host: Sequence[NodeIds]


Lease: TypeAlias = DeviceLease | LoadLease | HostHold

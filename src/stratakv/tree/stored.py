"""Which pages storage has or is being given, and which chains it should be notified of as used.

Owns the marks, what came from storage, and the pins of pages that are being written or that a
prefetch counts on. A mark is what this process knows: the store may have evicted the object since,
so it promises nothing and only saves writing a page twice. Must not know how a page is stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import GroupId, NodeIds, PageIds, PageKey
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.tree.effects import Persist
from stratakv.tree.lease import HostHold, Lease
from stratakv.tree.nodes import NodeTable, Tier
from stratakv.tree.pins import Pins
from stratakv.tree.residency import READABLE_ON_HOST

NEVER: Final = -(2**62)
TOUCH_STEPS: Final = 256
"""A chain that is in use all the time is reported this often, and not for every request."""


@dataclass(slots=True, eq=False)
class Writing:
    """Host pages of one path and group that an I/O operation reads, pinned until it has ended, and
    with them their nodes' anchor pages."""

    group: GroupId
    rows: NodeIds


def host_prefix(nodes: NodeTable, path: NodeIds) -> int:
    """How many pages of a path from the root have their anchor on the host without a hole.

    Only these may be pinned on the host for as long as storage, or a request that waits, takes: an
    anchor page that is on the device alone can only leave with all that is below it, and admission
    counts on its leaving.
    """
    holes = np.flatnonzero(~READABLE_ON_HOST[nodes.state[ANCHOR][path]])
    return holes.item(0) if len(holes) else len(path)


class StorageMarks:
    """``active``: whether there is a store; without one nothing is marked and nothing asked for.
    ``epoch`` counts how often all was forgotten."""

    def __init__(self, spec: CacheSpec, nodes: NodeTable, pins: Pins) -> None:
        self.active = False
        self.epoch = 0
        self.writing: dict[Writing, None] = {}  # in order, alike on every rank
        self._nodes = nodes
        self._pins = pins
        self._groups = [group.id for group in spec.groups]
        self._has_bytes = [group.page_bytes > 0 for group in spec.groups]
        self._keeps_all = [group.keeps_all for group in spec.groups]
        size = len(nodes.parent)
        self._marks = [np.zeros(size, np.bool_) for _ in spec.groups]
        self._touched = np.full(size, NEVER, np.int64)
        self._fetched = np.zeros(size, np.bool_)  # a page of it has come from storage
        self._any_fetched = False  # ever

    def columns(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Every array by name, for those who compare two of these."""
        yield "touched in storage", self._touched
        yield "fetched from storage", self._fetched
        for group, marks in enumerate(self._marks):
            yield f"stored of group {group}", marks

    def open(self) -> None:
        """There is a store from now on, of which nothing is known."""
        self.forget()
        self.active = True

    def close(self) -> None:
        """Nothing more is to be stored or asked for."""
        self.active = False

    def names(self, rows: NodeIds) -> tuple[list[PageKey], npt.NDArray[np.int32]]:
        """Keys and page indices of ``rows``, nodes of one path, top first."""
        depth = self._nodes.depth[rows]
        chain = self._nodes.keys_to(rows.item(-1), int(depth[-1] - depth[0]) + 1)
        return list(map(chain.__getitem__, (depth - depth[0]).tolist())), depth

    def sources(self, writing: Writing) -> PageIds:
        """The host pages to write."""
        return self._nodes.page[Tier.HOST][writing.group][writing.rows]

    def forget(self) -> None:
        """The store is empty, or another one: nothing is in it."""
        self.epoch += 1
        for marks in self._marks:
            marks[:] = False
        self._touched[:] = NEVER

    def grown(self, rows: NodeIds) -> None:
        """New nodes, whose rows others may have had before: also of a group that has no page there
        yet nothing is known."""
        if self._any_fetched:
            self._fetched[rows] = False
        if self.active:
            for marks in self._marks:
                marks[rows] = False
            self._touched[rows] = NEVER

    def unmark(self, hold: HostHold) -> None:
        """What ``hold`` pins is in the store no more."""
        for group, rows in enumerate(hold.host):
            self._marks[group][rows] = False

    def marked(self) -> Iterator[tuple[GroupId, list[PageKey]]]:
        """The pages of the tree that the store has, by group."""
        nodes = self._nodes
        for group in self._groups:
            rows = filter(nodes.holds, np.flatnonzero(self._marks[group]).tolist())
            if keys := list(map(nodes.key_of, rows)):
                yield group, keys

    def entered(self, group: GroupId, rows: NodeIds, *, fetched: bool) -> None:
        """Pages that have just become resident, from storage or not."""
        if fetched:
            self._fetched[rows] = self._any_fetched = True
        if self.active:
            self._marks[group][rows] = fetched and self._has_bytes[group]
            if fetched:
                self._touched[rows] = NEVER

    def fetched(self, lease: Lease) -> list[PageKey]:
        """Keys of a leased path from the first page on of which something came from storage; empty
        where nothing did."""
        found = np.flatnonzero(self._fetched[lease.path])
        if not len(found):
            return []
        return self._nodes.keys_to(lease.path.item(-1), lease.end - found.item(0))

    # -- writing ---------------------------------------------------------------------------------

    def wanted(self, group: GroupId, rows: NodeIds) -> list[Persist]:
        """Those of ``rows`` (one path, readable on the host) that are worth an object and have
        none: of a group that does not keep all, what a mark needs."""
        if not self.active or not self._has_bytes[group]:
            return []
        worth = ~self._marks[group][rows]
        if not self._keeps_all[group]:
            worth &= self._nodes.need[group][rows] > 0
        if not np.count_nonzero(worth):
            return []
        rows = rows[worth]
        whole = host_prefix(self._nodes, self._nodes.path(rows.item(-1)))
        rows = rows[self._nodes.depth[rows] < whole]
        return [Persist(group, rows)] if len(rows) else []

    def unstored(self, lease: Lease) -> Iterator[Persist]:
        """What a leased path has on the host and storage lacks: it was dropped, it failed, or there
        was no store then."""
        if not lease.end:
            return
        for group in self._groups:
            readable = READABLE_ON_HOST[self._nodes.state[group][lease.path]]
            yield from self.wanted(group, lease.path[readable])

    def begin(self, group: GroupId, rows: NodeIds) -> Writing:
        """Pin and mark ``rows``, one path, top first."""
        self._marks[group][rows] = True
        self._touched[rows] = NEVER  # storage must touch an older parent, or it would leave first
        for held in {ANCHOR, group}:
            self._pins.pin(Tier.HOST, held, rows)
        writing = Writing(group, rows)
        self.writing[writing] = None
        return writing

    def end(self, writing: Writing, kept: npt.NDArray[np.bool_]) -> None:
        """The operation is over; ``kept``: which of its pages are stored by now, bool [n]."""
        del self.writing[writing]
        self._marks[writing.group][writing.rows[~kept]] = False
        if writing.group != ANCHOR:
            self._pins.unpin(Tier.HOST, writing.group, writing.rows)
        self._pins.unpin(Tier.HOST, ANCHOR, writing.rows)

    # -- use -------------------------------------------------------------------------------------

    def to_touch(self, lease: Lease, step: int) -> Iterator[tuple[GroupId, NodeIds]]:
        """The stored pages, by group and top first, of the part of a leased path that storage has
        not touched for a while. With a page all of its ancestors: no parent may look older than
        its child."""
        if not self.active or not lease.end:
            return
        stale = np.flatnonzero(step - self._touched[lease.path] >= TOUCH_STEPS)
        if not len(stale):
            return
        rows = lease.path[: stale.item(-1) + 1]
        self._touched[rows] = step
        for group in self._groups:  # of one without bytes nothing is marked
            stored = rows[self._marks[group][rows]]
            if len(stored):
                yield group, stored

"""Who stands on what: the open leases of a tree, and what taking and ending them pins.

Owns the open leases. A lease, not a match, stamps recency and hits, on the whole of what it needs.
Must not move a residency.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, assert_never

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, PageKey, TicketId
from stratakv.spec.groups import CacheSpec
from stratakv.tree.copies import Copies
from stratakv.tree.lease import DeviceLease, HostHold, Lease, LoadLease
from stratakv.tree.matching import Matcher
from stratakv.tree.nodes import NodeTable, Tier
from stratakv.tree.pins import Pins
from stratakv.tree.residency import (
    ON_DEVICE,
    READABLE_ON_HOST,
    all_on_device,
    count_on_tier,
)
from stratakv.tree.spilled import Spilled
from stratakv.tree.stored import host_prefix

DEVICE, HOST = Tier.DEVICE, Tier.HOST
HIGHEST_PRIORITY: Final = 2**31 - 1
RELEASED_TWICE: Final = "a lease was released twice"
NO_ROWS: Final[NodeIds] = np.empty(0, np.intp)


class Price(NamedTuple):
    """Pages of one group: those a lease would make unevictable, and those it would have to load."""

    to_pin: int
    to_load: int


class Leases:
    """``matcher`` knows what a prefix needs, ``copies`` what is landing, ``spilled`` where what a
    request leaves on the host is pinned."""

    def __init__(
        self,
        spec: CacheSpec,
        nodes: NodeTable,
        pins: Pins,
        matcher: Matcher,
        copies: Copies,
        spilled: Spilled,
    ) -> None:
        self._stateful = [group.stateful for group in spec.groups]
        self._groups = range(len(spec.groups))
        self._nodes = nodes
        self._pins = pins
        self._matcher = matcher
        self._copies = copies
        self._spilled = spilled
        self._open: dict[Lease, None] = {}  # in the order of their taking, alike on every rank

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._open)

    # -- taking ----------------------------------------------------------------------------------

    def price(
        self, keys: Sequence[PageKey], end: int, starts: Sequence[int], group: GroupId
    ) -> Price:
        """What a lease of [starts[g], ``end``) would take of one group. Read-only."""
        if not end:
            return Price(0, 0)
        nodes, count = self._nodes, end - starts[group]
        rows = nodes.tail(nodes.index[keys[end - 1]], count)
        to_load = count - count_on_tier(DEVICE, nodes.state[group][rows])
        pinned = int(np.count_nonzero(nodes.pins[DEVICE][group][rows]))
        return Price(to_pin=count - to_load - pinned, to_load=to_load)

    def take(
        self,
        keys: Sequence[PageKey],
        end: int,
        *,
        starts: Sequence[int] | None = None,
        priority: int = 0,
        again: bool = False,
        spill: bool = False,
    ) -> DeviceLease:
        """Pin exactly what every group needs at ``end``, and stamp recency and hits on it.

        ``end`` must come from ``match``: its ``device_end``. ``starts``: the first page of each
        group where fewer are needed, as by a request that brings live pages. ``priority``: the
        request's; every page that it uses counts by its highest one. ``again``: the request has
        counted as a use of these pages before, and only comes back to them. ``spill``: of groups
        that have their home on the host, what can be read there is pinned there alone.
        """
        first = self._matcher.starts(end) if starts is None else list(starts)
        path, loading = NO_ROWS, ()
        near: dict[GroupId, NodeIds] = {}
        if end:
            path = self._nodes.tail(self._nodes.index[keys[end - 1]], end)
            if priority > 0:
                self._raise_priority(path, priority)
            pins, pinned = self._pins, first
            if spill:
                pinned, stamp = first[:], pins.tick()
                for group in self._spilled.groups:
                    rows = path[first[group] :]
                    (pins.stamp if again else pins.hit)(group, rows, stamp)
                    near[group] = self._spilled.pin(group, rows)
                    pins.pin(DEVICE, group, near[group])
                    pinned[group] = end  # nothing of it is left to pin
            pins.lease(path, pinned, again=again)
            if self._copies.loads:
                loading = self._tickets(first, path)
        elif spill:
            near = dict.fromkeys(self._spilled.groups, NO_ROWS)
        lease = DeviceLease(end, first, path, loading, priority, near)
        self._open[lease] = None
        return lease

    def take_to_load(
        self,
        keys: Sequence[PageKey],
        end: int,
        *,
        starts: Sequence[int] | None = None,
        priority: int = 0,
        again: bool = False,
        spill: bool = False,
    ) -> DeviceLease | LoadLease:
        """``take`` at an end that is usable after a load: what is on the host alone is pinned there
        until ``begin_load``. A ``DeviceLease`` where there is nothing to load."""
        if not end:
            return self.take(keys, end, starts=starts, priority=priority, spill=spill)
        first = list(self._matcher.starts(end) if starts is None else starts)
        path = self._path(keys, end, priority)
        nodes, pins = self._nodes, self._pins
        nodes.hits[path] += not again
        use = pins.stamp if again else pins.hit
        stamp = pins.tick()
        host: list[NodeIds] = []
        near: dict[GroupId, NodeIds] = {}
        for group in self._groups:
            rows = path[first[group] :]
            use(group, rows, stamp)
            if spill and group in self._spilled.groups:
                rows = near[GroupId(group)] = self._spilled.pin(GroupId(group), rows)
            there = ON_DEVICE[nodes.state[group][rows]]
            host.append(rows[~there])
            pins.pin(HOST, group, host[-1])
            pins.pin(DEVICE, group, rows[there])
        loading = self._tickets(first, path) if self._copies.loads else ()
        lease = (
            LoadLease(end, first, path, host, loading, priority, near)
            if any(map(len, host))
            else DeviceLease(end, first, path, loading, priority, near)
        )
        self._open[lease] = None
        return lease

    def _path(self, keys: Sequence[PageKey], end: int, priority: int) -> NodeIds:
        nodes = self._nodes
        path = nodes.tail(nodes.index[keys[end - 1]], end)
        if priority > 0:
            self._raise_priority(path, priority)
        return path

    def _raise_priority(self, rows: NodeIds, priority: int) -> None:
        column = self._nodes.priority
        column[rows] = np.maximum(column[rows], min(priority, HIGHEST_PRIORITY))

    def _tickets(self, starts: Sequence[int], path: NodeIds) -> tuple[TicketId, ...]:
        found: set[int] = set()
        for group in self._groups:
            found.update(np.unique(self._nodes.ticket[group][path[starts[group] :]]).tolist())
        found.discard(NONE)
        return tuple(TicketId(ticket) for ticket in sorted(found))

    def begin_load(self, lease: LoadLease, pages: list[PageIds], ticket: TicketId) -> DeviceLease:
        """Land what ``lease`` is to load on device ``pages`` (per group) with the plan ``ticket``,
        which other leases may share. The lease that is returned takes its place: it stands on the
        device alone, and the copy holds both ends."""
        assert lease in self._open, RELEASED_TWICE
        del self._open[lease]
        self._copies.begin_load(lease.host, pages, ticket)
        loading = lease.loading
        if ticket not in loading:  # it may stand on pages of the same plan already
            loading = (*loading, ticket)
        path, priority = lease.path, lease.priority
        moved = DeviceLease(lease.end, lease.starts, path, loading, priority, lease.near)
        self._open[moved] = None
        return moved

    # -- on the host -----------------------------------------------------------------------------

    def hold(self, keys: Sequence[PageKey], end: int, starts: Sequence[int]) -> HostHold:
        """Pin pages [starts[g], ``end``) of every group on the host alone: all of them must have a
        host page by now. Neither recency nor hits change."""
        nodes = self._nodes
        path = nodes.tail(nodes.index[keys[end - 1]], end) if end else NO_ROWS
        host = [path[start:] for start in starts]
        for group, rows in enumerate(host):
            here = count_on_tier(HOST, nodes.state[group][rows])
            assert here == len(rows), "a page to hold is not on the host"
        return self._hold(end, list(starts), path, host)

    def hold_present(self, keys: Sequence[PageKey], end: int, starts: Sequence[int]) -> HostHold:
        """Pin what of pages [starts[g], ``end``) can be read on the host, in every group, as far as
        the anchor's can. ``end`` pages of ``keys`` are in the tree."""
        nodes = self._nodes
        path = nodes.path(nodes.index[keys[end - 1]]) if end else NO_ROWS
        whole = host_prefix(nodes, path)
        path = path[:whole]
        first = [min(start, whole) for start in starts]
        host: list[NodeIds] = []
        for group, start in enumerate(first):
            rows = path[start:]
            host.append(rows[READABLE_ON_HOST[nodes.state[group][rows]]])
        return self._hold(whole, first, path, host)

    def _hold(
        self, end: int, starts: list[int], path: NodeIds, host: Sequence[NodeIds]
    ) -> HostHold:
        for group, rows in enumerate(host):
            self._pins.pin(HOST, group, rows)
        hold = HostHold(end, starts, path, host)
        self._open[hold] = None
        return hold

    def again(self, hold: HostHold) -> HostHold:
        """A second hold on the same pages, which ends by itself."""
        return self._hold(hold.end, hold.starts, hold.path, hold.host)

    def present(self, hold: HostHold, limit: int) -> tuple[npt.NDArray[np.bool_], ...]:
        """Which of the first ``limit`` pages of its prefix a hold has, by group."""
        flags = np.zeros((len(hold.host), limit), np.bool_)
        for group, rows in enumerate(hold.host):
            flags[group, self._nodes.depth[rows]] = True
        return tuple(flags)

    # -- moving on -------------------------------------------------------------------------------

    def advance(
        self,
        lease: DeviceLease,
        keys: Sequence[PageKey],
        end: int,
        starts: Sequence[int] | None = None,
        *,
        received: bool = False,
    ) -> None:
        """Move a lease on along its own path: ``keys`` up to ``end`` are on the device by now.
        ``starts``: as in ``take``. ``received``: of groups that it has spilled they are on the
        host, or on both tiers.

        Of a group whose requests carry a state, it holds the page at ``end`` where there is one;
        elsewhere the request's live page stands for it.
        """
        assert lease in self._open, "a released lease cannot move"
        if end <= lease.end:
            return
        nodes, pins = self._nodes, self._pins
        path = nodes.tail(nodes.index[keys[end - 1]], end)
        if lease.priority > 0:
            self._raise_priority(path[lease.end :], lease.priority)
        starts = list(self._matcher.starts(end) if starts is None else starts)
        stamp = pins.tick()
        for group in self._groups:
            old, new = lease.starts[group], starts[group]
            entering = path[max(lease.end, new) :]
            if received and group in lease.near:
                pins.stamp(group, entering, stamp)
                entering = self._spilled.pin(GroupId(group), entering)
            if not all_on_device(nodes.state[group][entering]):
                assert self._stateful[group], "a needed page is not there"
                new = starts[group] = end
                entering = path[:0]
            pins.stamp(group, entering, stamp)
            pins.pin(DEVICE, group, entering)
            if group in lease.near:
                id_ = GroupId(group)
                lease.near[id_] = np.concatenate((lease.near[id_], entering))
            pins.unpin(DEVICE, group, path[old : max(old, min(new, lease.end))])
        lease.move(end, starts, path)

    def let_go(self, lease: DeviceLease, starts: Sequence[int]) -> None:
        """Pin nothing of what a lease holds that is before page ``starts[g]`` of a group: its
        request does without, and the lease stays where it is."""
        starts = [min(start, lease.end) for start in starts]
        for group in self._groups:
            behind = lease.path[lease.starts[group] : starts[group]]
            self._pins.unpin(DEVICE, group, behind)
        starts = [max(pair) for pair in zip(lease.starts, starts, strict=True)]
        lease.move(lease.end, starts, lease.path)

    # -- ending ----------------------------------------------------------------------------------

    def release(self, lease: Lease) -> None:
        """End a lease; what it held may leave from now on."""
        assert lease in self._open, RELEASED_TWICE
        del self._open[lease]
        if not lease.end:
            return
        match lease:
            case DeviceLease():
                self._release(lease)
            case LoadLease():
                self._release_unloaded(lease)
            case HostHold():  # a use of the host copy must not warm a device copy in its queue
                for group in reversed(self._groups):
                    self._pins.unpin(HOST, group, lease.host[group])
            case _:
                assert_never(lease)

    def lose(self, group: GroupId, rows: NodeIds) -> list[HostHold]:
        """The host pages of ``rows`` are about to go, for their backup has failed: holds that stand
        on any of them are ended, and returned."""
        lost = [
            lease
            for lease in self._open
            if isinstance(lease, HostHold) and np.isin(rows, lease.host[group]).any()
        ]
        for hold in lost:
            self.release(hold)
        return lost

    def is_open(self, lease: Lease) -> bool:
        return lease in self._open

    def _release(self, lease: DeviceLease) -> None:
        pins, path, starts = self._pins, lease.path, lease.starts
        if lease.near:
            starts, stamp = starts[:], pins.tick()
            for group in reversed(lease.near):
                rows = path[starts[group] :]
                pins.stamp(group, rows, stamp)
                pins.unpin(DEVICE, group, self._spilled.unpin(group, rows, lease.near))
                starts[group] = lease.end
        pins.release(path, starts)

    def _release_unloaded(self, lease: LoadLease) -> None:
        pins = self._pins
        stamp = pins.tick()
        for group in reversed(self._groups):
            rows, host = lease.path[lease.starts[group] :], lease.host[group]
            pins.stamp(group, rows, stamp)
            rows = self._spilled.unpin(GroupId(group), rows, lease.near)
            pins.unpin(HOST, group, host)
            pins.unpin(DEVICE, group, rows[~np.isin(rows, host)])

    # -- what a lease reports --------------------------------------------------------------------

    def pages(self, lease: DeviceLease, group: GroupId) -> PageIds:
        """Device pages of ``[starts[group], end)`` under a lease, NONE where it has spilled."""
        rows = lease.path[lease.starts[group] :]
        return self._held(lease, group, rows, self._nodes.page[DEVICE][group][rows])

    def _held(self, lease: DeviceLease, group: GroupId, rows: NodeIds, pages: PageIds) -> PageIds:
        """Of ``pages`` of ``rows``, NONE where the lease holds them on the host."""
        if group in lease.near:
            pages[~np.isin(rows, lease.near[group])] = NONE
        return pages

    def pages_at(
        self, lease: DeviceLease, group: GroupId, indices: npt.NDArray[np.int64]
    ) -> PageIds:
        """Device pages at page ``indices`` of a leased path, NONE where there is none, or none that
        the lease holds."""
        rows = lease.path[indices]
        return self._held(lease, group, rows, self._nodes.page[DEVICE][group][rows])

    def sole(self, lease: DeviceLease, group: GroupId) -> int:
        """Pages of a group that could be evicted if ``lease`` let go of them."""
        rows = lease.path[lease.starts[group] :]
        return int(np.count_nonzero(self._nodes.pins[DEVICE][group][rows] == 1))

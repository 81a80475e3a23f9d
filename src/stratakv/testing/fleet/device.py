"""A device and a host of a few pages each, and copies between them that end by a schedule.

Owns the bytes and every copy in flight. A copy moves its bytes when it ends and not before, so that
pages which are freed or written too early show. Must not choose what to copy.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import GroupId, LayerId, PageIds, TicketId
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.host_arena import HostArena
from stratakv.memory.mapped import Bytes
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.testing.fleet.adversary import Adversary
from stratakv.tiers.pools import Allocators
from stratakv.transfer.copy_plan import CopyPlan, Direction, Fence, GroupCopy
from stratakv.transfer.engine import Completion


class PageBytes:
    """Pages of one group on one tier: ``rows`` is float32 [pages, rows_per_page, row]. A group
    without buffers has none. ``arena``: where they lie, if anybody from outside writes to them."""

    def __init__(self, group: CacheGroup, pages: int, arena: HostArena | None = None) -> None:
        assert len(group.buffers) <= 1, "the simulation has one buffer a group"
        shape = (
            (group.buffers[0].rows_per_page, *group.buffers[0].row_shape) if group.buffers else (0,)
        )
        self._size = group.page_bytes if pages else 0
        bytes_ = np.empty((pages, group.page_bytes), np.uint8) if arena is None else arena.bytes
        self._stride = bytes_.shape[1]
        there = bytes_[:, : group.page_bytes].view(np.float32)
        self.rows: npt.NDArray[np.float32] = there.reshape(pages, *shape)
        self.rows[:] = np.nan
        self._whole = bytes_.reshape(-1).data if self._size else memoryview(b"")

    def views(self, pages: PageIds) -> list[memoryview]:
        """The bytes of each page, writable; no copies."""
        size, stride = self._size, self._stride
        return [self._whole[at * stride : at * stride + size] for at in pages.tolist()]


class SimPools:
    """The device tier for who reads and writes its pages from outside: ``DevicePages``."""

    def __init__(self, device: Sequence[PageBytes]) -> None:
        self._device = device
        self.pages = tuple(len(each.rows) for each in device)

    def layer_pages(self, group: GroupId, buffer_name: str, layer: int) -> Bytes:
        del buffer_name  # there is one
        assert not layer, "the simulation has one layer a group"
        rows = self._device[group].rows
        return rows.reshape(len(rows), -1).view(np.uint8)


Later: TypeAlias = Callable[[Callable[[], None]], None]


def _at_once(work: Callable[[], None]) -> None:
    work()


class PoisoningAllocator(PageAllocator):
    """Fills what is freed with NaN, so that a read of a page nobody owns cannot go unseen.
    ``later``: does that when the device comes to it."""

    def __init__(self, of: PageBytes, later: Later = _at_once) -> None:
        super().__init__(len(of.rows))
        self._bytes = of
        self._later = later

    def free(self, pages: PageIds) -> None:
        super().free(pages)
        self._later(partial(self._poison, pages.copy()))

    def _poison(self, pages: PageIds) -> None:
        self._bytes.rows[pages] = np.nan


@dataclass(slots=True, eq=False)
class _Job:
    ticket: TicketId
    copies: tuple[GroupCopy, ...]
    after: Fence
    ok: bool = True
    moved: bool = False


class SimTransfer:
    """A ``TransferEngine`` whose plans end as the adversary chooses, each direction in order."""

    def __init__(
        self,
        spec: CacheSpec,
        device: Sequence[PageBytes],
        host: Sequence[PageBytes],
        adversary: Adversary,
    ) -> None:
        self._sizes = [group.page_bytes for group in spec.groups]
        self._device, self._host = device, host
        self._adversary = adversary
        self._tickets = 0
        self._queues: dict[Direction, deque[_Job]] = {d: deque() for d in Direction}
        self._ended: dict[Direction, deque[Completion]] = {d: deque() for d in Direction}

    def submit(self, plan: CopyPlan) -> TicketId:
        copies = tuple(
            GroupCopy(copy.group, copy.device.copy(), copy.host.copy()) for copy in plan.copies
        )
        assert not plan.rows, "the simulation moves whole pages"
        job = _Job(TicketId(self._tickets), copies, plan.after)
        self._tickets += 1
        if plan.direction is Direction.BACKUP:
            job.ok = not self._adversary.strikes(self._adversary.fault_rates.backup_fails)
        self._queues[plan.direction].append(job)
        return job.ticket

    def gate(self, tickets: Sequence[TicketId]) -> "SimGate":
        return SimGate(self, frozenset(tickets))

    def land(self, tickets: frozenset[TicketId]) -> None:
        """A forward has waited for these loads: their bytes are there, and perhaps nobody knows
        yet."""
        queue = self._queues[Direction.LOAD]
        last = max((at for at, job in enumerate(queue) if job.ticket in tickets), default=-1)
        for at in range(last + 1):
            self._move(Direction.LOAD, queue[at])

    def ready(self, direction: Direction) -> int:
        """Each look may be the one that finds another plan ended."""
        queue = self._queues[direction]
        if queue and self._adversary.moves(direction.value) and queue[0].after.passed():
            self._end(direction)
        return len(self._ended[direction])

    def peek(self, direction: Direction, count: int) -> list[Completion]:
        assert 0 <= count <= len(self._ended[direction]), f"{count} plans have not ended"
        return [self._ended[direction][at] for at in range(count)]

    def take(self, direction: Direction, count: int) -> list[Completion]:
        assert 0 <= count <= len(self._ended[direction]), f"{count} plans have not ended"
        return [self._ended[direction].popleft() for _ in range(count)]

    def close(self) -> None:
        for direction in Direction:
            while self._queues[direction]:
                self._end(direction)

    def _end(self, direction: Direction) -> None:
        job = self._queues[direction].popleft()
        self._move(direction, job)
        size = sum(len(copy.device) * self._sizes[copy.group] for copy in job.copies)
        self._ended[direction].append(Completion(job.ticket, job.ok, size if job.ok else 0))

    def _move(self, direction: Direction, job: _Job) -> None:
        if job.moved:
            return
        job.after.wait()
        job.moved = True
        for copy in job.copies:
            device, host = self._device[copy.group].rows, self._host[copy.group].rows
            if direction is Direction.LOAD:
                device[copy.device] = host[copy.host]
            else:
                host[copy.host] = device[copy.device] if job.ok else np.nan


class SimGate:
    """A ``LayerGate``: all layers land at once."""

    def __init__(self, transfer: SimTransfer, tickets: frozenset[TicketId]) -> None:
        self._transfer = transfer
        self._tickets = tickets

    def wait(self, layer: LayerId) -> None:
        del layer
        self._transfer.land(self._tickets)


@dataclass(frozen=True, slots=True, eq=False)
class SimMemory:
    """Both tiers of a rank. A ``Memory`` of the assembly. ``home``: host pages of each group as
    peers write to them; none but where a group has its home there."""

    device: Sequence[PageBytes]
    arenas: Sequence[PageBytes]
    pages: tuple[Allocators, Allocators]
    transfer: SimTransfer
    home: Sequence[HostArena]

    @property
    def pools(self) -> SimPools:
        return SimPools(self.device)

    def assert_poisoned(self) -> None:
        """AssertionError where a device page that nobody owns has been written to since, or a host
        page that peers may write to."""
        pages = [*zip(self.device, self.pages[0], strict=True)]
        pages += [
            (of, ids)
            for of, ids, arena in zip(self.arenas, self.pages[1], self.home, strict=True)
            if arena.pages
        ]
        for at, (of, ids) in enumerate(pages):
            free = of.rows[ids.next(ids.available())]
            assert np.isnan(free).all(), f"a free page of pool {at} was written to"

    @classmethod
    def of(
        cls,
        spec: CacheSpec,
        device: Sequence[int],
        host: Sequence[int],
        adversary: Adversary,
        later: Later = _at_once,
    ) -> "SimMemory":
        near = [PageBytes(group, pages) for group, pages in zip(spec.groups, device, strict=True)]
        far, home = list[PageBytes](), list[HostArena]()
        for group, pages in zip(spec.groups, host, strict=True):
            home.append(HostArena(group, pages if group.at_home_on_host else 0))
            far.append(PageBytes(group, pages, home[-1] if group.at_home_on_host else None))
        ids = [PoisoningAllocator(of, later) for of in near]
        host_ids = [PoisoningAllocator(of) for of in far]
        return cls(near, far, (ids, host_ids), SimTransfer(spec, near, far, adversary), home)

"""The transfer engine: one worker thread per direction, which copies, or queues copies on a stream
of its device.

Owns its threads and every copy in flight. Must not choose what to copy, nor pin or free a page:
plans come complete, and the pages they name stay the caller's.
"""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from stratakv.core.ids import LayerId, PageIds, TicketId
from stratakv.memory.device_pools import DevicePages
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import CacheSpec
from stratakv.transfer.copier import Copier, CopyRoute
from stratakv.transfer.copy_plan import CopyPlan, Direction, Fence, GroupCopy, PageRows, RowCopy
from stratakv.transfer.engine import AtOnce, Completion, CopyOrder
from stratakv.transfer.numpy_copy import NumpyCopier
from stratakv.transfer.pinning import NotPinnedError

_logger = logging.getLogger(__name__)

_fastest: type[Copier] = NumpyCopier
try:
    from stratakv.transfer.compiled_copy import CompiledCopier

    _fastest = CompiledCopier
except ImportError:
    _logger.warning("stratakv.transfer._gather is not built: copies run in NumPy, more slowly")

DEFAULT_COPIER: Final[Copier] = _fastest()
AT_ONCE: Final[CopyOrder] = AtOnce()
_NOTHING_LANDED: Final = -1
_ALL_LANDED: Final = sys.maxsize


_Ended: TypeAlias = tuple[Completion, Fence]
"""Valid once the fence has passed."""
_POLL_S: Final = 0.0005


@dataclass(slots=True, eq=False)
class _Job:
    """A plan under way. Layers land in ascending order: all up to ``landed`` have been copied, or
    queued, and are there once their ``marks`` have passed."""

    ticket: TicketId
    copies: tuple[GroupCopy, ...]
    rows: tuple[RowCopy, ...]
    after: Fence
    size_bytes: int
    layers: frozenset[LayerId]
    landed: int = field(default=_NOTHING_LANDED)
    marks: dict[int, Fence] = field(default_factory=dict[int, Fence])

    def mark(self, layer: LayerId) -> Fence:
        """Of a layer that has landed; a backup has one for all."""
        return self.marks.get(layer) or self.marks[_ALL_LANDED]


class _Lane:
    """One direction: a queue, the thread that works it in order, and what has finished."""

    def __init__(self, name: str, work: Callable[[_Job], _Ended]) -> None:
        self._fatal: BaseException | None = None
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._finished: deque[_Ended] = deque()
        self._passed = 0
        self._closed = False
        # A daemon: a process that dies without close() must not hang in its last moment.
        # Only the thread holds ``work``, the engine's method: it ends, and the engine can be freed.
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def put(self, job: _Job) -> None:
        with self._changed:
            assert not self._closed, "submit() after close()"
            self._queue.append(job)
            self._changed.notify_all()

    def finished(self) -> int:
        """Asked by the owner's thread alone."""
        while self._passed < len(self._finished) and self._finished[self._passed][1].passed():
            self._passed += 1
        return self._passed

    def first(self, count: int) -> list[Completion]:
        return [self._finished[at][0] for at in range(count)]  # the thread may add behind them

    def pop(self, count: int) -> list[Completion]:
        self._passed -= count
        return [self._finished.popleft()[0] for _ in range(count)]

    def land(self, job: _Job, layer: int, mark: Fence) -> None:
        """Open every gate of ``job`` up to ``layer``; called by the worker, bytes first."""
        with self._changed:
            job.marks[layer] = mark
            job.landed = layer
            self._changed.notify_all()

    def wait(self, job: _Job, layer: LayerId) -> None:
        """Block until ``layer`` of ``job`` has landed or the lane has died."""
        with self._changed:
            self._changed.wait_for(lambda: job.landed >= layer or self._fatal is not None)

    def check(self) -> None:
        """AssertionError if the worker has died."""
        if self._fatal is not None:
            name = self._thread.name
            raise AssertionError(f"{name} failed: the cache is lost") from self._fatal

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        while self.finished() < len(self._finished):
            time.sleep(_POLL_S)

    def _run(self, work: Callable[[_Job], _Ended]) -> None:
        try:
            while (job := self._next()) is not None:
                self._finished.append(work(job))
        except BaseException as error:  # noqa: BLE001 - kept for the owner; waiters must wake
            with self._changed:
                self._fatal = error
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        """The oldest job, waiting for one; None when the lane is closed and drained."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return self._queue.popleft() if self._queue else None


class CpuTransferEngine:
    """A ``TransferEngine`` by real copies; ``copier`` and ``order`` belong together. All methods
    belong to one owner thread, except that gates may be waited on anywhere.

    A backup that raises completes with ``ok=False``. A load that raises is fatal: every later call,
    and every gate waiter, gets an AssertionError, since a reader may hold the landing pages.
    """

    def __init__(
        self,
        spec: CacheSpec,
        device_pools: DevicePages,
        arenas: Sequence[HostArena],
        copier: Copier = DEFAULT_COPIER,
        order: CopyOrder = AT_ONCE,
    ) -> None:
        assert tuple(arena.group for arena in arenas) == spec.groups, (
            "one arena per group, in order"
        )
        self._buffers = {
            (group.id, buffer.name): buffer for group in spec.groups for buffer in group.buffers
        }
        self._device_capacity = tuple(device_pools.pages)
        self._arenas = tuple(arenas)
        self._copier = copier
        self._order = order
        self._not_pinned = 0
        self._layers = [
            frozenset(layer for buffer in group.buffers for layer in buffer.layers)
            for group in spec.groups
        ]
        pairs = list(zip(arenas, self._layers, strict=True))
        self._whole = [CopyRoute.of(device_pools, arena, layers) for arena, layers in pairs]
        self._by_layer = [
            {layer: CopyRoute.of(device_pools, arena, (layer,)) for layer in layers}
            for arena, layers in pairs
        ]
        self._rows = {
            (arena.group.id, buffer.name, layer): CopyRoute.of(
                device_pools, arena, (layer,), buffer.name
            )
            for arena in arenas
            for buffer in arena.group.buffers
            for layer in buffer.layers
        }
        self._tickets = 0
        self._jobs: dict[TicketId, tuple[_Lane, _Job]] = {}
        self._lanes = {
            Direction.BACKUP: _Lane("stratakv-backup", self._back_up),
            Direction.LOAD: _Lane("stratakv-load", self._load),
        }

    def submit(self, plan: CopyPlan) -> TicketId:
        """Queue a plan; its arrays are copied, so the caller may reuse them at once.

        AssertionError for ids outside the pools, after ``close()``, and after a failed load.
        """
        self._check()
        copies = tuple(self._owned(copy) for copy in plan.copies if len(copy.device))
        rows = tuple(self._owned_rows(copy) for copy in plan.rows if len(copy.device))
        size = sum(len(copy.device) * self._arenas[copy.group].layout.page_bytes for copy in copies)
        size += sum(len(copy.device) * self._row_bytes(copy) for copy in rows)
        layers = frozenset(copy.layer for copy in rows)
        layers = layers.union(*(self._layers[copy.group] for copy in copies))
        job = _Job(TicketId(self._tickets), copies, rows, plan.after, size, layers)
        lane = self._lanes[plan.direction]
        lane.put(job)
        self._tickets += 1
        self._jobs[job.ticket] = lane, job
        return job.ticket

    def gate(self, tickets: Sequence[TicketId]) -> "CpuLayerGate":
        """AssertionError for a ticket that was never given, or was taken."""
        unknown = [ticket for ticket in tickets if ticket not in self._jobs]
        assert not unknown, f"tickets {unknown} are no plans in flight"
        return CpuLayerGate([self._jobs[ticket] for ticket in tickets])

    def ready(self, direction: Direction) -> int:
        self._check()
        return self._lanes[direction].finished()

    def peek(self, direction: Direction, count: int) -> list[Completion]:
        return self._ended(direction, count).first(count)

    def take(self, direction: Direction, count: int) -> list[Completion]:
        taken = self._ended(direction, count).pop(count)
        for completion in taken:
            del self._jobs[completion.ticket]
        return taken

    def _ended(self, direction: Direction, count: int) -> _Lane:
        self._check()
        ready = self._lanes[direction].finished()
        assert 0 <= count <= ready, f"{count} of {ready} finished plans"
        return self._lanes[direction]

    def close(self) -> None:
        """Finish what is queued and end the threads; may be called again. What has finished can
        still be taken. AssertionError if a load has failed, once the threads have ended."""
        for lane in self._lanes.values():
            lane.close()
        if self._not_pinned:
            _logger.warning("%d backups failed: host memory is not pinned", self._not_pinned)
            self._not_pinned = 0
        self._check()

    def _check(self) -> None:
        for lane in self._lanes.values():
            lane.check()

    def _owned(self, copy: GroupCopy) -> GroupCopy:
        device = _checked(copy.device, self._device_capacity[copy.group], "device")
        host = _checked(copy.host, self._arenas[copy.group].pages, "host")
        if len(device) > 1 and (device[1:] < device[:-1]).any():  # neighbours are cheaper in turn
            order = device.argsort()
            device, host = device[order], host[order]
        return GroupCopy(copy.group, device, host)

    def _owned_rows(self, copy: RowCopy) -> RowCopy:
        rows = self._buffers[copy.group, copy.buffer].rows_per_page
        ends = (
            PageRows(
                _checked(end.pages, capacity, tier), _checked(end.offsets, rows, f"{tier} offset")
            )
            for end, capacity, tier in (
                (copy.device, self._device_capacity[copy.group], "device"),
                (copy.host, self._arenas[copy.group].pages, "host"),
            )
        )
        return RowCopy(copy.group, copy.buffer, copy.layer, *ends)

    def _row_bytes(self, copy: RowCopy) -> int:
        return self._buffers[copy.group, copy.buffer].row_bytes

    def _back_up(self, job: _Job) -> _Ended:
        self._order.after(Direction.BACKUP, job.after)
        done = Completion(job.ticket, ok=True, bytes_moved=job.size_bytes)
        try:
            for copy in job.copies:
                self._copier.gather(self._whole[copy.group], copy.device, copy.host)
            for copy in job.rows:
                self._copier.gather_rows(self._row_route(copy), copy.device, copy.host)
        except NotPinnedError as fault:  # all later ones fail alike
            self._not_pinned += 1
            if self._not_pinned == 1:
                _logger.error("backup %d failed: %s; others are counted alone", job.ticket, fault)
            done = Completion(job.ticket, ok=False, bytes_moved=0)
        except Exception:  # what is not backed up is only not backed up; the log says why
            _logger.exception("backup %d failed", job.ticket)
            done = Completion(job.ticket, ok=False, bytes_moved=0)
        mark = self._order.mark(Direction.BACKUP)
        self._lanes[Direction.BACKUP].land(job, _ALL_LANDED, mark)
        return done, mark

    def _row_route(self, copy: RowCopy) -> CopyRoute:
        return self._rows[copy.group, copy.buffer, copy.layer]

    def _load(self, job: _Job) -> _Ended:
        self._order.after(Direction.LOAD, job.after)
        lane = self._lanes[Direction.LOAD]
        for layer in sorted(job.layers):
            for copy in job.copies:
                route = self._by_layer[copy.group].get(layer)
                if route is not None:
                    self._copier.scatter(route, copy.device, copy.host)
            for copy in job.rows:
                if copy.layer == layer:
                    self._copier.scatter_rows(self._row_route(copy), copy.device, copy.host)
            lane.land(job, layer, self._order.mark(Direction.LOAD))
        mark = self._order.mark(Direction.LOAD)
        lane.land(job, _ALL_LANDED, mark)
        return Completion(job.ticket, ok=True, bytes_moved=job.size_bytes), mark


class CpuLayerGate:
    """A ``LayerGate`` over plans of one engine; stays usable after they are taken."""

    def __init__(self, jobs: list[tuple[_Lane, _Job]]) -> None:
        self._jobs = jobs

    def wait(self, layer: LayerId) -> None:
        """Block until every gated plan is done with this layer; one that none of them touches
        never blocks. AssertionError if a load has failed."""
        for lane, job in self._jobs:
            # Plans finish in order and ``landed`` only grows, so most waits end at this compare.
            if layer not in job.layers:
                lane.check()
                continue
            if job.landed < layer:
                lane.wait(job, layer)
            lane.check()
            job.mark(layer).wait()


def _checked(pages: PageIds, capacity: int, tier: str) -> PageIds:
    """An owned copy of ``pages``; AssertionError unless int32 ids of [0, capacity)."""
    assert pages.dtype == np.int32, f"{tier} pages are {pages.dtype}"
    owned = pages.copy()
    # Unsigned, an id below zero is a huge one.
    inside = owned.view(np.uint32).max() < capacity
    assert inside, f"{tier} pages {pages.min()} to {pages.max()}, capacity {capacity}"
    return owned

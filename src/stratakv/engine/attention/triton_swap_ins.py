"""Swap-ins that a GPU plans itself: entries and rows stay on it, and no step waits for the CPU.

Owns the buffers' tables on the device, and what a launch is given. Plans are made by
``sparse.triton_swap_in``, which must be able to follow addresses of host pages.
"""

from dataclasses import dataclass

import numpy as np
import torch

from stratakv.core.ids import NONE, LayerId
from stratakv.engine.attention.step_meta import Ints
from stratakv.engine.attention.swap_ins import Missing, SwapShape
from stratakv.engine.tensors import on_device
from stratakv.sparse.triton_swap_in import (
    BufferTables,
    Planned,
    RowRoute,
    Selected,
    launch_plan,
    launch_rows,
)
from stratakv.transfer.copier import CopyRoute
from stratakv.transfer.host_rows import HostRows


class TritonSwapIns:
    """``SwapIns`` on ``device``."""

    def __init__(self, host: HostRows, shape: SwapShape, device: torch.device) -> None:
        self.host, self.shape, self.device = host, shape, device
        rows, size = len(shape.places.host), shape.buffer.entries
        order = torch.arange(size, dtype=torch.int16)
        self._resident = self._filled(shape.plans, rows, size)
        self._lru = order.repeat(shape.plans, rows, 1).to(device)
        self._marks = self._filled(rows, shape.most_entries)
        self._places = self._filled(*shape.places.host.shape)
        self._buffer = self._filled(*shape.places.buffer.shape)

    def _filled(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, NONE, dtype=torch.int32, device=self.device)

    def begin(self, rows: Ints) -> None:
        at, now = on_device(rows.astype(np.int64), self.device), self.shape.places
        self._places[at] = on_device(now.host[rows], self.device)
        self._buffer[at] = on_device(now.buffer[rows], self.device)

    def clear(self, row: int) -> None:
        self._resident[:, row] = NONE
        order = torch.arange(self._lru.shape[2], dtype=torch.int16, device=self.device)
        self._lru[:, row] = order

    def tables(self, plan: int) -> BufferTables:
        """Of one selection of a step."""
        resident, lru = self._resident[plan], self._lru[plan]
        return BufferTables(self._places, self._buffer, resident, lru, self._marks)

    def bucket(self, rows: Ints, at: Ints) -> "TritonBucket":
        some = np.full(len(rows), NONE, np.int32)
        some[at] = rows[at]
        return TritonBucket(self, on_device(some, self.device))


@dataclass(frozen=True, slots=True, eq=False)
class TritonBucket:
    """A ``SpilledBucket``. rows: int32 [b], NONE where a request is not spilled."""

    swap_ins: TritonSwapIns
    rows: torch.Tensor

    def read(
        self,
        plan: int,
        found: torch.Tensor,
        entries: torch.Tensor | None,
        hidden: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Missing]:
        its, (count, width) = self.swap_ins, found.shape
        assert width <= its.shape.top_k, f"{width} entries of {its.shape.top_k}"
        if entries is None:
            entries = torch.arange(width, device=found.device).expand(count, -1)
        asked = Selected(
            self.rows,
            entries if entries.stride(1) == 1 else entries.contiguous(),
            None if hidden is None else hidden.contiguous().view(torch.uint8),
        )
        tables = its.tables(plan)
        planned = room_of(found, tables.resident.shape[1])
        launch_plan(asked, tables, planned, its.shape.page_rows)
        return planned.reads, TritonMissing(its, planned)


def room_of(found: torch.Tensor, size: int) -> Planned:
    """For a plan over buffers of ``size`` entries, to begin with ``found`` int64 [b, k]."""
    ints, each = torch.int32, (len(found), size)
    return Planned(
        reads=found.clone(memory_format=torch.contiguous_format),
        targets=found.new_empty(found.shape),
        sources=found.new_empty(found.shape),
        misses=found.new_empty(len(found), dtype=ints),
        selection=found.new_empty(found.shape, dtype=ints),
        positions=found.new_empty(found.shape, dtype=ints),
        missed=found.new_empty(found.shape, dtype=torch.uint8),
        order=found.new_empty(found.shape, dtype=ints),
        needed=found.new_empty(each, dtype=torch.uint8),
        after=found.new_empty(each, dtype=torch.int16),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TritonMissing:
    """A ``Missing`` of which only the device knows how much it is."""

    swap_ins: TritonSwapIns
    planned: Planned

    def load(self, layer: LayerId) -> None:
        route = row_route(self.swap_ins.host.route(layer))
        launch_rows(route, self.planned, self.swap_ins.shape.page_rows)


def row_route(route: CopyRoute) -> RowRoute:
    """Of a route of one segment."""
    ((base, stride, offset, size),) = route.rows.tolist()
    (segment,) = route.segments
    rows = route.group.buffers[segment.buffer].rows_per_page
    return RowRoute(
        target=base,
        source=route.arena_address + offset,
        target_page_bytes=stride,
        source_page_bytes=route.arena.shape[1],
        row_bytes=size // rows,
    )

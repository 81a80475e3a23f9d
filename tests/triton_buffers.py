"""The tensors that a launch of the swap-in's plan takes, for tests: over NumPy's tables."""

from dataclasses import dataclass, fields

import numpy as np
import torch

from stratakv.core.ids import NONE
from stratakv.engine.attention.triton_swap_ins import room_of
from stratakv.sparse.reads import EntryPlaces
from stratakv.sparse.swap_in import SwapIn
from stratakv.sparse.triton_swap_in import BufferTables, Planned, Selected, launch_plan

UNREAD = -77


def of_numpy(array):
    return torch.from_numpy(np.ascontiguousarray(array))


@dataclass(slots=True)
class PlanTensors:
    asked: Selected
    tables: BufferTables
    planned: Planned
    page_rows: int

    @classmethod
    def of(cls, rows, entries, hidden, places, resident, lru):
        """``entries`` int64 [R, K], ``hidden`` bool [R, K] or None, ``places`` as ``EntryPlaces``.
        Nothing that is to be filled is what it should be."""
        size, whole = resident.shape[1], places.host.shape[1] * places.page_rows
        marks = np.full((len(resident), whole), -1, np.int32)
        given = (places.host, places.buffer, resident, lru, marks)
        found = torch.full(entries.shape, UNREAD, dtype=torch.int64)
        planned = room_of(found, size)
        for field in fields(planned):
            getattr(planned, field.name).fill_(UNREAD % 128)
        planned.reads.fill_(UNREAD)
        hides = None if hidden is None else of_numpy(hidden.view(np.uint8))
        asked = Selected(of_numpy(rows), of_numpy(entries), hides)
        return cls(asked, BufferTables(*map(of_numpy, given)), planned, places.page_rows)

    def launch(self):
        launch_plan(self.asked, self.tables, self.planned, self.page_rows)
        assert (self.tables.marks == -1).all()
        return self.planned

    def copies(self):
        """[(request, device row, host row)] in order."""
        return [
            (request, *ends)
            for request, count in enumerate(self.planned.misses.tolist())
            for ends in zip(
                self.planned.targets[request, :count].tolist(),
                self.planned.sources[request, :count].tolist(),
                strict=True,
            )
        ]


def triton_planner(rows, selection, resident, lru, marks):
    """A ``Planner`` by the kernel: everything lies on the host, in pages of one row."""
    del marks
    most = int(max(selection.max(initial=0), resident.max(initial=0))) + 1
    places = EntryPlaces(np.zeros((len(resident), most), np.int32), np.zeros_like(resident), 1)
    hidden = selection == NONE
    entries = np.where(hidden, 0, selection).astype(np.int64)
    tensors = PlanTensors.of(rows, entries, hidden, places, resident.copy(), lru.copy())
    planned = tensors.launch()
    missed = planned.missed.numpy().astype(np.bool_)
    return SwapIn(selection, planned.positions.numpy(), missed, tensors.tables.lru.numpy()[rows])

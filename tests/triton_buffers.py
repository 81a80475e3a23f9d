"""The tensors that a launch of the swap-in's plan takes, for tests: over NumPy's tables."""

from dataclasses import dataclass

import numpy as np
import torch

from stratakv.core.ids import NONE
from stratakv.sparse.reads import EntryPlaces
from stratakv.sparse.swap_in import SwapIn
from stratakv.sparse.triton_swap_in import launch_plan

UNREAD = -77


@dataclass(slots=True)
class PlanTensors:
    rows: torch.Tensor
    entries: torch.Tensor
    hidden: torch.Tensor
    host: torch.Tensor
    buffer: torch.Tensor
    resident: torch.Tensor
    lru: torch.Tensor
    marks: torch.Tensor
    selection: torch.Tensor
    positions: torch.Tensor
    missed: torch.Tensor
    found: torch.Tensor
    needed: torch.Tensor
    after: torch.Tensor
    order: torch.Tensor
    targets: torch.Tensor
    sources: torch.Tensor
    misses: torch.Tensor

    @classmethod
    def of(cls, rows, entries, hidden, places, resident, lru):
        """``entries`` int64 [R, K], ``hidden`` bool [R, K] or None, ``places`` as ``EntryPlaces``.
        Nothing that is to be filled is what it should be."""
        shape, size = entries.shape, resident.shape[1]
        hides = np.zeros(shape, np.uint8) if hidden is None else hidden.view(np.uint8)
        whole = places.host.shape[1] * places.page_rows
        given = (rows, entries, hides, places.host, places.buffer, resident, lru)
        return cls(
            *(torch.from_numpy(np.ascontiguousarray(array)) for array in given),
            torch.full((len(resident), whole), -1, dtype=torch.int32),
            torch.full(shape, UNREAD, dtype=torch.int32),
            torch.full(shape, UNREAD, dtype=torch.int32),
            torch.full(shape, 9, dtype=torch.uint8),
            torch.full(shape, UNREAD, dtype=torch.int64),
            torch.full((shape[0], size), 7, dtype=torch.uint8),
            torch.full((shape[0], size), UNREAD, dtype=torch.int16),
            torch.full(shape, UNREAD, dtype=torch.int32),
            torch.full(shape, UNREAD, dtype=torch.int64),
            torch.full(shape, UNREAD, dtype=torch.int64),
            torch.full((shape[0],), UNREAD, dtype=torch.int32),
        )

    def copies(self):
        """[(request, device row, host row)] in order."""
        return [
            (request, *ends)
            for request, count in enumerate(self.misses.tolist())
            for ends in zip(
                self.targets[request, :count].tolist(),
                self.sources[request, :count].tolist(),
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
    launch_plan(tensors, 1, hides=True)
    assert (tensors.marks == -1).all()
    return SwapIn(
        selection,
        tensors.positions.numpy(),
        tensors.missed.numpy().astype(np.bool_),
        tensors.lru.numpy()[rows],
    )

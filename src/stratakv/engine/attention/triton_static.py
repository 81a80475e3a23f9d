"""Attention of decode steps that are recorded once and replayed: buffers that stay where they are.

Owns one group's buffers, which all captured sizes share, and what each step writes into them. Must
not choose a size (``graph_choice``), nor record anything.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from stratakv.engine.attention.kernels import AttentionGroup
from stratakv.engine.attention.paged_layer import Scratch
from stratakv.engine.attention.step_meta import StepShape
from stratakv.engine.attention.triton_kernels import (
    SPLIT_TOKENS,
    WORK_FIELDS,
    PagedWork,
    Partial,
    TritonAttention,
    WorkTensors,
)
from stratakv.spec.retention import first_key


class StaticGroup:
    """``rows``: of the largest size. ``most_tokens``: of any context. ``partial``: of graphs alone:
    who grows it after one was recorded takes memory from it."""

    def __init__(
        self,
        group: AttentionGroup,
        rows: int,
        most_tokens: int,
        device: torch.device,
        partial: Partial,
    ) -> None:
        self._group, self._partial = group, partial
        positions = np.arange(most_tokens)
        low = first_key(group.rule, positions)
        size = group.page_tokens
        width = int((positions // size - low // size).max()) + 1
        self._splits = positions // SPLIT_TOKENS - low // SPLIT_TOKENS + 1
        self._buffers = WorkTensors(
            slots=torch.zeros(rows, dtype=torch.int64, device=device),
            first=torch.zeros(rows, dtype=torch.int32, device=device),
            table=torch.zeros(rows, width, dtype=torch.int32, device=device),
            decoding=torch.zeros(rows, WORK_FIELDS, dtype=torch.int32, device=device),
        )

    def attention(
        self, shape: StepShape, table: npt.NDArray[np.int32], tokens: int
    ) -> TritonAttention:
        """Over the buffers, for steps of as many rows as ``shape`` has, of one token each, and
        contexts of ``tokens`` at most. ``shape`` and ``table`` fill them until ``fill`` does."""
        step = self.fill(shape, table)
        most = replace(step, splits=int(self._splits[:tokens].max()))
        every, rows = self._buffers, len(shape.rows)
        tensors = WorkTensors(
            every.slots[:rows], every.first[:rows], every.table[:rows], every.decoding[:rows]
        )
        return TritonAttention(most, tensors, Scratch(), self._partial)

    def fill(self, shape: StepShape, table: npt.NDArray[np.int32]) -> PagedWork:
        """With a step's rows. What lies behind them, and behind a row's pages, is not read."""
        step, every = PagedWork.of(self._group, shape, table), self._buffers
        found = WorkTensors.of(step, every.slots.device)
        rows, width = found.table.shape
        every.slots[:rows] = found.slots
        every.first[:rows] = found.first
        every.table[:rows, :width] = found.table
        every.decoding[:rows] = found.decoding
        return step

"""Rows of requests that are spilled, as attention wants them: on the device.

Owns which of a step's requests are spilled, and the tables that it is planned with. What a decoding
request selects is read by ``swap_ins``; a chunk of a prompt reads its whole context once. Whatever
place it is, rows come in the order in which they were selected, so that the arithmetic is that of a
request which is resident. Must not choose what is selected.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import NONE, LayerId, PageIds
from stratakv.engine.attention.step_meta import Ints, StepShape
from stratakv.engine.attention.swap_ins import SpilledBucket, SwapIns, SwapShape
from stratakv.engine.tensors import on_device
from stratakv.transfer.host_rows import HostRows

Table = npt.NDArray[np.int32]


class SpilledRows:
    """``table`` int32 [rows, pages] and the places of ``shape`` are the group's. ``page_tokens``: a
    row of a page may stand for several."""

    def __init__(
        self,
        host: HostRows,
        table: Callable[[], Table],
        shape: SwapShape,
        page_tokens: int,
        swap_ins: SwapIns,
    ) -> None:
        self.host, self.swap_ins = host, swap_ins
        self.page_rows = shape.page_rows
        self._table = table
        self._places = shape.places
        self._page_tokens = page_tokens
        self._times = shape.places.times.copy()

    def step(self, shape: StepShape) -> "SpilledStep | None":
        """None where every request of the step is resident."""
        spilled = self._places.rows[shape.rows]
        if not spilled.any():
            return None
        rows = shape.rows[spilled]
        for row in rows[self._times[rows] != self._places.times[rows]].tolist():
            self.swap_ins.clear(row)  # what is there was another request's, or is from before
            self._times[row] = self._places.times[row]
        self.swap_ins.begin(rows)
        return SpilledStep(self, shape.rows, spilled, self._filled(rows, shape.ends[spilled]))

    def _filled(self, rows: Ints, ends: Ints) -> Table:
        """The table, with the page that a request writes in the place of those that it has not."""
        table = self._table().copy()
        newest = table[rows, (ends - 1) // self._page_tokens]
        away = self._places.host[rows] != NONE
        table[rows] = np.where(away, newest[:, None], table[rows])
        return table

    def host_pages(self, row: int, pages: int) -> PageIds:
        """Of the first ``pages`` of a request those on the host, NONE elsewhere."""
        return self._places.host[row, :pages]


@dataclass(frozen=True, slots=True, eq=False)
class SpilledStep:
    """One step of ``requests`` [R], of which some are spilled: ``which``, bool [R]. ``table``: to
    plan with; a page that is not on the device has another one in its place there, that may be read
    and means nothing."""

    rows: SpilledRows
    requests: Ints
    which: npt.NDArray[np.bool_]
    table: Table

    def bucket(self, some: Ints) -> SpilledBucket | None:
        """Of the step's requests ``some``; None where none of them is spilled."""
        at = np.flatnonzero(self.which[some])
        return self.rows.swap_ins.bucket(self.requests[some], at) if len(at) else None

    def context(
        self, layer: LayerId, row: int, pool: torch.Tensor, found: torch.Tensor
    ) -> torch.Tensor:
        """All entries of a request, [n, d]: those of ``pool`` at ``found`` [n], by ``table``, but
        for what lies on the host."""
        size = self.rows.page_rows
        pages = self.rows.host_pages(row, -(-len(found) // size))
        away = np.flatnonzero(pages != NONE)
        out = pool[found]
        if not len(away):
            return out
        read = torch.from_numpy(self.rows.host.pages(layer, pages[away]))
        read = read.to(pool.device).view(pool.dtype).view(len(away) * size, -1)
        places = (away[:, None] * size + np.arange(size)).ravel()
        places = places[places < len(found)]  # all, but for some of the last page
        out[on_device(places, pool.device)] = read[: len(places)]
        return out


@dataclass(frozen=True, slots=True, eq=False)
class SpilledContext:
    """What the chunk of the request at ``row`` attends to: ``rows`` int64 [n] of its entries by
    table, oldest first."""

    step: SpilledStep
    row: int
    rows: torch.Tensor

    def pool(self, layer: LayerId, pool: torch.Tensor) -> torch.Tensor:
        """Its entries [n, d] by themselves, in place of the ``pool`` that has some of them."""
        return self.step.context(layer, self.row, pool, self.rows)

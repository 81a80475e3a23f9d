"""Rows of requests that are spilled, as attention wants them: on the device.

Owns the buffers' contents, for each selection that a step makes. What a decoding request selects
is looked up in three places: its own device pages, its buffer, and, for what is missing, the host,
from where it is copied into the buffer first. A chunk of a prompt reads its whole context once.
Whatever place it is, rows come in the order in which they were selected, so that the arithmetic is
that of a request which is resident. Must not choose what is selected.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import NONE, LayerId, PageIds
from stratakv.engine.step_meta import Ints, StepShape
from stratakv.memory.block_table import SpilledPages
from stratakv.sparse.hot_buffer import HotBuffers, HotBufferShape
from stratakv.sparse.reads import EntryIds, EntryPlaces, Hidden
from stratakv.transfer.copy_plan import PageRows
from stratakv.transfer.host_rows import HostRows

Table = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Missing:
    """Rows that must be copied before a selection is read; alike in all layers that share it."""

    device: PageRows
    host: PageRows


class SpilledRows:
    """``table`` int32 [rows, pages] and ``places`` are the group's; a page has ``page_rows`` rows
    of it, each of which may stand for several of its ``page_tokens``. ``plans``: selections that
    a step makes, of ``top_k`` rows at most each."""

    def __init__(
        self,
        host: HostRows,
        table: Callable[[], Table],
        places: SpilledPages,
        page_rows: int,
        page_tokens: int,
        top_k: int,
        plans: int,
    ) -> None:
        self.host = host
        self._table = table
        self._places = places
        self.page_rows = page_rows
        self._page_tokens = page_tokens
        rows, pages = places.host.shape
        entries = places.buffer.shape[1] * page_rows
        shape = HotBufferShape(entries=entries, page_rows=page_rows, top_k=top_k)
        self._buffers = HotBuffers(shape, plans, rows, pages * page_rows)
        self._times = places.times.copy()

    def step(self, shape: StepShape) -> "SpilledStep | None":
        """None where every request of the step is resident."""
        spilled = self._places.rows[shape.rows]
        if not spilled.any():
            return None
        rows = shape.rows[spilled]
        for row in rows[self._times[rows] != self._places.times[rows]].tolist():
            self._buffers.clear(row)  # what is there was another request's, or is from before
            self._times[row] = self._places.times[row]
        return SpilledStep(self, shape.rows, spilled, self._filled(rows, shape.ends[spilled]))

    def _filled(self, rows: Ints, ends: Ints) -> Table:
        """The table, with the page that a request writes in the place of those that it has not."""
        table = self._table().copy()
        newest = table[rows, (ends - 1) // self._page_tokens]
        away = self._places.host[rows] != NONE
        table[rows] = np.where(away, newest[:, None], table[rows])
        return table

    def read(
        self, plan: int, rows: Ints, entries: EntryIds, hidden: Hidden | None, found: EntryIds
    ) -> Missing:
        """Write into ``found`` [n, k] the device rows of those ``entries`` of requests ``rows``
        that lie on the host; what to copy there first."""
        which, places = rows.astype(np.int32), self._places
        lie = EntryPlaces(places.host, places.buffer, self.page_rows)
        selection = self._buffers.reads.away(lie, which, entries, hidden)
        swap = self._buffers.swap_in(plan, which, selection)
        copies = self._buffers.reads.place(lie, which, swap, found)
        return Missing(
            PageRows(copies.device_pages, copies.device_offsets),
            PageRows(copies.host_pages, copies.host_offsets),
        )

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

    def bucket(self, some: Ints) -> "SpilledBucket | None":
        """Of the step's requests ``some``; None where none of them is spilled."""
        at = np.flatnonzero(self.which[some])
        return SpilledBucket(self, self.requests[some], at) if len(at) else None

    def decoding(
        self,
        plan: int,
        rows: Ints,
        at: Ints,
        found: torch.Tensor,
        entries: torch.Tensor | None,
        hidden: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Missing]:
        """Where requests ``rows`` [b] read their ``entries`` [b, k], all from the first on where
        that is None; ``found`` [b, k] are the rows by ``table``, right for what is on the device.
        ``at``: which of them are spilled. ``hidden``: what is nobody's entry."""
        everyone = len(at) == len(rows)
        some = slice(None) if everyone else at
        if entries is None:
            chosen = np.broadcast_to(np.arange(found.shape[1]), (len(at), found.shape[1]))
        else:
            chosen = entries.numpy(force=True)[some]
        hides = None if hidden is None else hidden.numpy(force=True)[some]
        read = found.to("cpu", copy=True, memory_format=torch.contiguous_format)
        mine = read.numpy() if everyone else read.numpy()[at]
        missing = self.rows.read(plan, rows[some], chosen, hides, mine)
        if not everyone:
            read.numpy()[at] = mine
        return read.to(found.device), missing

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
        read = read.to(pool.device).view(pool.dtype).view(len(away), size, -1)
        places = torch.from_numpy(away[:, None] * size + np.arange(size)).to(pool.device).view(-1)
        inside = places < len(found)
        out[places[inside]] = read.flatten(0, 1)[inside]
        return out


@dataclass(frozen=True, slots=True, eq=False)
class SpilledBucket:
    """Of the decoding requests ``rows`` [b] those at ``at`` are spilled."""

    step: SpilledStep
    rows: Ints
    at: Ints

    def read(
        self,
        plan: int,
        found: torch.Tensor,
        entries: torch.Tensor | None,
        hidden: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Missing]:
        """As ``SpilledStep.decoding``."""
        return self.step.decoding(plan, self.rows, self.at, found, entries, hidden)


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

"""How simulated attention reads the pages of a request that lie on the host: whole, as a chunk of a
prompt does, and some rows of them through the request's buffer on the device, as decoding does.

Owns the buffers' contents. Must not know what a row should hold.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, GroupId
from stratakv.memory.block_table import BlockTable, SpilledPages
from stratakv.sparse.hot_buffer import HotBuffers, HotBufferShape
from stratakv.sparse.reads import device_rows

TOP_K: Final = 3
Floats = npt.NDArray[np.float32]


class SpilledReads:
    """``device`` and ``host``: float32 [pages, page_tokens, row] of each group. ``read``: rows that
    were copied to buffers, and ``kept`` those that were there."""

    def __init__(
        self, tables: BlockTable, device: Sequence[Floats], host: Sequence[Floats], page: int
    ) -> None:
        self._device, self._host, self._page = device, host, page
        self.read = self.kept = 0
        self._buffers: Mapping[GroupId, HotBuffers] = {
            group: HotBuffers(
                HotBufferShape(entries=page * spilled.buffer.shape[1], page_rows=page, top_k=TOP_K),
                1,
                tables.rows,
                tables.max_pages * page,
            )
            for group, spilled in tables.spilled.items()
        }
        self._times = {group: of.times.copy() for group, of in tables.spilled.items()}

    def fill(self, group: GroupId, spilled: SpilledPages, row: int, first: int, out: Floats) -> int:
        """Write to ``out`` [pages, page_tokens, row], pages from ``first`` on of the request at
        ``row``, those that lie on the host; how many these are."""
        pages = spilled.host[row, first : first + len(out)]
        away = np.flatnonzero(pages != NONE)
        out[away] = self._host[group][pages[away]]
        if len(away):
            self._through_the_buffer(group, spilled, row, first + away, out[away])
        return len(away)

    def _through_the_buffer(
        self,
        group: GroupId,
        spilled: SpilledPages,
        row: int,
        indices: npt.NDArray[np.intp],
        there: Floats,
    ) -> None:
        """The newest row of ``indices``, pages on the host that hold ``there``, and two that move
        on with the step."""
        buffers, size = self._buffers[group], self._page
        if self._times[group][row] != spilled.times[row]:
            buffers.clear(row)  # what is there was another request's, or is from before
            self._times[group][row] = spilled.times[row]
        count = len(indices) * size
        before = self.read + self.kept
        chosen = np.unique([count - 1, 7 * before % count, (7 * before + 3) % count])
        entries = (indices[chosen // size] * size + chosen % size).astype(np.int32)
        selection = np.full((1, TOP_K), NONE, np.int32)
        selection[0, : len(entries)] = entries
        at = np.array([row], np.int32)
        swap = buffers.swap_in(0, at, selection)
        rows = device_rows(swap.positions, spilled.buffer[at], size)[0, : len(entries)]
        pool = self._device[group].reshape(-1, self._device[group].shape[-1])
        wanted = there.reshape(-1, there.shape[-1])[chosen]
        missed = swap.missed[0, : len(entries)]
        pool[rows[missed]] = wanted[missed]
        assert (pool[rows] == wanted).all(), f"the buffer of row {row} has other rows"
        self.read += int(missed.sum())
        self.kept += int((~missed).sum())

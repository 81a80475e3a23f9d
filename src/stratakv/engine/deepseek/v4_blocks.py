"""Which blocks a step closes, which tokens stay open, and where each row of them lies.

Owns the index arithmetic of compressed blocks, vectorised over requests. Must not compute entries
(``v4_compress``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import NONE
from stratakv.engine.attention.step_meta import Ints, StepShape
from stratakv.engine.deepseek.common_rope import Rope
from stratakv.engine.deepseek.v4_step import BlockStep, ClosingBlocks
from stratakv.engine.tensors import on_device

Table = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Pages of every row, int32 [rows, pages]: of the anchor, of the groups that have the entries
    of each ratio, and of the window group; the live page that a row's open blocks are on before and
    after the step, int32 [rows]."""

    anchor: Table
    entries: Mapping[int, Table]
    local: Table
    source: Table
    own: Table


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlanner:
    """``ratio`` r tokens make a block; ``overlaps``: an entry also takes from the block before."""

    ratio: int
    overlaps: bool
    page_tokens: int
    rope: Rope
    device: torch.device
    dtype: torch.dtype

    def plan(self, shape: StepShape, tables: Tables) -> BlockStep:
        starts, ends, ratio = shape.starts, shape.ends, self.ratio
        # An open block is gone on with where it lies: no page of it was ever shared.
        begun = shape.rows[starts % ratio > 0]
        assert (tables.source[begun] == tables.own[begun]).all(), "an open block has moved"
        counts = ends // ratio - starts // ratio
        open_from = np.repeat(ends // ratio * ratio, ends - starts)
        kept = np.flatnonzero(shape.positions >= open_from)
        return BlockStep(
            closing=self._closing(shape, counts, tables) if counts.any() else None,
            kept_tokens=on_device(kept, self.device),
            kept_pages=on_device(present(tables.own[shape.token_rows[kept]]), self.device),
            kept_rows=on_device(shape.positions[kept] % ratio, self.device),
        )

    def _closing(self, shape: StepShape, counts: Ints, tables: Tables) -> ClosingBlocks:
        ratio, size = self.ratio, self.page_tokens
        request = np.repeat(np.arange(len(counts)), counts)
        begins = np.cumsum(counts) - counts
        block = np.arange(len(request)) + (shape.starts // ratio - begins)[request]
        row, at = shape.rows[request], block * ratio
        inside = np.arange(ratio)
        positions = at[:, None] + inside
        early = positions < shape.starts[request][:, None]
        tokens = positions + (shape.offsets - shape.starts)[request][:, None]
        carried = np.flatnonzero(early)
        first, none, last = self._neighbours(block, begins[counts > 0])
        table = tables.entries[ratio]
        rows = index_rows = on_device(self._entry_rows(table, row, at), self.device)
        if table is not tables.anchor:
            index_rows = on_device(self._entry_rows(tables.anchor, row, at), self.device)
        return ClosingBlocks(
            tokens=on_device(np.where(early, 0, tokens), self.device),
            carried=(
                on_device(carried, self.device),
                on_device(present(tables.own[row[carried // ratio]]), self.device),
                on_device(carried % ratio, self.device),
            ),
            first=on_device(first, self.device),
            first_pages=on_device(
                present(tables.local[row[first], (at[first] - 1) // size]), self.device
            ),
            none=on_device(none, self.device),
            rows=rows,
            index_rows=index_rows,
            rotation=self.rope.at(on_device(at, self.device), self.dtype),
            last=on_device(last, self.device),
            last_pages=on_device(present(tables.local[row[last], at[last] // size]), self.device),
        )

    def _entry_rows(self, table: Table, row: Ints, at: Ints) -> Ints:
        """Of the blocks that begin at tokens ``at``."""
        page, inside = np.divmod(at, self.page_tokens)
        return present(table[row, page]) * (self.page_tokens // self.ratio) + inside // self.ratio

    def _neighbours(self, block: Ints, begins: Ints) -> tuple[Ints, Ints, Ints]:
        """Blocks whose predecessor lies on a page, those that have none, and those that are the
        last ones closed on their page. begins: the first block of each request."""
        if not self.overlaps:
            nothing = np.empty(0, np.int64)
            return nothing, nothing, nothing
        ends_page = (block + 1) * self.ratio % self.page_tokens == 0
        ends_page[begins[1:] - 1] = True
        ends_page[-1] = True
        inner = block[begins] > 0
        return begins[inner], begins[~inner], np.flatnonzero(ends_page)


def present(pages: Table) -> Ints:
    """AssertionError for a page that is not there."""
    assert pages.size == 0 or pages.min() > NONE, "a token that is needed has no page"
    return pages.astype(np.int64)

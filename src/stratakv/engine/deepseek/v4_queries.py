"""Which keys each query of a step may see, as rows of the pools.

Owns padding and grouping: every choice here changes speed and memory, none a result. Decoding rows
are planned together, prefill chunks one by one. Must not bound what scoring takes
(``engine.attention.scratch_limit``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from stratakv.engine.attention.spilled_rows import SpilledContext, SpilledStep
from stratakv.engine.attention.step_meta import Ints, StepShape
from stratakv.engine.attention.step_plan import split_widths
from stratakv.engine.deepseek.v4_blocks import Table, Tables, present
from stratakv.engine.deepseek.v4_step import Entries, Keys, Queries
from stratakv.engine.tensors import on_device
from stratakv.spec.retention import Retention, first_key

MOST_QUERIES: Final = 128
"""Of a chunk, planned together. More share more entries, but score more latents that lie outside of
their windows."""
SLACK_KEYS: Final = 2048
"""Padding among decoding rows that costs about as much as one more round of calls."""


@dataclass(frozen=True, slots=True, eq=False)
class QueryPlanner:
    """``rule``: of the window group. ``ratios``: of compressed entries, the finest first, and
    ``indexed`` the one of those that an indexer selects from."""

    rule: Retention
    ratios: tuple[int, ...]
    indexed: int | None
    page_tokens: int
    device: torch.device

    def plan(
        self, shape: StepShape, tables: Tables, spilled: SpilledStep | None
    ) -> Iterator[Queries]:
        if shape.decodes:
            yield from self._decodes(shape, tables, spilled)
        for request in range(shape.decodes, len(shape.rows)):
            away = None
            if spilled is not None and spilled.which.item(request):
                away = self._context(shape, request, tables, spilled)
            yield from self._chunk(shape, request, tables, away)

    def _decodes(
        self, shape: StepShape, tables: Tables, spilled: SpilledStep | None
    ) -> Iterator[Queries]:
        """Rows of about one length together, the longest first."""
        positions = shape.starts[: shape.decodes]
        seen = {ratio: (positions + 1) // ratio for ratio in self.ratios}
        widths = sum(seen.values(), np.ones_like(positions))
        order = np.argsort(-widths, kind="stable")
        for part in split_widths(widths[order], SLACK_KEYS):
            some = order[part]
            rows = shape.rows[some]
            yield Queries(
                tokens=on_device(some, self.device),
                local=self._local_of_rows(rows, positions[some], tables.local),
                entries={
                    ratio: self._entries_of_rows(rows, counts[some], ratio, tables)
                    for ratio, counts in seen.items()
                    if counts[some].any()
                },
                spilled=None if spilled is None else spilled.bucket(some),
            )

    def _local_of_rows(self, rows: Ints, positions: Ints, table: Table) -> Keys:
        """Keys [n, m] of one query per row; padding repeats the query's own key."""
        first = first_key(self.rule, positions)
        columns = np.arange(int((positions - first).max()) + 1)
        keys = np.minimum(first[:, None] + columns, positions[:, None])
        found = self._slots(rows[:, None], keys, table)
        return self._keys(found, columns > (positions - first)[:, None])

    def _entries_of_rows(self, rows: Ints, counts: Ints, ratio: int, tables: Tables) -> Entries:
        """Entries [n, m] of one query per row."""
        table = tables.entries[ratio]
        index = None
        if ratio == self.indexed and table is not tables.anchor:
            index = self._padded(rows, counts, ratio, tables.anchor)
        return self._entries(self._padded(rows, counts, ratio, table), counts, index)

    def _padded(self, rows: Ints, counts: Ints, ratio: int, table: Table) -> Ints:
        """Padding reads the row's own first entry again, and where it has none that of the row that
        has the most, since one is written."""
        width, per_page = int(counts.max()), self.page_tokens // ratio
        pages = table[rows, : -(-width // per_page)].astype(np.int64)
        found = (pages[:, :, None] * per_page + np.arange(per_page)).reshape(len(rows), -1)
        hidden = np.arange(width) >= counts[:, None]
        filler = np.where(counts > 0, found[:, 0], found[counts.argmax(), 0])
        found = np.where(hidden, filler[:, None], found[:, :width])
        assert found.min() >= 0, "an entry that is needed has no page"
        return found

    def _context(
        self, shape: StepShape, request: int, tables: Tables, spilled: SpilledStep
    ) -> SpilledContext:
        """All indexed entries that any query of a chunk sees."""
        assert self.indexed is not None, "entries are away that no indexer selects from"
        row, ratio = shape.rows.item(request), self.indexed
        count = int(shape.ends[request]) // ratio
        rows = self._entry_rows(row, count, ratio, tables.entries[ratio])
        return SpilledContext(spilled, row, on_device(rows, self.device))

    def _chunk(
        self, shape: StepShape, request: int, tables: Tables, context: SpilledContext | None
    ) -> Iterator[Queries]:
        start, end = int(shape.starts[request]), int(shape.ends[request])
        offset, row = int(shape.offsets[request]) - start, shape.rows[request]
        at = start
        while at < end:
            stop = min(end, at + MOST_QUERIES)
            positions = np.arange(at, stop)
            first = first_key(self.rule, positions)
            keys = np.arange(int(first[0]), stop)
            hidden = (keys > positions[:, None]) | (keys < first[:, None])
            yield Queries(
                tokens=slice(offset + at, offset + stop),
                local=self._keys(self._slots(row, keys, tables.local), hidden),
                entries={
                    ratio: self._entries_of_chunk(row, positions, ratio, tables, context)
                    for ratio in self.ratios
                    if stop >= ratio
                },
                context=context,
            )
            at = stop

    def _entries_of_chunk(
        self,
        row: int,
        positions: Ints,
        ratio: int,
        tables: Tables,
        context: SpilledContext | None,
    ) -> Entries:
        """Entries [m] that any of one row's queries sees."""
        counts, table = (positions + 1) // ratio, tables.entries[ratio]
        count, index = int(counts[-1]), None
        if ratio == self.indexed and table is not tables.anchor:
            index = self._entry_rows(row, count, ratio, tables.anchor)
        if ratio == self.indexed and context is not None:
            return self._entries(np.arange(count), counts, index)
        return self._entries(self._entry_rows(row, count, ratio, table), counts, index)

    def _entry_rows(self, row: int, count: int, ratio: int, table: Table) -> Ints:
        """Of the first ``count`` entries of a request."""
        block, per_page = np.arange(count), self.page_tokens // ratio
        return present(table[row, block // per_page]) * per_page + block % per_page

    def _slots(self, rows: Ints | int, positions: Ints, table: Table) -> Ints:
        index, inside = np.divmod(positions, self.page_tokens)
        return present(table[rows, index]) * self.page_tokens + inside

    def _keys(self, rows: Ints, hidden: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Keys:
        mask = torch.from_numpy(hidden).to(self.device) if hidden.any() else None
        return Keys(on_device(rows, self.device), mask)

    def _entries(self, rows: Ints, counts: Ints, index_rows: Ints | None) -> Entries:
        some_hidden = int(counts.min()) < rows.shape[-1]
        return Entries(
            on_device(rows, self.device),
            on_device(counts, self.device) if some_hidden else None,
            None if index_rows is None else on_device(index_rows, self.device),
        )

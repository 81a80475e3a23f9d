"""Plans one step of one cache group: buckets of decoding rows, blocks of prefill chunks.

Owns padding and splitting: every choice here changes speed and none changes a result. Vectorised
over decoding rows; prefill chunks, a few per step, are planned one by one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import NONE
from stratakv.engine.attention.step_meta import (
    DecodeBucket,
    GroupStep,
    Ints,
    PrefillBlock,
    PrefillChunk,
    StepShape,
)
from stratakv.engine.tensors import on_device
from stratakv.spec.retention import Retention, first_key

BLOCK_QUERIES: Final = 512
"""Most queries of a chunk that are scored together."""
BLOCK_PAIRS: Final = 2**20
"""Most query-key pairs scored together, unless ``MIN_QUERIES`` queries already have more."""
MIN_QUERIES: Final = 64
BUCKET_BYTES: Final = 300_000
"""Bytes of keys whose gathering and scoring take about as long as one more bucket's calls."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlanner:
    """``slack_pages``: padding that costs less than one bucket more. ``dtype``: of the masks."""

    rule: Retention
    page_tokens: int
    slack_pages: int
    device: torch.device
    dtype: torch.dtype

    def plan(self, shape: StepShape, table: npt.NDArray[np.int32]) -> GroupStep:
        """table: int32 [rows, pages], NONE where a request holds no page."""
        prefills = range(shape.decodes, len(shape.rows))
        return GroupStep(
            slots=on_device(self.slots(shape, table), self.device),
            buckets=tuple(self._buckets(shape, table)) if shape.decodes else (),
            chunks=tuple(self._chunk(shape, request, table) for request in prefills),
        )

    def slots(self, shape: StepShape, table: npt.NDArray[np.int32]) -> Ints:
        """The row, page * P + offset, on which each token's key and value belong, [T]."""
        page_index, offset = np.divmod(shape.positions, self.page_tokens)
        return _present(table[shape.token_rows, page_index]) * self.page_tokens + offset

    def _buckets(self, shape: StepShape, table: npt.NDArray[np.int32]) -> Iterator[DecodeBucket]:
        rows, positions = shape.rows[: shape.decodes], shape.starts[: shape.decodes]
        first = first_key(self.rule, positions)
        widths = positions // self.page_tokens - first // self.page_tokens + 1
        if fits_one_run(widths, self.slack_pages):
            yield self._bucket(rows, first, positions, table, None)
            return
        order = np.argsort(-widths, kind="stable")
        for part in split_widths(widths[order], self.slack_pages):
            some = order[part]
            yield self._bucket(rows[some], first[some], positions[some], table, some)

    def _bucket(
        self,
        rows: Ints,
        first: Ints,
        last: Ints,
        table: npt.NDArray[np.int32],
        tokens: Ints | None,
    ) -> DecodeBucket:
        """Queries at positions ``last``, each of which sees the keys [first, last]; all [b]."""
        size = self.page_tokens
        low = first // size
        widths = last // size - low + 1
        columns = np.arange(widths.max())
        row, column = rows[:, None], low[:, None] + columns
        if widths.min() < len(columns):
            # Padding reads the row's own first page again, never another's: the mask hides it, but
            # what is not finite shows through a mask, and a damaged page is to harm its own alone.
            column = np.where(columns < widths[:, None], column, low[:, None])
        pages = _present(table[row, column])
        start, stop = first - low * size, last - low * size + 1
        keys, mask, stale = slice(None), None, None
        if _all_equal(start) and _all_equal(stop):
            keys = slice(start.item(0), stop.item(0))
        else:
            at = np.arange(pages.shape[1] * size)
            hidden = (at < start[:, None]) | (at >= stop[:, None])
            mask = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, None]
            stale = _unwritten(widths, stop, size, pages.shape[1])
        return DecodeBucket(
            count=len(rows),
            width=pages.shape[1],
            tokens=None if tokens is None else on_device(tokens, self.device),
            pages=on_device(pages.ravel(), self.device),
            keys=keys,
            mask=None if mask is None else torch.from_numpy(mask).to(self.device, self.dtype),
            stale=None if stale is None else on_device(stale, self.device),
        )

    def _chunk(self, shape: StepShape, request: int, table: npt.NDArray[np.int32]) -> PrefillChunk:
        start, end = int(shape.starts[request]), int(shape.ends[request])
        offset = int(shape.offsets[request])
        begin = int(first_key(self.rule, np.array([start]))[0])
        span = slice(begin // self.page_tokens, -(-end // self.page_tokens))
        return PrefillChunk(
            tokens=slice(offset, offset + end - start),
            pages=on_device(_present(table[shape.rows[request], span]), self.device),
            skip=begin % self.page_tokens,
            fresh=begin == start,
            blocks=tuple(self._blocks(start, end, begin, offset)),
        )

    def _blocks(self, start: int, end: int, begin: int, offset: int) -> Iterator[PrefillBlock]:
        """Cut queries [start, end) into blocks; the chunk's keys begin at position ``begin``."""
        at = start
        while at < end:
            first = first_key(self.rule, np.arange(at, min(end, at + BLOCK_QUERIES)))
            affordable = BLOCK_PAIRS // (at + BLOCK_QUERIES - int(first[0]))
            # From where queries stop seeing the block's first one, most pairs would be masked.
            useful = int(np.count_nonzero(first <= at))
            count = min(len(first), max(MIN_QUERIES, min(affordable, useful)))
            stop, low = at + count, int(first[0])
            plain = low == at and int(first[count - 1]) == at
            yield PrefillBlock(
                tokens=slice(offset + at - start, offset + stop - start),
                keys=slice(low - begin, stop - begin),
                mask=None if plain else self._mask(first[:count] - low, stop - low),
            )
            at = stop

    def _mask(self, first: Ints, keys: int) -> torch.Tensor:
        """[n, keys]: query i sees the keys from first[i] up to its own, keys - n + i."""
        shape = (len(first), keys)
        mask = torch.full(shape, -torch.inf, dtype=self.dtype, device=self.device)
        mask = mask.triu_(keys - len(first) + 1)
        if first[-1] > 0:
            before = torch.arange(keys, device=self.device) < on_device(first, self.device)[:, None]
            mask = mask.masked_fill_(before, -torch.inf)
        return mask


def fits_one_run(widths: Ints, slack_pages: int) -> bool:
    """Whether ``split_widths`` would not cut ``widths`` [b >= 1], in whatever order."""
    total = int(widths.sum())
    return int(widths.max()) * len(widths) - total <= max(slack_pages, total // 8)


def split_widths(widths: Ints, slack_pages: int) -> list[slice]:
    """Cut non-increasing ``widths`` [b >= 1] into runs, each to be padded to its first width: as
    few as leave no run more padding than ``slack_pages`` or an eighth of all pages."""
    total = np.cumsum(widths)
    slack = max(slack_pages, int(total[-1]) // 8)
    parts: list[slice] = []
    start, done = 0, 0
    while start < len(widths):
        padding = widths[start] * np.arange(1, len(widths) - start + 1) - (total[start:] - done)
        stop = start + int(np.searchsorted(padding, slack, side="right"))
        parts.append(slice(start, stop))
        start, done = stop, int(total[stop - 1])
    return parts


def _unwritten(widths: Ints, stop: Ints, size: int, width: int) -> Ints:
    """Of ``width`` pages gathered for each row, the tokens that nobody may have written: the rest
    of the row's last page, and where that is its first, all of its padding."""
    tail = (widths[:, None] - 1) * size + np.arange(size)
    found = (np.arange(len(widths))[:, None] * (width * size) + tail)[tail >= stop[:, None]]
    short = np.flatnonzero(widths == 1)
    if width == 1 or not len(short):
        return found
    padding = short[:, None] * (width * size) + np.arange(size, width * size)
    return np.concatenate((found, padding.ravel()))


def _all_equal(numbers: Ints) -> bool:
    return np.count_nonzero(numbers == numbers[0]) == len(numbers)


def _present(pages: npt.NDArray[np.int32]) -> Ints:
    assert pages.size == 0 or pages.min() > NONE, "a token that is needed has no page"
    return pages.astype(np.int64)

"""Attention kernels of a GPU: one launch attends over the pages of a whole step.

Owns what a step's launches are given: work items, tables, blocks that fit each shape of heads. All
of a plan goes to the device in one copy. Arithmetic is ``triton_attention``'s; must not know rules
beyond ``first_key``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, assert_never

import numpy as np
import numpy.typing as npt
import torch
from triton import knobs

from stratakv.core.ids import NONE
from stratakv.engine.attention import triton_attention
from stratakv.engine.attention.kernels import (
    AttentionGroup,
    Context,
    Expanded,
    IndexKeys,
    Paged,
    SelectedRows,
)
from stratakv.engine.attention.paged_layer import LatentPages, Scoring, Scratch
from stratakv.engine.attention.step_meta import Ints, StepShape
from stratakv.engine.attention.swap_ins import SwapIns, SwapShape
from stratakv.engine.attention.triton_blocks import Blocks, ceil, power_of_two
from stratakv.engine.attention.triton_swap_ins import TritonSwapIns
from stratakv.engine.deepseek import triton_best_keys
from stratakv.engine.tensors import on_device
from stratakv.spec.retention import first_key
from stratakv.transfer.host_rows import HostRows

# What is launched takes options beside the function's own arguments, and numbers for its constants.
attend_pages: Any = triton_attention.attend_pages
attend_rows: Any = triton_attention.attend_rows
combine: Any = triton_attention.combine
WORK_FIELDS: Final[int] = triton_attention.WORK_FIELDS.value
SPLIT_TOKENS: Final = 1024
"""Context that one program reads for a decoding row; multiples of it from token 0 on."""
SPLIT_ROWS: Final = 512
"""Selected rows that one program reads."""
INTERPRETED: Final = bool(knobs.runtime.interpret)
"""Without a GPU: kernels run in Triton's interpreter, on tensors of the CPU."""


class TritonKernels:
    """``AttentionKernels`` on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scratch = Scratch()
        self._partial = Partial(device)

    def plan(
        self, group: AttentionGroup, shape: StepShape, table: npt.NDArray[np.int32]
    ) -> "TritonAttention":
        step = PagedWork.of(group, shape, table)
        tensors = WorkTensors.of(step, self._device)
        return TritonAttention(step, tensors, self._scratch, self._partial)

    def write(self, pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        pool.index_copy_(0, slots, rows.to(pool.dtype))

    def attend_selected(
        self,
        query: torch.Tensor,
        parts: Sequence[SelectedRows],
        value_dim: int,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        count, heads, dim = query.shape
        blocks = Blocks.selected(heads, dim, value_dim, query.element_size())
        query = query if query.stride(2) == 1 else query.contiguous()
        cuts = [ceil(part.rows.shape[-1], SPLIT_ROWS) for part in parts]
        splits = sum(cuts)
        partial, stats = self._partial.of(count * heads * splits, value_dim)
        for at, (part, cut) in enumerate(zip(parts, cuts, strict=True)):
            hidden = part.hidden
            attend_rows[count, ceil(heads, blocks.heads), cut](
                partial, stats, query, part.pool, part.rows,
                part.rows if hidden is None else hidden.contiguous().view(torch.uint8),
                scale, query.stride(0), query.stride(1), part.pool.stride(0),
                0 if part.rows.dim() == 1 else part.rows.stride(0),
                heads, part.rows.shape[-1], sum(cuts[:at]), splits,
                DIM=dim, VALUE_DIM=value_dim, BLOCK_H=blocks.heads, BLOCK_N=blocks.keys,
                MAIN=blocks.main, REST=blocks.rest, SPLIT=SPLIT_ROWS, HIDES=hidden is not None,
                UPCAST=_upcast(query.dtype), num_warps=blocks.warps, num_stages=blocks.stages,
            )  # fmt: skip
        return _combined(query, partial, stats, splits, value_dim, sinks)

    def best_keys(
        self, query: torch.Tensor, weights: torch.Tensor, keys: IndexKeys, k: int
    ) -> torch.Tensor:
        return triton_best_keys.best_keys(query, weights, keys, k)

    def swap_ins(self, host: HostRows, shape: SwapShape) -> SwapIns:
        return TritonSwapIns(host, shape, self._device)


class Partial:
    """Where splits leave what they found, kept between launches: dead as soon as the next asks."""

    def __init__(self, device: torch.device) -> None:
        self._flat = torch.empty(0, dtype=torch.float32, device=device)

    def of(self, slots: int, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32: [slots * value_dim], [slots * 2]."""
        size = slots * (value_dim + 2)
        if self._flat.numel() < size:
            self._flat = self._flat.new_empty(size + size // 4)
        return self._flat[: slots * value_dim], self._flat[slots * value_dim : size]


@dataclass(frozen=True, slots=True, eq=False)
class PagedWork:
    """What a group's step asks of the kernels, as numbers on the host; it knows no device.

    slots: int64 [T]. table: int32 [R, W], each request's pages from the first that is read on, 0
    behind the last. first_pages, widths: of each row of it, [R]. first: int32 [T], the first key
    that each token sees. splits: of the decoding row that reads most.
    """

    slots: Ints
    table: npt.NDArray[np.int32]
    first_pages: Ints
    widths: Ints
    first: npt.NDArray[np.int32]
    shape: StepShape
    page_tokens: int
    splits: int

    @classmethod
    def of(
        cls, group: AttentionGroup, shape: StepShape, table: npt.NDArray[np.int32]
    ) -> "PagedWork":
        """AssertionError where a token that is needed has no page."""
        size = group.page_tokens
        low = first_key(group.rule, shape.starts)
        first_pages = low // size
        widths = (shape.ends - 1) // size - first_pages + 1
        columns = np.arange(widths.max(initial=0))
        inside = columns < widths[:, None]
        column = first_pages[:, None] + np.where(inside, columns, 0)
        pages = table[shape.rows[:, None], column]
        assert pages.min(initial=0) > NONE, "a token that is needed has no page"
        page, offset = np.divmod(shape.positions, size)
        decodes = slice(shape.decodes)
        reach = shape.starts[decodes] // SPLIT_TOKENS - low[decodes] // SPLIT_TOKENS
        return cls(
            slots=table[shape.token_rows, page].astype(np.int64) * size + offset,
            table=np.where(inside, pages, 0).astype(np.int32),
            first_pages=first_pages,
            widths=widths,
            first=first_key(group.rule, shape.positions).astype(np.int32),
            shape=shape,
            page_tokens=size,
            splits=int(reach.max(initial=0)) + 1,
        )

    @property
    def packed_table(self) -> npt.NDArray[np.int32]:
        """The same table, over pages that were gathered request by request."""
        begins = np.cumsum(self.widths) - self.widths
        return (begins[:, None] + np.arange(self.table.shape[1])).astype(np.int32)

    @property
    def packed_pages(self) -> Ints:
        """In the order of ``packed_table``."""
        inside = np.arange(self.table.shape[1]) < self.widths[:, None]
        return self.table[inside].astype(np.int64)

    def decoding(self) -> npt.NDArray[np.int32]:
        """Work items of the leading requests: a token each."""
        shape, decodes = self.shape, self.shape.decodes
        every = np.arange(decodes)
        return _items(every, every, np.ones_like(every), shape.starts[:decodes], self)

    def chunks(self, queries: int) -> npt.NDArray[np.int32]:
        """Work items of the others, of ``queries`` tokens at most; tokens are counted from the
        first chunk's on."""
        shape, decodes = self.shape, self.shape.decodes
        counts = (shape.ends - shape.starts)[decodes:]
        blocks = -(-counts // queries)
        request = np.repeat(np.arange(decodes, len(shape.rows)), blocks)
        before = (np.arange(len(request)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * queries
        position = shape.starts[request] + before
        left = np.minimum(queries, shape.ends[request] - position)
        return _items(request, shape.offsets[request] + before, left, position, self)


def _items(
    request: Ints, token: Ints, count: Ints, position: Ints, step: PagedWork
) -> npt.NDArray[np.int32]:
    items = np.zeros((len(request), WORK_FIELDS), np.int32)
    numbers = (request, token, count, position, step.first[token], step.first_pages[request])
    for at, column in enumerate(numbers):
        items[:, at] = column
    return items


@dataclass(frozen=True, slots=True, eq=False)
class WorkTensors:
    """What of a ``PagedWork`` decoding rows read, on the device. decoding: work items."""

    slots: torch.Tensor
    first: torch.Tensor
    table: torch.Tensor
    decoding: torch.Tensor

    @classmethod
    def of(cls, step: PagedWork, device: torch.device) -> "WorkTensors":
        arrays = (step.slots, step.first, step.table, step.decoding())
        return cls(*(on_device(array, device) for array in arrays))


class TritonAttention:
    """A ``GroupAttention``: layers with the same heads share their work items."""

    def __init__(
        self, step: PagedWork, tensors: WorkTensors, scratch: Scratch, partial: Partial
    ) -> None:
        self.decodes = step.shape.decodes
        self._step, self._device = step, tensors.slots.device
        self._scratch, self._partial = scratch, partial
        self.slots, self._first = tensors.slots, tensors.first
        self._table, self._decoding = tensors.table, tensors.decoding
        self._chunks: dict[int, torch.Tensor] = {}
        self._packed: tuple[torch.Tensor, torch.Tensor] | None = None

    def gather(self, latents: LatentPages) -> torch.Tensor:
        """Every request's pages, one request after the other."""
        pages = self._gathered()[0]
        return self._scratch.gather("latents", latents.pages, pages).view(-1, latents.dim)

    def decode(self, query: torch.Tensor, context: Context, scoring: Scoring) -> torch.Tensor:
        heads, value_dim, splits = query.shape[1], context.values.shape[-1], self._step.splits
        partial, stats = self._partial.of(self.decodes * heads * splits, value_dim)
        self._attend(partial, stats, query, context, scoring)
        return _combined(query, partial, stats, splits, value_dim, scoring.sinks)

    def prefill(self, query: torch.Tensor, context: Context, scoring: Scoring) -> torch.Tensor:
        out = query.new_empty(len(query), query.shape[1], context.values.shape[-1])
        self._attend(out, None, query, context, scoring)
        return out

    def _attend(
        self,
        out: torch.Tensor,
        stats: torch.Tensor | None,
        query: torch.Tensor,
        context: Context,
        scoring: Scoring,
    ) -> None:
        """Of one token each, in splits, where there are ``stats``."""
        query = query if query.stride(2) == 1 else query.contiguous()
        pages = self._pages(context)
        per_head, value_dim = query.shape[1] // pages.heads, context.values.shape[-1]
        blocks = Blocks.paged(
            per_head, query.shape[2], value_dim, query.element_size(), one_token=stats is not None
        )
        work, first, splits = self._decoding, self._first, self._step.splits
        if stats is None:
            work, first, splits = self._items(blocks.queries), self._first[self.decodes :], 1
        sinks, cap = scoring.sinks, scoring.softcap
        grid = (len(work), pages.heads * ceil(per_head, blocks.heads), splits)
        attend_pages[grid](
            out, out if stats is None else stats, query, pages.keys, pages.values, pages.table,
            first, work, out if sinks is None else sinks,
            scoring.scale, 1.0 if cap is None else cap, query.stride(0), query.stride(1),
            pages.key_row, pages.key_head, pages.value_row, pages.value_head,
            pages.table.stride(0), splits,
            PER_HEAD=per_head, KEY_DIM=query.shape[2], VALUE_DIM=value_dim,
            PAGE=self._step.page_tokens, BLOCK_H=blocks.heads, BLOCK_Q=blocks.queries,
            BLOCK_N=blocks.keys, MAIN=blocks.main, REST=blocks.rest, BLOCK_V=blocks.value,
            SPLIT=0 if stats is None else SPLIT_TOKENS, CAPPED=cap is not None,
            SUNK=sinks is not None and stats is None, UPCAST=_upcast(query.dtype),
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

    def _items(self, queries: int) -> torch.Tensor:
        found = self._chunks.get(queries)
        if found is None:
            items = self._step.chunks(queries)
            items[:, 1] -= self.decodes
            found = self._chunks[queries] = on_device(items, self._device)
        return found

    def _gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages and table of what ``gather`` returns; worked out by the first layer that asks."""
        if self._packed is None:
            step = self._step
            pages, table = step.packed_pages, step.packed_table
            self._packed = on_device(pages, self._device), on_device(table, self._device)
        return self._packed

    def _pages(self, context: Context) -> "_Pages":
        match context:
            case Paged(layer):
                return _Pages(
                    layer.key_rows, layer.value_rows, self._table, layer.heads,
                    layer.key_rows.stride(0), layer.key_dim,
                    layer.value_rows.stride(0), layer.value_dim,
                )  # fmt: skip
            case Expanded(keys, values):
                keys = keys if keys.stride(2) == 1 else keys.contiguous()
                values = values if values.stride(2) == 1 else values.contiguous()
                return _Pages(
                    keys, values, self._gathered()[1], len(keys),
                    keys.stride(1), keys.stride(0), values.stride(1), values.stride(0),
                )  # fmt: skip
            case _:
                assert_never(context)


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """Where keys and values lie: elements from one token's to the next, and from head to head."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    heads: int
    key_row: int
    key_head: int
    value_row: int
    value_head: int


def _combined(
    query: torch.Tensor,
    partial: torch.Tensor,
    stats: torch.Tensor,
    splits: int,
    value_dim: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    out = query.new_empty(*query.shape[:2], value_dim)
    combine[out.shape[:2]](
        out, partial, stats, out if sinks is None else sinks, splits,
        VALUE_DIM=value_dim, BLOCK_V=power_of_two(value_dim), SUNK=sinks is not None,
    )  # fmt: skip
    return out


def _upcast(dtype: torch.dtype) -> bool:
    return INTERPRETED and dtype == torch.bfloat16

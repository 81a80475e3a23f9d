"""Attention of a model that has no indexer over the pages that bounds select, wherever they lie.

Owns ``SelectingKernels``, which stand between a Hugging Face model and its device's kernels:
queries of prompts and of answers see the same selection, whether their pages are on the device or
the host, so a cached page is what would be computed. **Approximate**: ``Recall`` says how much of
attention's weight is selected. Must not rank pages (``page_bounds``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import NONE, LayerId
from stratakv.engine.attention.dense_kernels import attend_block, attend_padded
from stratakv.engine.attention.kernels import (
    AttentionGroup,
    AttentionKernels,
    Context,
    GroupAttention,
    IndexKeys,
    Paged,
    SelectedRows,
)
from stratakv.engine.attention.page_bounds import chosen_pages, page_scores, widen
from stratakv.engine.attention.paged_layer import (
    KeyBounds,
    LatentPages,
    LayerPages,
    Scoring,
    Scratch,
)
from stratakv.engine.attention.spilled_rows import SpilledRows, SpilledStep
from stratakv.engine.attention.step_meta import StepShape
from stratakv.engine.attention.step_plan import BLOCK_PAIRS, MIN_QUERIES
from stratakv.engine.attention.swap_ins import HostSwapIns, SwapIns, SwapShape
from stratakv.engine.attention.torch_pools import LayerTensors
from stratakv.engine.huggingface.model import HuggingFaceModel
from stratakv.engine.huggingface.runner import ModelRunner
from stratakv.engine.tensors import on_device
from stratakv.memory.block_table import BlockTable
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.spec.offload import bounds_pages, indexers, selected_group
from stratakv.transfer.host_rows import HostRows

Table = npt.NDArray[np.int32]


@dataclass(slots=True)
class Recall:
    """Of attention's weight the part on selected pages, over all heads: of the last query of each
    chunk of a prompt, in each layer, where there was something to leave out."""

    queries: int = 0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        """1 where nothing was left out."""
        return self.weight / self.queries if self.queries else 1.0

    def add(self, weight: float) -> None:
        self.queries += 1
        self.weight += weight


class SelectingKernels:
    """``AttentionKernels`` over ``inner``'s, for a cache whose anchor has bounds of pages.
    ``host``: reads pages of the group that has its home there."""

    def __init__(
        self, inner: AttentionKernels, spec: CacheSpec, tables: BlockTable, host: HostRows
    ) -> None:
        self.inner, self.host, self.recall = inner, host, Recall()
        self.scratch = Scratch()
        self.pages, self.page_tokens = bounds_pages(spec), spec.page_tokens
        self._selected = selected_group(spec)
        self._tables = tables
        layers = [x for buffer in spec.groups[ANCHOR].buffers for x in buffer.layers]
        self.plan_of: Mapping[LayerId, int] = {layer: at for at, layer in enumerate(layers)}
        # An entry is a page.
        shape = SwapShape(tables.spilled[self._selected], 1, self.pages, indexers(spec))
        table = partial(tables.pages, self._selected)
        its = self.swap_ins(host, shape)
        self._spilled = SpilledRows(host, table, shape, spec.page_tokens, its)

    def plan(self, group: AttentionGroup, shape: StepShape, table: Table) -> GroupAttention:
        if group.id != self._selected:
            return self.inner.plan(group, shape, table)
        spilled = self._spilled.step(shape)
        there = table if spilled is None else spilled.table
        return SelectedPages(self, shape, there, self._tables.pages(ANCHOR), spilled)

    def write(self, pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self.inner.write(pool, slots, rows)

    def attend_selected(
        self,
        query: torch.Tensor,
        parts: Sequence[SelectedRows],
        value_dim: int,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.inner.attend_selected(query, parts, value_dim, scale, sinks)

    def best_keys(
        self, query: torch.Tensor, weights: torch.Tensor, keys: IndexKeys, k: int
    ) -> torch.Tensor:
        return self.inner.best_keys(query, weights, keys, k)

    def swap_ins(self, host: HostRows, shape: SwapShape) -> SwapIns:
        return HostSwapIns.of_pages(host, shape)


class PageSelectingRunner(ModelRunner):
    """Runs a Hugging Face model over the pages that bounds select."""

    def __init__(
        self,
        model: HuggingFaceModel,
        spec: CacheSpec,
        pools: LayerTensors,
        tables: BlockTable,
        kernels: AttentionKernels,
        host: HostRows,
    ) -> None:
        selecting = SelectingKernels(kernels, spec, tables, host)
        super().__init__(model, spec, pools, tables, selecting)
        self.recall = selecting.recall


class SelectedPages:
    """One step of the group whose pages are selected. ``table``: its device pages, with one that
    may be read in place of each that is on the host; ``kept``: the anchor's, with the bounds."""

    def __init__(
        self,
        kernels: SelectingKernels,
        shape: StepShape,
        table: Table,
        kept: Table,
        spilled: SpilledStep | None,
    ) -> None:
        self._kernels, self._shape, self._spilled = kernels, shape, spilled
        self._table, self._kept = table, kept
        self.decodes = shape.decodes
        page, offset = np.divmod(shape.positions, kernels.page_tokens)
        pages, bounds = table[shape.token_rows, page], kept[shape.token_rows, page]
        assert min(pages.min(), bounds.min()) > NONE, "a token that is needed has no page"
        device = torch.device("cpu")
        self.slots = on_device(pages.astype(np.int64) * kernels.page_tokens + offset, device)
        self._bounds = on_device(bounds.astype(np.int64), device)
        self._begun = on_device(bounds[offset == 0].astype(np.int64), device)
        self._widened: LayerId | None = None
        self._decoding = DecodingQueries.of(shape, table, kept, kernels.page_tokens)

    def gather(self, latents: LatentPages) -> torch.Tensor:
        raise AssertionError("pages of latents have no bounds")

    def decode(self, query: torch.Tensor, context: Context, scoring: Scoring) -> torch.Tensor:
        layer, bounds = self._ready(context)
        asked = self._decoding
        entries = asked.entries(query, bounds.rows, self._kernels.pages)
        pages = self._pages(bounds.layer, asked.pages.gather(1, entries), entries)
        size, read = self._kernels.page_tokens, self._kernels.scratch.gather
        shape = (len(query), -1, layer.heads)
        keys = read("keys", layer.key_pages, pages.view(-1)).view(*shape, layer.key_dim)
        values = read("values", layer.value_pages, pages.view(-1)).view(*shape, layer.value_dim)
        at = (entries[:, :, None] * size + torch.arange(size)).flatten(1)
        unseen = at > asked.positions[:, None]
        keys.masked_fill_(unseen[:, :, None, None], 0)
        values.masked_fill_(unseen[:, :, None, None], 0)
        mask = torch.zeros(unseen.shape, dtype=query.dtype).masked_fill_(unseen, -torch.inf)
        keys, values = (part.transpose(1, 2).to(query.dtype) for part in (keys, values))
        return attend_padded(query, keys, values, mask[:, None, None], scoring)

    def prefill(self, query: torch.Tensor, context: Context, scoring: Scoring) -> torch.Tensor:
        layer, bounds = self._ready(context)
        out = query.new_empty(len(query), query.shape[1], layer.value_dim)
        for request in range(self.decodes, len(self._shape.rows)):
            self._chunk(request, query, (layer, bounds), scoring, out)
        return out

    def _chunk(
        self,
        request: int,
        query: torch.Tensor,
        pool: tuple[LayerPages, KeyBounds],
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        (layer, bounds), shape = pool, self._shape
        start, end = int(shape.starts[request]), int(shape.ends[request])
        row, offset = int(shape.rows[request]), int(shape.offsets[request]) - self.decodes
        pages = -(-end // self._kernels.page_tokens)
        keys, values = self._context(bounds.layer, layer, row, pages)
        keys, values = (part[:, :end].to(query.dtype) for part in (keys, values))
        its = bounds.rows[on_device(self._kept[row, :pages].astype(np.int64), query.device)]
        some = max(MIN_QUERIES, BLOCK_PAIRS // end)
        seen = keys.new_empty(0)
        for at in range(start, end, some):
            until = min(end, at + some)
            own = slice(offset + at - start, offset + until - start)
            positions = torch.arange(at, until)
            seen = self._seen(query[own], its, positions, end)
            mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
            found = attend_block(query[own].transpose(0, 1), keys, values, mask, scoring)
            out[own] = found.transpose(0, 1)
        if pages > self._kernels.pages:
            last = query[offset + end - start - 1]
            self._kernels.recall.add(_weight(last, keys, seen[-1], scoring))

    def _seen(
        self, query: torch.Tensor, bounds: torch.Tensor, positions: torch.Tensor, end: int
    ) -> torch.Tensor:
        """bool [m, end]: the tokens that each query sees."""
        size, pages = self._kernels.page_tokens, self._kernels.pages
        causal = torch.arange(end) <= positions[:, None]
        if len(bounds) <= pages:
            return causal
        chosen = chosen_pages(page_scores(query, bounds), positions // size, pages)
        return causal & chosen.repeat_interleave(size, 1)[:, :end]

    def _context(
        self, layer_id: LayerId, layer: LayerPages, row: int, pages: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a request, [heads, tokens, dim] each."""
        there = on_device(self._table[row, :pages].astype(np.int64), layer.key_pages.device)
        keys, values = layer.key_pages[there], layer.value_pages[there]
        if self._spilled is not None:
            host = self._spilled.rows.host_pages(row, pages)
            away = np.flatnonzero(host != NONE)
            if len(away):
                raw = torch.from_numpy(self._kernels.host.pages(layer_id, host[away]))
                parts = raw.split([_bytes(keys), _bytes(values)], 1)
                for pool, part in zip((keys, values), parts, strict=True):
                    pool[torch.from_numpy(away)] = part.contiguous().view(pool.dtype)
        shape = (-1, layer.heads)
        keys, values = keys.view(*shape, layer.key_dim), values.view(*shape, layer.value_dim)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _pages(self, layer: LayerId, found: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        """Device pages behind ``entries`` [b, k], what is missing copied there first."""
        bucket = None if self._spilled is None else self._spilled.bucket(np.arange(self.decodes))
        if bucket is None:
            return found
        plan = self._kernels.plan_of[layer]
        read, missing = bucket.read(plan, found, entries, None)
        missing.load(layer)
        return read

    def _ready(self, context: Context) -> tuple[LayerPages, KeyBounds]:
        """The layer's pages, and their bounds with the step's keys among them."""
        assert isinstance(context, Paged), "pages of latents have no bounds"
        layer, bounds = context.layer, context.layer.bounds
        assert bounds is not None, "a layer whose pages are selected has no bounds"
        if self._widened != bounds.layer:
            keys = context.keys.transpose(0, 1).to(bounds.rows.dtype)
            widen(bounds.rows, keys, self._bounds, self._begun)
            self._widened = bounds.layer
        return layer, bounds


@dataclass(frozen=True, slots=True, eq=False)
class DecodingQueries:
    """b one-token queries. own, positions: int64 [b]. pages, bounds: int64 [b, n], device pages of
    either group, of which those behind a query's own are its own once more."""

    own: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    bounds: torch.Tensor

    @classmethod
    def of(cls, shape: StepShape, table: Table, kept: Table, page_tokens: int) -> "DecodingQueries":
        rows, positions = shape.rows[: shape.decodes], shape.starts[: shape.decodes]
        own = positions // page_tokens
        column = np.minimum(np.arange(own.max(initial=0) + 1), own[:, None])
        found = (_ints(pages[rows[:, None], column]) for pages in (table, kept))
        return cls(_ints(own), _ints(positions), *found)

    def entries(self, query: torch.Tensor, bounds: torch.Tensor, pages: int) -> torch.Tensor:
        """The pages that each query sees, int64 [b, k], ascending; those behind its own, where it
        has fewer, it does not."""
        count, most = self.pages.shape
        if most <= pages:
            return torch.arange(most).expand(count, -1)
        scores = page_scores(query, bounds[self.bounds])
        return chosen_pages(scores, self.own, pages).nonzero()[:, 1].view(count, pages)


def _weight(query: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, scoring: Scoring) -> float:
    """Of one query [H, dim] and all keys [heads, n, dim]: the weight on those ``seen`` [n]."""
    grouped = query.view(len(keys), -1, query.shape[-1]) * scoring.scale
    scores = (grouped @ keys.transpose(1, 2)).flatten(0, 1)
    weights = scoring.weights(scores, None, (len(query), 1)).float()
    return float((weights * seen).sum() / weights.sum())


def _ints(array: npt.NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))


def _bytes(pages: torch.Tensor) -> int:
    """Of one page."""
    return pages.shape[1] * pages.element_size()

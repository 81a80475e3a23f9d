"""DeepSeek-V4 attention: a window of latents, compressed entries beside it, sinks.

Owns selection and the projections around it. A latent is key and value at once, so its rotation is
undone on the way out. Must not know requests (``v4_queries``), how entries are made
(``v4_compress``) nor how they are scored (``common_votes``). Source: transformers 5.23,
``DeepseekV4Attention`` and ``DeepseekV4Indexer``.
"""

from dataclasses import dataclass

import torch
from torch import nn

from stratakv.core.ids import LayerId
from stratakv.engine.attention.kernels import AttentionKernels, SelectedRows
from stratakv.engine.deepseek.v4_compress import BlockPages, Compressor
from stratakv.engine.deepseek.v4_config import V4Config
from stratakv.engine.deepseek.v4_norm import WideRMSNorm, unit_rms
from stratakv.engine.deepseek.v4_present import PresentEntries
from stratakv.engine.deepseek.v4_step import ClosingBlocks, Entries, Keys, Queries, V4Step


@dataclass(frozen=True, slots=True, eq=False)
class V4Pages:
    """One layer's memory. local: latents by row, [rows, d]. plan: which selection of a step it
    makes; None where it selects nothing, or nothing that may be on the host."""

    layer: LayerId
    local: torch.Tensor
    blocks: BlockPages | None
    index: BlockPages | None
    plan: int | None

    def present(self) -> PresentEntries | None:
        """Where its entries lie in a step; None where it has none."""
        if self.blocks is None:
            return None
        return PresentEntries(self.layer, self.blocks.entries, self.plan)


class Scorer(nn.Module):
    """What each index head's vote on an entry weighs."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.weights_proj = nn.Linear(config.hidden, config.index_heads, bias=False)
        self.scale = config.index_dim**-0.5 * config.index_heads**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> float32 [n, H]."""
        return self.weights_proj(x).float() * self.scale


class V4Indexer(Compressor):
    """Which entries a query sees, where there are more than ``top_k``. Its keys are compressed
    like the entries, from the same tokens."""

    def __init__(self, config: V4Config, ratio: int) -> None:
        super().__init__(config, ratio, config.index_dim, 2 * config.index_dim)
        self.q_b_proj = nn.Linear(
            config.query_rank, config.index_heads * config.index_dim, bias=False
        )
        self.scorer = Scorer(config)
        self.top_k = config.index_topk

    def rows(self, closing: ClosingBlocks) -> torch.Tensor:
        return closing.index_rows

    def select(
        self,
        x: torch.Tensor,
        query: torch.Tensor,
        entries: Entries,
        index_keys: torch.Tensor,
        kernels: AttentionKernels,
    ) -> Keys:
        """x [n, hidden], query [n, H, d], index_keys [rows, d] -> those entries to attend."""
        if entries.rows.shape[-1] <= self.top_k:
            return entries.all
        keys = entries.index(index_keys)
        return entries.only(kernels.best_keys(query, self.scorer(x), keys, self.top_k))


class IndexedCompressor(Compressor):
    def __init__(self, config: V4Config, ratio: int) -> None:
        super().__init__(config, ratio, config.head_dim, 2 * config.head_dim)
        self.indexer = V4Indexer(config, ratio)


class GroupedLinear(nn.Module):
    """A matrix per group of heads, [groups * rank, group's width] in all."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.groups = config.out_groups
        width = config.heads * config.head_dim // self.groups
        self.weight = nn.Parameter(torch.empty(self.groups * config.out_rank, width))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """heads [T, H, d] -> [T, groups * rank]."""
        grouped = heads.reshape(len(heads), self.groups, -1).transpose(0, 1)
        out = grouped @ self.weight.view(self.groups, -1, grouped.shape[-1]).mT
        return out.transpose(0, 1).flatten(1)


class V4Attention(nn.Module):
    """One layer's. ``rope``: which rotation it takes; one with entries takes theirs."""

    def __init__(self, config: V4Config, layer: int) -> None:
        super().__init__()
        dim, eps, ratio = config.head_dim, config.norm_eps, config.rates[layer]
        self.q_a_proj = nn.Linear(config.hidden, config.query_rank, bias=False)
        self.q_a_norm = WideRMSNorm(config.query_rank, eps)
        self.q_b_proj = nn.Linear(config.query_rank, config.heads * dim, bias=False)
        self.kv_proj = nn.Linear(config.hidden, dim, bias=False)
        self.kv_norm = WideRMSNorm(dim, eps)
        self.o_a_proj = GroupedLinear(config)
        self.o_b_proj = nn.Linear(config.out_groups * config.out_rank, config.hidden, bias=False)
        self.sinks = nn.Parameter(torch.empty(config.heads))
        self.compressor: Compressor | None = None
        if ratio is not None and config.indexed[layer]:
            self.compressor = IndexedCompressor(config, ratio)
        elif ratio is not None:
            self.compressor = Compressor(config, ratio, dim, dim)
        self.rope = "main" if ratio is None else "compress"
        self.heads, self.eps, self.scale = config.heads, eps, dim**-0.5

    def forward(self, x: torch.Tensor, pages: V4Pages, step: V4Step) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes the step's rows to ``pages`` first."""
        rotation = step.rotations[self.rope]
        low = self.q_a_norm(self.q_a_proj(x))
        query = unit_rms(self.q_b_proj(low).view(len(x), self.heads, -1), self.eps)
        query = rotation.tail(query)
        latents = rotation.tail(self.kv_norm(self.kv_proj(x)))
        step.kernels.write(pages.local, step.slots, latents)
        index_query = self._compress(x, low, pages, step)
        out = torch.empty_like(query)
        present = pages.present()
        for queries in step.queries:
            at = queries.tokens
            found = self._entries(x, index_query, pages, queries, step.kernels)
            parts = [SelectedRows(pages.local, queries.local.rows, queries.local.hidden)]
            if found is not None and present is not None:
                parts.append(present.rows(found, queries))
            out[at] = step.kernels.attend_selected(
                query[at], parts, query.shape[-1], self.scale, self.sinks
            )
        return self.o_b_proj(self.o_a_proj(rotation.inverse.tail(out)))

    def _compress(
        self, x: torch.Tensor, low: torch.Tensor, pages: V4Pages, step: V4Step
    ) -> torch.Tensor | None:
        """Write entries and index keys; returns index queries [T, H, d] where there are any."""
        if self.compressor is None or pages.blocks is None:
            return None
        blocks = step.blocks[self.compressor.ratio]
        self.compressor.compress(x, pages.blocks, blocks)
        if not isinstance(self.compressor, IndexedCompressor) or pages.index is None:
            return None
        indexer = self.compressor.indexer
        indexer.compress(x, pages.index, blocks)
        query = indexer.q_b_proj(low).view(len(x), -1, indexer.dim)
        return step.rotations[self.rope].tail(query)

    def _entries(
        self,
        x: torch.Tensor,
        index_query: torch.Tensor | None,
        pages: V4Pages,
        queries: Queries,
        kernels: AttentionKernels,
    ) -> Keys | None:
        """The entries that each query attends to; None where no query has any."""
        if self.compressor is None:
            return None
        entries = queries.entries.get(self.compressor.ratio)
        if entries is None or index_query is None or pages.index is None:
            return None if entries is None else entries.all
        assert isinstance(self.compressor, IndexedCompressor)
        at, keys = queries.tokens, pages.index.entries
        return self.compressor.indexer.select(x[at], index_query[at], entries, keys, kernels)

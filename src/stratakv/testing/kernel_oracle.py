"""What attention kernels are asked in their conformance suite, and what is right, in float64.

Owns ragged batches over pages in random order, of which every row that nobody owns, or that the
group's rule does not keep, is NaN. Owns no test. Needs the extra ``serve``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from stratakv.core.ids import NONE, GroupId
from stratakv.engine.attention.kernels import AttentionGroup, IndexKeys
from stratakv.engine.attention.paged_layer import LatentPages, LayerPages, Scoring
from stratakv.engine.attention.step_meta import StepShape
from stratakv.engine.batch import StepBatch
from stratakv.memory.mapped import POISON
from stratakv.spec.groups import ANCHOR
from stratakv.spec.retention import Retention, first_key, needed

Spans = Sequence[tuple[int, int]]
"""(tokens before the step, tokens in it) of each request, those of one token first."""


@dataclass(frozen=True, slots=True)
class Heads:
    """``query``: a multiple of ``key``."""

    query: int = 6
    key: int = 2
    key_dim: int = 8
    value_dim: int = 8


def shape_of(spans: Spans) -> StepShape:
    """Requests are on the rows from 1 on: a row is not its place in the batch."""
    starts, counts = (np.array(column, np.int32) for column in zip(*spans, strict=True))
    rows = np.arange(1, len(starts) + 1, dtype=np.int32)
    tokens = np.zeros(counts.sum(), np.int32)
    sampled = np.ones(len(rows), np.bool_)
    batch = StepBatch(
        rows=rows, starts=starts, counts=counts, tokens=tokens, sampled=sampled, gate=None
    )
    return StepShape.of(batch)


@dataclass(slots=True, eq=False)
class KernelStep:
    """One group's step. ``seed`` draws its pages and its numbers."""

    rule: Retention
    page_tokens: int
    spans: Spans
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: GroupId = ANCHOR
    seed: int = 0
    table: np.ndarray[tuple[int, ...], np.dtype[np.int32]] = field(init=False)
    pages: int = field(init=False)

    def __post_init__(self) -> None:
        wide = max(start + count for start, count in self.spans) // self.page_tokens + 1
        self.pages = len(self.spans) * wide + 3
        free = iter(np.random.default_rng(self.seed).permutation(self.pages))
        self.table = np.full((len(self.spans) + 1, wide), NONE, np.int32)
        for row, (start, count) in enumerate(self.spans, 1):
            kept = needed(self.rule, start, self.page_tokens)
            last = (start + count - 1) // self.page_tokens
            for at in range(min(kept.start, start // self.page_tokens), last + 1):
                self.table[row, at] = next(free)

    @property
    def shape(self) -> StepShape:
        return shape_of(self.spans)

    def attention_group(self, layer_bytes: int) -> AttentionGroup:
        return AttentionGroup(self.group, self.rule, self.page_tokens, layer_bytes)

    def draw(self, *shape: int, salt: int = 0) -> torch.Tensor:
        random = torch.Generator().manual_seed(1000 * self.seed + salt)
        return torch.randn(*shape, generator=random).to(self.device, self.dtype)

    def contexts(self, *width: int, salt: int) -> list[torch.Tensor]:
        """Random rows [tokens, *width] of each request, those of the step last."""
        return [
            self.draw(start + count, *width, salt=salt + row)
            for row, (start, count) in enumerate(self.spans)
        ]

    def fresh(self, contexts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The step's own rows, packed: [T, *width]."""
        return torch.cat([c[start:] for c, (start, _) in zip(contexts, self.spans, strict=True)])

    def pool(self, contexts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[pages, P, *width]: what was written before the step; all else is NaN."""
        shape = (self.pages, self.page_tokens, *contexts[0].shape[1:])
        pool = torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)
        for row, ((start, _), rows) in enumerate(zip(self.spans, contexts, strict=True), 1):
            for at, page in enumerate(self.table[row]):
                low, high = at * self.page_tokens, min(start, (at + 1) * self.page_tokens)
                if page != NONE and low < high:
                    pool[int(page), : high - low] = rows[low:high]
        return pool

    def right(
        self,
        query: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        scoring: Scoring,
    ) -> torch.Tensor:
        """query [T, H, D]; of each request keys and values [tokens, heads, dim] -> float64
        [T, H, value dim]."""
        out: list[torch.Tensor] = []
        for (start, count), k, v in zip(self.spans, keys, values, strict=True):
            for position in range(start, start + count):
                low = int(first_key(self.rule, np.array([position]))[0])
                seen = slice(low, position + 1)
                out.append(attended(query[len(out)], k[seen], v[seen], scoring))
        return torch.stack(out)


@dataclass(frozen=True, slots=True, eq=False)
class PagedCase:
    """One layer's keys and values in a step."""

    step: KernelStep
    heads: Heads
    layer: LayerPages
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    query: torch.Tensor

    @classmethod
    def of(cls, step: KernelStep, heads: Heads | None = None, salt: int = 0) -> "PagedCase":
        heads = heads or Heads()
        keys = step.contexts(heads.key, heads.key_dim, salt=salt + 100)
        values = step.contexts(heads.key, heads.value_dim, salt=salt + 200)
        layer = LayerPages.of(step.group, step.pool(keys), step.pool(values))
        tokens = sum(count for _, count in step.spans)
        # Heads first in memory, as a model's projections leave them.
        query = step.draw(heads.query, tokens, heads.key_dim, salt=salt + 300).transpose(0, 1)
        return cls(step, heads, layer, keys, values, query)

    @property
    def group(self) -> AttentionGroup:
        row = self.heads.key * self.heads.key_dim * self.layer.key_rows.element_size()
        return self.step.attention_group(self.step.page_tokens * row)

    def right(self, scoring: Scoring) -> torch.Tensor:
        return self.step.right(self.query, self.keys, self.values, scoring)


def latent_layer(step: KernelStep, contexts: Sequence[torch.Tensor]) -> LatentPages:
    return LatentPages.of(step.group, step.pool(contexts))


def attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """One token: query [H, D], keys and values [n, heads, dim] -> float64 [H, value dim]."""
    query, keys, values = (part.double() for part in (query, keys, values))
    per_head = len(query) // keys.shape[1]
    keys, values = (part.repeat_interleave(per_head, 1) for part in (keys, values))
    scores = torch.einsum("hd,nhd->hn", query, keys) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if scoring.sinks is not None:
        scores = torch.cat((scores, scoring.sinks.double()[:, None]), 1)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(keys)], values)


def selected(
    query: torch.Tensor,
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    value_dim: int,
    scoring: Scoring,
) -> torch.Tensor:
    """query [n, H, d]; parts: a pool [rows, d], and which rows each query sees, bool [n, rows] ->
    float64 [n, H, value_dim]."""
    out: list[torch.Tensor] = []
    for at, one in enumerate(query):
        rows = torch.cat([pool[seen[at]] for pool, seen in parts])[:, None]
        out.append(attended(one, rows, rows[..., :value_dim], scoring))
    return torch.stack(out)


def poisoned(pool: torch.Tensor) -> torch.Tensor:
    """The same bytes, all of them NaN."""
    found = torch.empty_like(pool)
    found.view(torch.uint8).fill_(POISON)
    return found


def best(query: torch.Tensor, weights: torch.Tensor, keys: IndexKeys, k: int) -> torch.Tensor:
    """As ``AttentionKernels.best_keys``, by sorting."""
    rows = keys.rows.expand(len(query), -1)
    dots = torch.einsum("mhd,mnd->mhn", query.double(), keys.pool.double()[rows])
    scores = (dots.relu() * weights.double()[..., None]).sum(1)
    if keys.hidden is not None:
        scores = scores.masked_fill(keys.hidden, -torch.inf)
    if keys.counts is not None:
        places = torch.arange(rows.shape[1], device=rows.device)
        scores = scores.masked_fill(places >= keys.counts[:, None], -torch.inf)
    order = scores.sort(stable=True, dim=-1, descending=True).indices
    return order[:, :k].sort(-1).values

"""How much of attention the pages carry that bounds select, on made-up keys.

Owns the keys and the figures. They are no model's: spans of a text share a direction, as the keys
of a topic do, and a query asks for a few spans.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from stratakv.engine.attention.page_bounds import chosen_pages, page_scores

TOKENS: Final = 16_384
PAGE_ROWS: Final = 16
HEADS: Final = 8
KV_HEADS: Final = 2
HEAD_DIM: Final = 64
SPAN_TOKENS: Final = 100
SPANS_ASKED: Final = 12
SHARPNESS: Final = 10.0
QUERIES: Final = 40
PARTS: Final = (0.05, 0.10, 0.20)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallCase:
    """``part`` of all pages selected: the part of attention's weight that they carry, beside that
    of the best pages of as many, and of pages at random."""

    part: float
    recall: float
    best_recall: float
    random_recall: float


def recall_cases() -> Iterator[RecallCase]:
    random = torch.Generator().manual_seed(0)
    spans, pages = -(-TOKENS // SPAN_TOKENS), TOKENS // PAGE_ROWS
    directions = torch.randn(spans, KV_HEADS, HEAD_DIM, generator=random)
    noise = torch.randn(TOKENS, KV_HEADS, HEAD_DIM, generator=random)
    keys = directions.repeat_interleave(SPAN_TOKENS, 0)[:TOKENS] + noise
    asked = torch.stack([_query(random, directions) for _ in range(QUERIES)])
    by_page = keys.view(pages, PAGE_ROWS, KV_HEADS, HEAD_DIM)
    bounds = torch.stack((by_page.amin(1), by_page.amax(1)), 1)
    weights = _weights(asked, keys).view(QUERIES, pages, PAGE_ROWS).sum(2)
    ranked = {
        "recall": page_scores(asked, bounds),
        "best_recall": weights,
        "random_recall": torch.rand(QUERIES, pages, generator=random),
    }
    own = torch.full((QUERIES,), pages - 1)
    for part in PARTS:
        count = round(part * pages)
        yield RecallCase(part=part, **{
            name: float((weights * chosen_pages(ranks, own, count)).sum(1).mean())
            for name, ranks in ranked.items()
        })  # fmt: skip


def _query(random: torch.Generator, directions: torch.Tensor) -> torch.Tensor:
    chosen = torch.randperm(len(directions), generator=random)[:SPANS_ASKED]
    wanted = directions[chosen].mean(0).repeat_interleave(HEADS // KV_HEADS, 0)
    return SHARPNESS * wanted + torch.randn(wanted.shape, generator=random)


def _weights(asked: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Of all heads together, [queries, tokens]."""
    shared = keys.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("thd,qhd->qht", shared, asked) / HEAD_DIM**0.5
    return scores.softmax(-1).mean(1)

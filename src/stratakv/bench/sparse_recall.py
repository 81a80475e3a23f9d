"""How much of attention the pages carry that bounds select, on made-up keys.

Owns the keys and the figures. They are no model's: spans of a text share a direction, as the keys
of a topic do, and a query asks for a few spans.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from stratakv.sparse.page_bounds import Floats, page_bounds, page_scores, recall, select_pages

TOKENS: Final = 16_384
PAGE_ROWS: Final = 16
HEADS: Final = 8
KV_HEADS: Final = 2
HEAD_DIM: Final = 64
SPAN_TOKENS: Final = 100
SPANS_ASKED: Final = 12
SHARPNESS: Final = 10.0
NEWEST: Final = 4
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
    rng = np.random.default_rng(0)
    spans = -(-TOKENS // SPAN_TOKENS)
    directions = rng.normal(size=(spans, KV_HEADS, HEAD_DIM))
    noise = rng.normal(size=(TOKENS, KV_HEADS, HEAD_DIM))
    keys = np.repeat(directions, SPAN_TOKENS, 0)[:TOKENS] + noise
    asked = [_query(rng, directions) for _ in range(QUERIES)]
    pages = TOKENS // PAGE_ROWS
    by_page = keys.reshape(pages, PAGE_ROWS, KV_HEADS, HEAD_DIM).astype(np.float32)
    bounds = page_bounds(by_page, np.full(pages, PAGE_ROWS, np.int32))
    weights = np.stack([_weights(query, keys) for query in asked])
    scores = np.stack([page_scores(query, bounds) for query in asked])
    of_page = weights.reshape(QUERIES, pages, PAGE_ROWS).sum(2)
    for part in PARTS:
        count = round(part * pages)
        ranked = {
            "recall": scores,
            "best_recall": of_page,
            "random_recall": rng.random(scores.shape).astype(np.float32),
        }
        yield RecallCase(part=part, **{
            name: _recall(weights, ranks, count) for name, ranks in ranked.items()
        })  # fmt: skip


def _query(rng: np.random.Generator, directions: np.ndarray) -> Floats:
    chosen = rng.choice(len(directions), SPANS_ASKED, replace=False)
    wanted = np.repeat(directions[chosen].mean(0), HEADS // KV_HEADS, 0)
    return (SHARPNESS * wanted + rng.normal(size=wanted.shape)).astype(np.float32)


def _weights(query: Floats, keys: np.ndarray) -> Floats:
    """Of all heads together, float32 [tokens]."""
    shared = np.repeat(keys, HEADS // KV_HEADS, 1)
    scores = np.einsum("thd,hd->ht", shared, query) / np.sqrt(HEAD_DIM)
    each = np.exp(scores - scores.max(1, keepdims=True))
    return (each / each.sum(1, keepdims=True)).mean(0).astype(np.float32)


def _recall(weights: Floats, ranks: Floats, count: int) -> float:
    lengths = np.full(len(ranks), ranks.shape[1], np.int32)
    selected = select_pages(ranks, lengths, count, NEWEST)
    each = [recall(one, pages, PAGE_ROWS) for one, pages in zip(weights, selected, strict=True)]
    return float(np.mean(each))

"""A selector for models that have none: which pages of keys a query may care about, by bounds.

Owns the bounds of each page and the choice among pages. **Approximate**: attention over what is
selected is not attention over everything, and ``recall`` says how far it is from it. Must not
attend to anything.

A page's bounds are, for each element of a key, the least and the greatest value among its rows. No
key of the page can score more than the sum of what each element gives at its better bound, so pages
are ranked by that sum (Quest, 2024). A selection of pages goes the way of any other: through
``HotBuffers``, with a page for an entry.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PageBounds:
    """float32 [pages, kv_heads, head_dim], both."""

    least: Floats
    greatest: Floats


def page_bounds(keys: Floats, filled: npt.NDArray[np.int32]) -> PageBounds:
    """Of ``keys`` [pages, rows, kv_heads, head_dim], of which ``filled[i]`` >= 1 rows of page i are
    written; what the others hold does not matter."""
    there = (np.arange(keys.shape[1]) < filled[:, None])[:, :, None, None]
    return PageBounds(
        least=np.where(there, keys, np.inf).min(1).astype(np.float32),
        greatest=np.where(there, keys, -np.inf).max(1).astype(np.float32),
    )


def widen(bounds: PageBounds, pages: npt.NDArray[np.int32], keys: Floats) -> PageBounds:
    """The bounds after one more row of each of ``pages``: ``keys`` [n, kv_heads, head_dim]."""
    least, greatest = bounds.least.copy(), bounds.greatest.copy()
    least[pages] = np.minimum(least[pages], keys)
    greatest[pages] = np.maximum(greatest[pages], keys)
    return PageBounds(least, greatest)


def page_scores(query: Floats, bounds: PageBounds) -> Floats:
    """float32 [pages]: the most that any row of a page can score for ``query`` [heads, head_dim],
    summed over heads. Heads share a key in groups, as their order says."""
    heads, width = query.shape
    shared = query.reshape(bounds.least.shape[1], -1, width)
    assert shared.shape[0] * shared.shape[1] == heads, "heads that share no key evenly"
    # A positive element is at its best with the greatest value, a negative one with the least; the
    # heads of one key can be summed before they are multiplied.
    up, down = np.maximum(shared, 0).sum(1), np.minimum(shared, 0).sum(1)
    return np.einsum("pkd,kd->p", bounds.greatest, up) + np.einsum("pkd,kd->p", bounds.least, down)


def select_pages(
    scores: Floats, lengths: npt.NDArray[np.int32], pages: int, newest: int
) -> npt.NDArray[np.int32]:
    """int32 [requests, pages]: of ``scores`` [requests, n], of which request i has ``lengths[i]``
    pages, the best ones and always the ``newest``; -1 where a request has fewer. In ascending
    order; of equal scores the lower page."""
    assert newest <= pages, f"{newest} newest of {pages} pages"
    index = np.arange(scores.shape[1])
    age = lengths[:, None] - index
    ranked = np.where(age <= newest, np.inf, scores)
    ranked = np.where(age >= 1, ranked, -np.inf)
    best = np.argsort(-ranked, axis=1, kind="stable")[:, :pages]
    chosen = np.sort(np.where(np.take_along_axis(age, best, 1) >= 1, best, len(index)), axis=1)
    out = np.where(chosen < len(index), chosen, NONE).astype(np.int32)
    short = pages - out.shape[1]
    return np.pad(out, ((0, 0), (0, max(0, short))), constant_values=NONE)


def recall(weights: Floats, selected: npt.NDArray[np.int32], page_rows: int) -> float:
    """The part of attention's ``weights`` [tokens] of one query that lies on ``selected`` pages."""
    pages = np.bincount(np.arange(len(weights)) // page_rows, weights)
    return float(pages[selected[selected != NONE]].sum() / pages.sum())

"""A selector for models that have none: which pages of keys a query may care about, by bounds.

Owns the bounds of each page and the choice among pages. **Approximate**: attention over what is
selected is not attention over everything. Must not attend to anything (``page_selection``).

A page's bounds are, for each element of a key, the least and the greatest value among its rows. No
key of the page can score more than the sum of what each element gives at its better bound, so pages
are ranked by that sum (Quest, 2024). A page that a query has behind it is full and its bounds do
not change, and scores are exact: so what a query selects does not depend on how a prompt is cut.
"""

from typing import Final

import torch

from stratakv.engine.deepseek.common_exact import exact_bits, on_grid
from stratakv.engine.deepseek.common_topk import highest

NEWEST: Final = 2
"""Pages that every query sees: its own, and the one before."""


def widen(
    bounds: torch.Tensor, keys: torch.Tensor, pages: torch.Tensor, begun: torch.Tensor
) -> None:
    """Take ``keys`` [T, heads, dim] into the bounds [pool pages, 2, heads, dim] of ``pages`` int64
    [T]; ``begun``, int64 [any]: pages whose first row is among them."""
    least, greatest = bounds[:, 0], bounds[:, 1]
    least.index_fill_(0, begun, torch.inf)
    greatest.index_fill_(0, begun, -torch.inf)
    index = pages[:, None, None].expand_as(keys)
    least.scatter_reduce_(0, index, keys, "amin")
    greatest.scatter_reduce_(0, index, keys, "amax")


def page_scores(query: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """The most that any row of a page can score, summed over heads, which share a key in groups.

    query: [m, H, dim]. bounds: [n, 2, heads, dim], which all share, or [m, n, 2, heads, dim].
    float64 [m, n], the same to the last bit in any batch.
    """
    heads, dim = bounds.shape[-2:]
    (count, all_heads, _), group = query.shape, query.shape[1] // heads
    assert group * heads == all_heads, "heads that share no key evenly"
    bits = exact_bits(2 * heads * dim * group)
    asked = on_grid(query.flatten(1), bits).view(count, heads, group, dim)
    # A positive element is at its best with the greatest value, a negative one with the least; the
    # heads of one key can be summed before they are multiplied.
    down, up = asked.clamp(max=0).sum(2), asked.clamp(min=0).sum(2)
    wanted = torch.stack((down, up), 1).flatten(1)
    rows = on_grid(bounds.flatten(-3), bits)
    if rows.dim() == 2:
        return wanted @ rows.mT
    return (rows @ wanted[:, :, None]).squeeze(-1)


def chosen_pages(scores: torch.Tensor, own: torch.Tensor, pages: int) -> torch.Tensor:
    """bool [m, n] with ``pages`` < n true in each row: the best of ``scores`` [m, n] for queries
    whose own pages are ``own`` int64 [m], and always the newest; of equal scores the lower page.
    Where a query has fewer, the others are behind its own."""
    age = own[:, None] - torch.arange(scores.shape[1], device=scores.device)
    ranked = scores.masked_fill(age < NEWEST, torch.inf).masked_fill(age < 0, -torch.inf)
    return highest(ranked, pages)

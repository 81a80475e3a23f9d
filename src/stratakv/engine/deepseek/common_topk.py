"""The best k of n, the same ones on every device, in every batch and in any pieces.

Owns the tie rule: among equal scores the lowest index wins. torch's ``topk`` leaves that open, and
with it which tokens a query attends to: two runs of one request could differ.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import torch

from stratakv.engine.attention.scratch_limit import PairCost

try:
    from stratakv.engine.deepseek import compiled_scores as _compiled
except ImportError:  # the same in torch, some times more slowly
    _compiled = None

Score: TypeAlias = Callable[[slice, slice], torch.Tensor]
"""Of some queries and some of their keys, float32 [r, m]."""
CHOOSING_BYTES: Final = 64
"""Scratch of choosing, per score."""


def highest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores: [..., n >= k]. Returns bool [..., n] with exactly k true per row. NaN counts as
    highest, as in torch: a broken row must show in what is read next, not hide or stop a batch."""
    scores = scores.masked_fill(scores.isnan(), torch.inf)
    least = scores.topk(k, -1).values[..., -1:]
    above, equal = scores > least, scores == least
    room = k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def highest_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The same as indices, int64 [..., k], ascending."""
    if scores.dtype == torch.float32 and _compiled is not None and _compiled.near(scores):
        return _compiled.compiled_best(scores, k)
    return torch_highest_indices(scores, k)


def torch_highest_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The same by torch's operations."""
    return highest(scores, k).nonzero()[:, -1].view(*scores.shape[:-1], k)


def best_places(score: Score, shape: tuple[int, int], k: int, cost: PairCost) -> torch.Tensor:
    """``highest_indices`` of scores [queries, keys >= k] of which only a piece is there at a time.

    cost: of ``score`` alone.
    """
    queries, keys = shape
    cost = PairCost(cost.key_bytes, cost.pair_bytes + CHOOSING_BYTES)
    some, width = cost.cut(queries, keys, k)
    found = [
        _best_in_turn(score, slice(at, min(queries, at + some)), (keys, width), k)
        for at in range(0, queries, some)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _best_in_turn(score: Score, some: slice, widths: tuple[int, int], k: int) -> torch.Tensor:
    """Of some queries, [r, k]. widths: of all keys and of a piece."""
    keys, width = widths
    scores = score(some, slice(0, width))
    places = highest_indices(scores, k)
    if width == keys:
        return places
    held = scores.gather(-1, places)
    for begin in range(width, keys, width):
        part = slice(begin, min(keys, begin + width))
        fresh = torch.arange(part.start, part.stop, device=places.device)
        # What is held lies before what is new, so the tie rule still means the lowest place.
        places = torch.cat((places, fresh.expand(len(places), -1)), -1)
        scores = torch.cat((held, score(some, part)), -1)
        best = highest_indices(scores, k)
        held, places = scores.gather(-1, best), places.gather(-1, best)
    return places

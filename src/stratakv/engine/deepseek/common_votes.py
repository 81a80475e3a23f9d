"""The scores of an indexer: heads vote on keys, by what is positive of their dot products.

Owns their arithmetic. The score of a query and a key is a function of the two alone, to the last
bit: equal keys tie wherever they lie, so that the tie rule (``common_topk``) means something. Must
not know masks, nor how keys came to be.
"""

from collections.abc import Iterator
from typing import Final

import torch

from stratakv.engine.attention.scratch_limit import PairCost
from stratakv.engine.deepseek.common_exact import exact_bits, folded, on_grid

try:
    from stratakv.engine.deepseek import compiled_scores as _compiled
except ImportError:  # the same in torch, some times more slowly
    _compiled = None

WIDE_BYTES: Final = 8
"""Of float64."""
VOTES_COST: Final = PairCost(0, 8)
"""Of ``votes``, beside its tiles: the scores and a mask of theirs."""


def votes(
    query: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Sum over heads of weight * relu(query . key), float32 [m, n].

    query: [m, H, d]. weights: [m, H], of either sign. pool: keys, [any, d]. rows: int64 [n], or
    [m, n], each query's own. NaN where a query or a key has an element that is not finite.
    """
    if rows.dim() == 2 and _compiled is not None and _compiled.reads(pool):
        return _compiled.compiled_votes(query, weights, pool, rows)
    return torch_votes(query, weights, pool, rows)


def torch_votes(
    query: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The same by torch's operations: one large product where all share ``rows``."""
    (count, heads, dim), keys = query.shape, rows.shape[-1]
    bits, shared = exact_bits(dim), rows.dim() == 1
    found = torch.empty(count, keys, dtype=torch.float32, device=query.device)
    some, width = _cost(pool, heads, shared=shared).tile(count, keys)
    wide = weights.double()
    for part in _runs(keys, width):
        common = _read(pool, rows[part], bits) if shared else None
        for few in _runs(count, some):
            asked = on_grid(query[few], bits)
            if common is not None:
                # One large product instead of many small ones.
                dots = (asked.flatten(0, 1) @ common.mT).view(len(asked), heads, -1)
            else:
                dots = asked @ _read(pool, rows[few, part], bits).mT
            found[few, part] = folded(dots.relu_().mul_(wide[few, :, None]))
    return found


def _read(pool: torch.Tensor, rows: torch.Tensor, bits: int) -> torch.Tensor:
    """float64 [..., d]."""
    keys = pool.index_select(0, rows.reshape(-1))
    return on_grid(keys, bits).view(*rows.shape, -1)


def _cost(pool: torch.Tensor, heads: int, *, shared: bool) -> PairCost:
    """Of a key: its place, what is read, the same without signs, and in float64."""
    key_bytes = 8 + pool.shape[1] * (2 * pool.element_size() + WIDE_BYTES)
    head_bytes = heads * WIDE_BYTES
    return PairCost(key_bytes, head_bytes) if shared else PairCost(0, key_bytes + head_bytes)


def _runs(count: int, most: int) -> Iterator[slice]:
    for start in range(0, count, most):
        yield slice(start, min(count, start + most))

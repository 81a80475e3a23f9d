"""Scores in C. Owns the way into ``_scores``, and for which tensors it is the faster one; must not
compute anything itself. Importing this module fails with ImportError where the package was
installed without a compiler; ``common_votes`` and ``common_topk`` then do the same work in torch,
to the last bit.
"""

from typing import Final

import torch

from stratakv.engine.deepseek import _scores
from stratakv.engine.deepseek.common_exact import MANTISSA_BITS, exact_bits, on_grid

MOST_THREADS: Final = 4
"""Of torch. One thread does here what some of torch's do together."""
_NARROW: Final = {torch.bfloat16: torch.int16, torch.float32: torch.float32}
"""By dtype of keys: what NumPy has for their bits."""


def near(tensor: torch.Tensor) -> bool:
    """Whether this is the place to work on it."""
    return tensor.is_cpu and torch.get_num_threads() <= MOST_THREADS


def reads(pool: torch.Tensor) -> bool:
    """Whether keys of such a pool can be read here."""
    return near(pool) and pool.dtype in _NARROW and pool.is_contiguous()


def compiled_votes(
    query: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """As ``votes`` in ``common_votes``, of rows [m, n]."""
    bits = exact_bits(query.shape[-1])
    found = torch.empty(rows.shape, dtype=torch.float32)
    _scores.votes_into(
        on_grid(query, bits).numpy(),
        weights.double().contiguous().numpy(),
        pool.view(_NARROW[pool.dtype]).numpy(),
        rows.contiguous().numpy(),
        found.numpy(),
        1.5 * 2.0 ** (MANTISSA_BITS - bits),
    )
    return found


def compiled_best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """As ``highest_indices`` in ``common_topk``."""
    flat = scores.reshape(-1, scores.shape[-1]).contiguous()
    places = torch.empty((len(flat), k), dtype=torch.int64)
    _scores.best_into(flat.numpy(), places.numpy())
    return places.view(*scores.shape[:-1], k)

"""Which index keys each query selects, with torch's kernels and those in C. Owns that scores are
hidden before the best are chosen, a piece of the keys at a time.
"""

import torch

from stratakv.engine.attention.kernels import IndexKeys
from stratakv.engine.deepseek.common_topk import best_places
from stratakv.engine.deepseek.common_votes import VOTES_COST, votes


def best_keys(query: torch.Tensor, weights: torch.Tensor, keys: IndexKeys, k: int) -> torch.Tensor:
    """As ``AttentionKernels.best_keys``."""

    def score(some: slice, part: slice) -> torch.Tensor:
        return hidden_votes(query, weights, keys, some, part)

    return best_places(score, (len(query), keys.rows.shape[-1]), k, VOTES_COST)


def hidden_votes(
    query: torch.Tensor, weights: torch.Tensor, keys: IndexKeys, some: slice, part: slice
) -> torch.Tensor:
    """float32 [queries, keys] of some of both; -inf where a key is hidden."""
    rows = keys.rows[part] if keys.rows.dim() == 1 else keys.rows[some, part]
    found = votes(query[some], weights[some], keys.pool, rows)
    if keys.hidden is not None:
        found.masked_fill_(keys.hidden[some, part], -torch.inf)
    if keys.counts is not None:
        first = part.start or 0
        places = torch.arange(first, first + found.shape[1], device=found.device)
        found.masked_fill_(places >= keys.counts[some, None], -torch.inf)
    return found

"""The best k of n, the same ones on every device and in every batch.

Owns the tie rule: among equal scores the lowest index wins. torch's ``topk`` leaves that open, and
with it which tokens a query attends to: two runs of one request could differ.
"""

import torch


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
    return highest(scores, k).nonzero()[:, -1].view(*scores.shape[:-1], k)

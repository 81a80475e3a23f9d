"""Draws a token from each row of logits, on the device that has them: nothing here is read.

Owns the randomness: one number per token, a function of (seed, position) alone, so that what a
request generates does not depend on who shares its batch. Ties always go to the lowest token id.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from stratakv.engine.batch import SamplingBatch
from stratakv.engine.processed_logits import masked, processed
from stratakv.engine.tensors import finite_in, on_device, read_freely

CANDIDATES: Final = 1024
"""Tokens sorted to find the nucleus; the whole vocabulary only where these weigh too little."""

NOT_FINITE: Final = -1
NO_TOKEN: Final = -3


def chosen_tokens(logits: torch.Tensor, params: SamplingBatch) -> torch.Tensor:
    """logits: float32 [S, vocab] -> one token a row, int64 [S].

    ``temperature`` 0 takes the likeliest token. Otherwise logits are divided by it, cut to the
    tokens with ``min_p`` of the likeliest one's weight, then to the ``top_k`` likeliest (0: all),
    then to the fewest of these that hold ``top_p`` of their mass (at least one). All that after
    ``masks`` and ``processors``.

    A row that holds NaN or +infinity, or nothing that is finite, gets ``NOT_FINITE``; one that does
    so only after ``masks`` and ``processors`` gets ``NO_TOKEN``: that is its request's fault, not
    the model's or a page's. -infinity is the logits of tokens that it never chooses.
    """
    if not len(logits):
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    raw = logits
    if params.masks is not None:
        logits = masked(logits, params.masks)
    if params.processors is not None:
        logits = processed(logits, params.processors)
    most, tokens = logits.max(-1)  # the first one, where several tie; NaN is more than anything
    random = np.flatnonzero(params.temperature > 0)
    if len(random) == len(logits):
        tokens = _draw(logits, params, random)
    elif len(random):
        tokens.index_copy_(0, on_device(random, logits.device), _draw(logits, params, random))
    finite = finite_in(most)
    if logits is raw:
        return torch.where(finite, tokens, NOT_FINITE)
    failed = torch.where(raw.amax(-1).isfinite(), NO_TOKEN, NOT_FINITE)
    return torch.where(finite, tokens, failed)


def uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """float64 [S] in [0, 1): SplitMix64 of the position on the stream that the seed selects.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), has the
    constants and the mixer. The seed is mixed first, so neighbouring seeds share no numbers.
    """
    with np.errstate(over="ignore"):
        stream = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
        steps = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = _mix(stream + steps)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _draw(logits: torch.Tensor, params: SamplingBatch, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Invert each row's cumulative distribution, in order of token id, at its random number."""
    device = logits.device
    picked = logits[on_device(rows, device)]
    temperature = on_device(params.temperature[rows], device)
    # The likeliest token has weight 1 at any temperature; the rest may underflow to 0, harmlessly.
    weights = ((picked - picked.amax(-1, keepdim=True)) / temperature[:, None]).double().exp_()
    if (least := params.min_p[rows]).any():
        weights *= weights >= on_device(least.astype(np.float64), device)[:, None]
    top_k, top_p = params.top_k[rows], params.top_p[rows]
    cut = np.flatnonzero((top_k > 0) | (top_p < 1))
    if len(cut):
        index = on_device(cut, device)
        some = weights[index]
        weights[index] = some * _kept(some, top_k[cut], top_p[cut])
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    point = on_device(uniform(params.seeds[rows], params.positions[rows]), device)[:, None] * total
    # Rounding must not reach the total itself: beyond it lies no token.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True)[:, 0]


def _kept(
    weights: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: npt.NDArray[np.float32]
) -> torch.Tensor:
    """Which tokens each row keeps, the likeliest, bool as ``weights`` [n, vocab]; at least one."""
    vocab, device = weights.shape[1], weights.device
    limits = np.minimum(np.where(top_k > 0, top_k, vocab), vocab).astype(np.int64)
    limit = on_device(limits, device)[:, None]
    share = on_device(top_p.astype(np.float64), device)[:, None]
    size = min(vocab, max(CANDIDATES, int(limits[limits < vocab].max(initial=1))))
    open_ended = bool(((limits == vocab) & (top_p < 1)).any())
    if open_ended and not read_freely(weights):
        size = vocab  # to know whether less would do, the host would have to wait
    values = weights.topk(size, -1).values
    cumulative = values.cumsum(-1)
    # A row without top_k shares out its whole mass, summed in one way whatever ``size`` is.
    total = cumulative.gather(1, limit.clamp(max=size) - 1)
    total = torch.where(limit < vocab, total, weights.cumsum(-1)[:, -1:])
    short = (limit == vocab) & (share < 1) & (cumulative[:, -1:] < share * total)
    if size < vocab and open_ended and bool(short.any()):
        values = weights.topk(vocab, -1).values
        cumulative = values.cumsum(-1)
    nucleus = (cumulative < share * total).sum(-1, keepdim=True) + 1
    counts = torch.where(share >= 1, limit, torch.minimum(nucleus, limit))
    known = values.shape[1]
    threshold = values.gather(1, counts.clamp(max=known) - 1)
    # Who keeps more than were sorted keeps all.
    return likeliest(weights, counts, threshold.masked_fill_(counts > known, -1.0))


def likeliest(weights: torch.Tensor, counts: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """bool [n, vocab]: the ``counts[i]`` (int64 [n, 1], >= 1) largest of row i; ties to the lowest
    ids. threshold: [n, 1], the least of these."""
    above = weights > threshold
    tied = weights == threshold
    room = counts - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))

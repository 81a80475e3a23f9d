"""Chooses the next token of every sampled row, all rows at once, and reports which rows it cannot.

Owns the randomness: one number per token, a function of (seed, position) alone, so that what a
request generates does not depend on who shares its batch. Ties always go to the lowest token id.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import NONE, RowIds, TokenIds
from stratakv.engine.batch import PromptTargets, SamplingBatch
from stratakv.engine.forward import Forward
from stratakv.engine.processed_logits import masked, processed
from stratakv.engine.request import Failure, TokenLogprob
from stratakv.engine.tensors import on_host

CANDIDATES: Final = 1024
"""Tokens sorted to find the nucleus; the whole vocabulary only where these weigh too little."""

SCORED_AT_ONCE: Final = 64
"""Prompt tokens, each with the logits of a vocabulary in float32."""

NOT_FINITE: Final = -1
FAILED: Final = -2
NO_TOKEN: Final = -3
FAILURES: Final = {
    NOT_FINITE: Failure.NOT_FINITE, FAILED: Failure.INTERNAL, NO_TOKEN: Failure.NO_TOKEN,
}  # fmt: skip
"""What stands where there is no token, and why: ranks exchange tokens."""

Places: TypeAlias = npt.NDArray[np.intp]


def nowhere() -> Places:
    return np.empty(0, np.intp)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """tokens: int32 [S], or one of ``FAILURES``. logprobs: [S], None where the row wants none.
    broken: places in the step's batch of the requests of which not all is finite, int64 [B].
    scores: of the prompt tokens that were to be scored, [K]; None where another rank knows."""

    tokens: TokenIds
    logprobs: list[TokenLogprob | None]
    broken: Places = field(default_factory=nowhere)
    scores: Sequence[TokenLogprob | None] = ()

    def failures(self, batch: RowIds, rows: RowIds) -> dict[int, Failure]:
        """Which rows go on no further; ``batch``: all rows of the step, ``rows``: [S] of them."""
        if not len(self.broken) and (not len(self.tokens) or self.tokens.min() >= 0):
            return {}
        found = dict.fromkeys(batch[self.broken].tolist(), Failure.NOT_FINITE)
        bad = np.flatnonzero(self.tokens < 0)
        for row, token in zip(rows[bad].tolist(), self.tokens[bad].tolist(), strict=True):
            found.setdefault(row, FAILURES[token])
        return found

    def only(self, kept: npt.NDArray[np.bool_]) -> "Sampled":
        """Some of the sampled rows, none of them broken, and no scores."""
        logprobs = [self.logprobs[at] for at in np.flatnonzero(kept).tolist()]
        return Sampled(self.tokens[kept], logprobs)


def choose(forward: Forward, params: SamplingBatch) -> Sampled:
    """A token for every row that can have one; of a forward that brings its own, those."""
    if forward.chosen is not None:
        return forward.chosen
    sampled = sample_each(forward.logits, params)
    if params.targets is not None:
        assert forward.scored is not None, "the runner has scored nothing"
        sampled = replace(sampled, scores=score(forward.scored, params.targets))
    if forward.finite.all():
        return sampled
    return replace(sampled, broken=np.flatnonzero(~forward.finite))


def score(logits: torch.Tensor, targets: PromptTargets) -> list[TokenLogprob | None]:
    """logits: [K, vocab] -> how likely each target was, a piece at a time; None where the logits
    are not finite, and the request fails for it."""
    found: list[TokenLogprob | None] = []
    for at in range(0, len(logits), SCORED_AT_ONCE):
        piece = logits[at : at + SCORED_AT_ONCE].float()
        (finite,) = on_host(piece.amax(-1).isfinite())
        top = targets.top[at : at + SCORED_AT_ONCE]
        tokens = targets.tokens[at : at + SCORED_AT_ONCE]
        found += _logprobs(piece, tokens, np.where(finite, top, np.int32(NONE)))
    return found


def sample_each(logits: torch.Tensor, params: SamplingBatch) -> Sampled:
    """``sample``, and where that fails row by row, so that only the rows fail that must."""
    try:
        return sample(logits, params)
    except AssertionError:
        raise
    except Exception:
        log.exception("sampling %s rows at once failed; each is tried alone", len(logits))
    tokens = np.full(len(logits), FAILED, np.int32)
    logprobs: list[TokenLogprob | None] = [None] * len(logits)
    for row in range(len(logits)):
        try:
            alone = sample(logits[row : row + 1], params.only(np.array([row])))
        except AssertionError:
            raise
        except Exception:
            log.exception("sampling failed for one request")
            continue
        tokens[row], logprobs[row] = alone.tokens[0], alone.logprobs[0]
    return Sampled(tokens, logprobs)


def sample(logits: torch.Tensor, params: SamplingBatch) -> Sampled:
    """logits: float32 [S, vocab] -> one token a row.

    ``temperature`` 0 takes the likeliest token. Otherwise logits are divided by it, cut to the
    tokens with ``min_p`` of the likeliest one's weight, then to the ``top_k`` likeliest (0: all),
    then to the fewest of these that hold ``top_p`` of their mass (at least one). All that after
    ``masks`` and ``processors``. Log-probabilities are of the raw logits, as OpenAI's and vLLM's.

    A row that holds NaN or +infinity, or nothing that is finite, gets ``NOT_FINITE``; one that does
    so only after ``masks`` and ``processors`` gets ``NO_TOKEN``: that is its request's fault, not
    the model's or a page's. -infinity is the logits of tokens that it never chooses.
    """
    if not len(logits):
        return Sampled(np.empty(0, np.int32), [])
    raw = logits
    if params.masks is not None:
        logits = masked(logits, params.masks)
    if params.processors is not None:
        logits = processed(logits, params.processors)
    most, first = logits.max(-1)  # the first one, where several tie; NaN is more than anything
    likely, highest = on_host(first, most)
    tokens, finite = likely.astype(np.int32), np.isfinite(highest)
    random, wanted = params.temperature > 0, params.logprobs
    if not finite.all():
        tokens[~finite] = NOT_FINITE
        if logits is not raw:
            tokens[~finite & on_host(raw.amax(-1).isfinite())[0]] = NO_TOKEN
        random, wanted = random & finite, np.where(finite, wanted, np.int32(NONE))
    if random.any():
        drawn = np.flatnonzero(random)
        tokens[drawn] = _draw(logits, params, drawn)
    return Sampled(tokens, _logprobs(raw, tokens, wanted))


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
    """float64 [S] in [0, 1): SplitMix64 of the position on the stream that the seed selects.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), has the
    constants and the mixer. The seed is mixed first, so neighbouring seeds share no numbers.
    """
    with np.errstate(over="ignore"):
        stream = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
        steps = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = _mix(stream + steps)
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _draw(
    logits: torch.Tensor, params: SamplingBatch, rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Invert each row's cumulative distribution, in order of token id, at its random number."""
    device = logits.device
    picked = logits[torch.from_numpy(rows).to(device)]
    temperature = torch.from_numpy(params.temperature[rows]).to(device)
    # The likeliest token has weight 1 at any temperature; the rest may underflow to 0, harmlessly.
    weights = ((picked - picked.amax(-1, keepdim=True)) / temperature[:, None]).double().exp_()
    if (least := params.min_p[rows]).any():
        weights *= weights >= torch.from_numpy(least.astype(np.float64)).to(device)[:, None]
    top_k, top_p = params.top_k[rows], params.top_p[rows]
    cut = np.flatnonzero((top_k > 0) | (top_p < 1))
    if len(cut):
        index = torch.from_numpy(cut).to(device)
        some = weights[index]
        counts = _kept(some, top_k[cut], top_p[cut])
        weights[index] = some * likeliest(some, counts)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    point = uniform(params.seeds[rows], params.positions[rows]).to(device)[:, None] * total
    # Rounding must not reach the total itself: beyond it lies no token.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, point, right=True)[:, 0]
    return on_host(tokens)[0].astype(np.int32)


def _kept(
    weights: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: npt.NDArray[np.float32]
) -> torch.Tensor:
    """How many of the likeliest tokens each row keeps, int64 [n] >= 1; weights: [n, vocab]."""
    vocab, device = weights.shape[1], weights.device
    limits = np.minimum(np.where(top_k > 0, top_k, vocab), vocab).astype(np.int64)
    limit = torch.from_numpy(limits).to(device)[:, None]
    share = torch.from_numpy(top_p.astype(np.float64)).to(device)[:, None]
    size = min(vocab, max(CANDIDATES, int(limits[limits < vocab].max(initial=1))))
    cumulative = weights.topk(size, -1).values.cumsum(-1)
    # A row without top_k shares out its whole mass, summed in one way whatever ``size`` is.
    total = cumulative.gather(1, limit.clamp(max=size) - 1)
    total = torch.where(limit < vocab, total, weights.cumsum(-1)[:, -1:])
    short = (limit == vocab) & (share < 1) & (cumulative[:, -1:] < share * total)
    if size < vocab and bool(short.any()):
        cumulative = weights.topk(vocab, -1).values.cumsum(-1)
    nucleus = (cumulative < share * total).sum(-1, keepdim=True) + 1
    return torch.where(share >= 1, limit, torch.minimum(nucleus, limit))[:, 0]


def likeliest(weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """bool [n, vocab]: the ``counts[i]`` (int64, >= 1) largest of row i; ties to the lowest ids."""
    size = int(counts.max())
    threshold = weights.topk(size, -1).values.gather(1, counts[:, None] - 1)
    above = weights > threshold
    tied = weights == threshold
    room = counts[:, None] - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def _logprobs(
    logits: torch.Tensor, tokens: TokenIds, wanted: npt.NDArray[np.int32]
) -> list[TokenLogprob | None]:
    """Of the chosen token and of the ``wanted`` likeliest ones; None where ``wanted`` is -1."""
    reports: list[TokenLogprob | None] = [None] * len(tokens)
    rows = np.flatnonzero(wanted >= 0)
    if not len(rows):
        return reports
    index = torch.from_numpy(rows).to(logits.device)
    scores = logits[index].log_softmax(-1)
    chosen = torch.from_numpy(tokens[rows].astype(np.int64)).to(logits.device)
    chosen_scores = scores.gather(1, chosen[:, None])[:, 0].tolist()
    most = min(int(wanted[rows].max()), logits.shape[1])
    top_ids: list[list[int]] = [[] for _ in rows]
    top_scores: list[list[float]] = [[] for _ in rows]
    if most:
        counts = torch.full((len(rows),), most, device=logits.device)
        ids = likeliest(scores, counts).nonzero()[:, 1].view(len(rows), most)
        values, order = torch.sort(scores.gather(1, ids), dim=-1, descending=True, stable=True)
        top_ids, top_scores = ids.gather(1, order).tolist(), values.tolist()
    for at, row in enumerate(rows):
        top = zip(top_ids[at][: wanted[row]], top_scores[at][: wanted[row]], strict=True)
        reports[row] = TokenLogprob(chosen=chosen_scores[at], top=tuple(top))
    return reports

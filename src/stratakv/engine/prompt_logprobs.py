"""Log-probabilities of a prompt's own tokens, chunk by chunk, as its tokens are computed.

Owns which tokens of a step are scored, and against what. A token whose keys and values come from a
cache has no logits: who wants them reads none (``CacheUse``). Torch-free; must not compute any.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import TokenIds
from stratakv.engine.batch import Int32s, PromptTargets
from stratakv.engine.request import Request, TokenLogprob

SCORED_TOKENS: Final = 512
"""Most tokens of a step that belong to prompts with log-probabilities: each has logits of the whole
vocabulary for a moment."""

Places = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTokens:
    """at: of a step's packed tokens, those whose logits say how likely the next prompt token is,
    int64 [K], increasing. targets: those next tokens. owners: whose, in order, and how many."""

    at: Places
    targets: PromptTargets
    owners: tuple[tuple[Request, int], ...]

    def give(self, scores: Sequence[TokenLogprob | None]) -> None:
        """To each request what is its; ``scores``: [K]."""
        at = 0
        for request, count in self.owners:
            request.scored(scores[at : at + count])
            at += count


@dataclass(slots=True)
class _Collected:
    at: list[Places] = field(default_factory=list[Places])
    tokens: list[TokenIds] = field(default_factory=list[TokenIds])
    top: list[Int32s] = field(default_factory=list[Int32s])
    owners: list[tuple[Request, int]] = field(default_factory=list[tuple[Request, int]])


def room_for_scores(prefilling: Sequence[Request], chunks: Sequence[int]) -> list[int]:
    """``chunks``: the most tokens that each request may compute in a step. The same, cut so that no
    more than ``SCORED_TOKENS`` are of prompts with log-probabilities."""
    left, sizes = SCORED_TOKENS, list(chunks)
    for at, request in enumerate(prefilling):
        if request.wants_scores:
            sizes[at] = min(sizes[at], left)
            left -= sizes[at]
    return sizes


def scored_tokens(
    prefilling: Sequence[Request], starts: Int32s, ends: Int32s, first: int
) -> ScoredTokens | None:
    """Of the chunks [starts, ends) of ``prefilling``, which lie one after another from the packed
    token ``first`` on. None: nobody wants any. What a request has scores of is not scored again: it
    may be computed twice, where it was retracted."""
    if not any(request.wants_scores for request in prefilling):
        return None
    found = _Collected()
    for request, start, end in zip(prefilling, starts.tolist(), ends.tolist(), strict=True):
        low, high = max(start, request.scores), min(end, request.prompt_tokens - 1)
        top = request.prompt.sampling.prompt_logprobs
        if top is not None and low < high:
            found.at.append(np.arange(low, high) + (first - start))
            found.tokens.append(request.prompt.tokens[low + 1 : high + 1])
            found.top.append(np.full(high - low, top, np.int32))
            found.owners.append((request, high - low))
        first += end - start
    if not found.owners:
        return None
    targets = PromptTargets(tokens=np.concatenate(found.tokens), top=np.concatenate(found.top))
    return ScoredTokens(np.concatenate(found.at), targets, tuple(found.owners))

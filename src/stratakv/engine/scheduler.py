"""What runs in the next step. Pure choice over plain numbers; owns no request and no page.

A step computes one token of every decoding request and fills the rest of its token budget with
prefill chunks, oldest first. Admission is first come, first served, but for one thing: a request
whose next page another one is computing right now waits for that page instead of computing it too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stratakv.core.ids import PageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """``step_tokens``: the most tokens a step computes; ``chunk_tokens``: of one request;
    ``look_ahead``: how many waiting requests may be looked at in one step, beside those that wait
    for another engine."""

    step_tokens: int
    chunk_tokens: int
    look_ahead: int = 64

    def __post_init__(self) -> None:
        if self.step_tokens < 1 or self.chunk_tokens < 1:
            raise ValueError(f"{self}: allowed is 1 token and more")


def chunk_sizes(limits: StepLimits, decoding: int, left: Sequence[int]) -> list[int]:
    """Tokens that each prefilling request (``left[i]`` still to compute, oldest first) gets beside
    ``decoding`` decoding ones. May be 0; never more than the limits."""
    budget = max(0, limits.step_tokens - decoding)
    sizes: list[int] = []
    for tokens in left:
        size = min(tokens, limits.chunk_tokens, budget)
        sizes.append(size)
        budget -= size
    return sizes


def prefill_room(limits: StepLimits, decoding: int, left: Sequence[int]) -> int:
    """Tokens of the next step that nobody running has a claim to."""
    claimed = sum(min(tokens, limits.chunk_tokens) for tokens in left)
    return limits.step_tokens - decoding - claimed


def worth_waiting(keys: Sequence[PageKey], end: int, limit: int, computing: set[PageKey]) -> bool:
    """Whether page ``end``, the first that a match of at most ``limit`` pages left over, is being
    computed by a running request."""
    return end < limit and keys[end] in computing

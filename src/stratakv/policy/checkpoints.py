"""At which ends of a prompt and its answer something is worth keeping. Owns the arithmetic; pure.

*Checkpoints* are where somebody is expected to continue. *Milestones* lie between them, for those
who part from an old prompt somewhere inside: at distances that double from the end and from the
beginning, so that a few of them serve a branch anywhere at a constant factor. They are kept where
memory allows.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PART: Final = 8
"""A milestone more or less late in a prefix is worth this part of it at least."""


def last_end(tokens: int, page_tokens: int) -> int:
    """The deepest end, in pages, that the same ``tokens`` sent again can hit.

    One token is always computed, so it is ``floorP(n - 1)``: with ``floorP(n)`` a prompt of exactly
    k pages would never hit its own checkpoint.
    """
    return max(0, tokens - 1) // page_tokens


def checkpoint_ends(
    prompt_tokens: int, usable_end: int, anchor_end: int, page_tokens: int
) -> tuple[int, ...]:
    """Ends, in pages and ascending, to keep while a prompt is computed from ``usable_end`` on: the
    branching point, where the anchor matched further than another group could follow, and the
    prompt's own last end."""
    last = last_end(prompt_tokens, page_tokens)
    ends = {last, min(anchor_end, last)}
    return tuple(sorted(end for end in ends if end > usable_end))


def worth_keeping(ends: Sequence[int], last: int, unit: int) -> list[int]:
    """Which of ``ends`` (ascending, below ``last``) are worth a milestone under a prefix that ends
    at ``last``, ascending.

    Who parts between two neighbours hits the upper one. So the gap above a milestone at ``end`` is
    at most what lies behind it, ``last - end``, for those who edit a late turn (or a
    ``PART``th of ``last``: finer ones would save little, and cost as much); and at most half of
    ``end``, for those who share a beginning alone; or ``unit``; as far as there are such ends to
    choose from. That leaves about the binary logarithm of ``last / unit``. What is not worth it
    will not be when the prefix has grown.
    """
    kept: list[int] = []
    below, left = last, len(ends)
    while left:
        gap = max(unit, min(below // 2, max(last - below, last // PART)))
        at = min(bisect_left(ends, below - gap), left - 1)
        kept.append(ends[at])
        below, left = ends[at], at
    return kept[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """``snapshot_pages``: how often a request that decodes keeps what it needs to go on.
    ``unit``: pages between the closest milestones: one, or more where each costs a state."""

    page_tokens: int
    snapshot_pages: int
    unit: int

    def checkpoints(self, prompt_tokens: int, usable_end: int, anchor_end: int) -> list[int]:
        """``checkpoint_ends``."""
        return list(checkpoint_ends(prompt_tokens, usable_end, anchor_end, self.page_tokens))

    def milestones(self, prompt_tokens: int, usable_end: int) -> list[int]:
        """Those to keep while a prompt is computed from ``usable_end`` on, ascending."""
        last = last_end(prompt_tokens, self.page_tokens)
        everywhere = range(self.unit, last, self.unit)
        return [end for end in worth_keeping(everywhere, last, self.unit) if end > usable_end]

    def superfluous(self, milestones: Sequence[int], last: int) -> list[int]:
        """Those of a path's ``milestones`` that are not worth it any more."""
        some = milestones[: bisect_left(milestones, last)]
        kept = set(worth_keeping(some, last, self.unit))
        return [end for end in some if end not in kept]

"""When to ask storage, when to ask again, and how long to wait for it.

Owns the thresholds. Pure: steps are counted by the caller, and a passed deadline is a flag, because
no decision may depend on one rank's clock.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, TypeAlias, assert_never

from stratakv.core.choices import PREFETCH_SHARE, PREFETCH_TIMEOUT_PER_1K_S, PREFETCH_TIMEOUT_S

THRESHOLD_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class BestEffort:
    """A request waits for nothing: what has arrived when it could be admitted is used."""


@dataclass(frozen=True, slots=True)
class WaitComplete:
    """A request waits until its prefetch has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeout:
    """A request waits for ``base_s``, and ``per_1k_tokens_s`` longer for each 1,024 tokens that it
    fetches, but never longer than ``most_s``."""

    base_s: float = PREFETCH_TIMEOUT_S
    per_1k_tokens_s: float = PREFETCH_TIMEOUT_PER_1K_S
    most_s: float = 30.0

    def __post_init__(self) -> None:
        if min(self.base_s, self.per_1k_tokens_s, self.most_s) < 0:
            raise ValueError(f"{self}: allowed are 0 seconds and more")


StopPolicy: TypeAlias = BestEffort | WaitComplete | Timeout


def allowance_s(policy: StopPolicy, tokens: int) -> float | None:
    """How long a request may wait for a prefetch of ``tokens`` from its start; None: for ever."""
    match policy:
        case BestEffort():
            return 0.0
        case WaitComplete():
            return None
        case Timeout():
            return min(policy.base_s + policy.per_1k_tokens_s * tokens / 1024, policy.most_s)
        case _:
            assert_never(policy)


def stops(policy: StopPolicy, *, deadline_passed: bool) -> bool:
    """Whether a prefetch that has not ended is to be stopped, because its request could be admitted
    now."""
    match policy:
        case BestEffort():
            return True
        case WaitComplete():
            return False
        case Timeout():
            return deadline_passed
        case _:
            assert_never(policy)


class FetchStart(Enum):
    PROBE = auto()
    TOO_SHORT = auto()  # and will be: it is not tried again
    RATE_LIMITED = auto()


@dataclass(frozen=True, slots=True)
class Retry:
    """``left`` attempts, the next one at ``at_step``."""

    at_step: int
    left: int

    def due(self, step: int, *, head: bool) -> bool:
        """Whether to try now. Not for the queue's ``head``: it is about to be admitted."""
        return not head and step >= self.at_step


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPolicy:
    """``threshold_tokens``: a prefetch that saves fewer is not begun. ``budget_tokens``: the most
    that may be in flight; a single larger one goes alone rather than never."""

    threshold_tokens: int
    budget_tokens: int
    stop: StopPolicy = field(default_factory=Timeout)
    retry_steps: int = 8
    retry_attempts: int = 8

    def __post_init__(self) -> None:
        if self.threshold_tokens < 1:
            raise ValueError(f"threshold_tokens {self.threshold_tokens}: allowed is 1 and more")
        if self.budget_tokens < 1:
            raise ValueError(f"budget_tokens {self.budget_tokens}: allowed is 1 and more")

    def weigh(self, ahead_tokens: int, in_flight_tokens: int) -> FetchStart:
        """``ahead_tokens``: what storage could at most add to what the tree has. A question costs
        nothing that others could want, so it only waits while the budget is used up."""
        if ahead_tokens < self.threshold_tokens:
            return FetchStart.TOO_SHORT
        if in_flight_tokens >= self.budget_tokens:
            return FetchStart.RATE_LIMITED
        return FetchStart.PROBE

    def affords(self, tokens: int, in_flight_tokens: int) -> bool:
        return not in_flight_tokens or in_flight_tokens + tokens <= self.budget_tokens

    def retry(self, before: Retry | None, step: int) -> Retry | None:
        """The next attempt after one that ended at ``step``; None when there were enough."""
        left = self.retry_attempts if before is None else before.left - 1
        return Retry(step + self.retry_steps, left) if left > 0 else None


def prefetch_policy(
    page_tokens: int, host_pages: int, stop: StopPolicy, share: float = PREFETCH_SHARE
) -> PrefetchPolicy:
    """The usual thresholds. ``host_pages``: the anchor's host pages, of which ``share`` may be
    in flight."""
    if not 0 < share <= 1:
        raise ValueError(f"share {share}: allowed is above 0, and 1 at most")
    return PrefetchPolicy(
        threshold_tokens=max(THRESHOLD_TOKENS, page_tokens),
        budget_tokens=max(1, int(share * host_pages * page_tokens)),
        stop=stop,
    )

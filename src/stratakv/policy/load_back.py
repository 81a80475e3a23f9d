"""Whether a host hit is worth its copy now. Owns the threshold and the budget.

Pure; must not touch the tree or start a copy.
"""

from dataclasses import dataclass
from enum import Enum, auto


class LoadBack(Enum):
    LOAD = auto()
    DECLINE = auto()  # too little to gain: recompute from the device's end
    WAIT = auto()  # enough is being loaded already: ask again next step


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBackPolicy:
    """``threshold_tokens``: a load that saves fewer is declined. ``budget_tokens``: the most that
    may be in flight; a single larger load goes alone rather than never."""

    threshold_tokens: int = 10
    budget_tokens: int = 65536

    def __post_init__(self) -> None:
        if self.threshold_tokens < 0:
            raise ValueError(f"threshold_tokens {self.threshold_tokens}: allowed is 0 and more")
        if self.budget_tokens < 1:
            raise ValueError(f"budget_tokens {self.budget_tokens}: allowed is 1 and more")

    def decide(self, saved_tokens: int, in_flight_tokens: int) -> LoadBack:
        """``saved_tokens``: how much further the prefix is usable with the load."""
        if saved_tokens <= 0 or saved_tokens < self.threshold_tokens:
            return LoadBack.DECLINE
        if in_flight_tokens and in_flight_tokens + saved_tokens > self.budget_tokens:
            return LoadBack.WAIT
        return LoadBack.LOAD

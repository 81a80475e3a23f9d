"""What the cache knew of prompts and did not give them, in tokens, since the start.

Owns the sums. The reasons, and which of them counts, are ``policy.losses``'.
"""

from dataclasses import dataclass

from stratakv.policy.losses import (
    CAUSES,
    Bill,
    Declined,
    Known,
    LossCause,
    bill,
    bill_aborted,
    label,
)
from stratakv.policy.prefetch_reasons import Tally


@dataclass(frozen=True, slots=True, eq=False)
class Missed:
    """What the tree knew of the prompt of an admitted request, and why no longer prefix of it was
    loaded, where one was not."""

    known: Known
    declined: Declined


class LossBook:
    """In tokens: ``hits`` and all of ``lost`` are ``known``."""

    def __init__(self, page_tokens: int) -> None:
        self._page = page_tokens
        self.known = self.hits = 0
        self.lost = dict.fromkeys(CAUSES, 0)

    def admitted(self, missed: Missed, hit: int, storage: Tally | None) -> Bill:
        """A request stands on ``hit`` pages; ``storage``: what its prefetch has come to."""
        found = bill(missed.known, hit, missed.declined, storage)
        self._add(found)
        return found

    def left(self, known: Known, storage: Tally | None) -> None:
        """A request has left before it was admitted."""
        self._add(bill_aborted(known, storage))

    def retracted(self, tokens: int) -> None:
        """A retracted request, for which the host had no room, computes ``tokens`` again."""
        self.known += tokens
        self.lost[LossCause.DEVICE_RETRACTED] += tokens

    def _add(self, found: Bill) -> None:
        self.known += found.known * self._page
        self.hits += found.hits * self._page
        for cause, pages in found.lost:
            self.lost[cause] += pages * self._page

    def by_tier(self) -> dict[tuple[str, str], int]:
        """Lost tokens by tier and reason."""
        return {label(cause): tokens for cause, tokens in self.lost.items()}

    def check(self) -> None:
        """AssertionError unless every token that was known is a hit, or lost for one reason."""
        assert self.known == self.hits + sum(self.lost.values()), "a known token has no reason"

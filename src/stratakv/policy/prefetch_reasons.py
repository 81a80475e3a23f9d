"""Why a request did not get what storage had: each such token under exactly one reason.

Owns the reasons and the sum: hits and losses are what was found. Pure.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum, auto

import numpy as np
import numpy.typing as npt


class Reason(Enum):
    BELOW_THRESHOLD = auto()  # too little to be worth a fetch
    RATE_LIMITED = auto()  # enough was in flight already, until the request was admitted
    HOST_CAPACITY = auto()  # the host had no pages for more
    WINDOW_INCOMPLETE = auto()  # storage has the prefix, but not all pages that another group needs
    STATE_MISSING = auto()  # storage has the prefix, but no state at its end
    SHARD_DISAGREEMENT = auto()  # usable here, but not on every rank
    EVICTED = auto()  # gone between the question and the read, or before it was loaded
    CORRUPT = auto()
    IO_ERROR = auto()
    DEADLINE = auto()  # the request was admitted before it had arrived
    ABORTED = auto()  # the request ended before it was admitted
    NOT_LOADED = auto()  # it landed, but admission found no place for it on the device


class FetchOutcome(IntEnum):
    """What became of one object of a fetch; the worst of several names the reason, and what was
    only not tried is the mildest."""

    ARRIVED = 0
    NOT_TRIED = 1
    MISSED = 2
    FAILED = 3
    CORRUPT = 4


Arrivals = npt.NDArray[np.uint8]
"""``FetchOutcome`` of every object of a plan, in its order; uint8 [n]."""

_REASONS = {
    FetchOutcome.MISSED: Reason.EVICTED,
    FetchOutcome.FAILED: Reason.IO_ERROR,
    FetchOutcome.CORRUPT: Reason.CORRUPT,
}


def reason_of(arrivals: Arrivals, stopped: Reason) -> Reason:
    """Why objects that were needed are not there; ``stopped``: why some were not tried."""
    worst = FetchOutcome(int(arrivals.max(initial=FetchOutcome.NOT_TRIED)))
    return _REASONS.get(worst, stopped)


@dataclass(frozen=True, slots=True)
class Tally:
    """What storage had for one request, in pages beyond ``base``: those still within reach, up to
    ``end``, and those lost, by reason. It only ever moves pages from the one to the other."""

    base: int
    end: int
    lost: tuple[tuple[Reason, int], ...] = ()

    @property
    def hits(self) -> int:
        return self.end - self.base

    @property
    def found(self) -> int:
        return self.hits + sum(pages for _, pages in self.lost)

    def cut(self, end: int, reason: Reason) -> "Tally":
        """No more than ``end`` is within reach any more; below ``base`` nothing was found."""
        end = max(end, self.base)
        if end >= self.end:
            return self
        return Tally(self.base, end, (*self.lost, (reason, self.end - end)))

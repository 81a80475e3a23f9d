"""What one waiting request asks of storage, through all of its attempts.

Owns the record. ``prefetch`` alone changes it; must not decide or touch pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from stratakv.agreement.ballot import Flags
from stratakv.core.ids import AskId, PageIds, PageKey, TicketId
from stratakv.core.page_keys import PageHasher
from stratakv.policy.prefetch_ends import Held, Objects
from stratakv.policy.prefetch_reasons import Reason, Tally
from stratakv.tiers.prefetch.fetches import FromStorage
from stratakv.tree.lease import HostHold

Told: TypeAlias = Callable[[Tally | None], None]
"""Hears what storage had for a request, when its prefetch has ended; None: it was never asked."""


def ignored(_: Tally | None) -> None:
    """What storage had for a request that has failed counts for nothing."""


@dataclass(frozen=True, slots=True)
class Left:
    """A request is admitted on ``end`` pages, or gone (0), and why its prefetch, which has not
    ended, comes to nothing."""

    end: int
    reason: Reason
    told: Told


@dataclass(slots=True, eq=False)
class PrefetchRequest:
    """``prefix``: of the prompt, ``whole`` the last end it can use. ``hold``: what it counts on in
    the tree. ``pages``: by group, what a fetch fills. ``follows``: another request asks for the
    same pages; ``first`` is the first of those. ``stopped_s``: when it was told to stop. ``left``:
    the request is admitted or gone. ``epoch``: of the store, when it was asked."""

    id: AskId
    prefix: PageHasher
    whole: int
    started_s: float
    hold: HostHold | None = None
    objects: Objects | None = None
    ticket: TicketId | None = None
    pages: tuple[PageIds, ...] = ()
    first: PageKey | None = None
    follows: "PrefetchRequest | None" = None
    stopped_s: float | None = None
    left: Left | None = None
    landed: FromStorage | None = None
    epoch: int = 0

    @property
    def keys(self) -> Sequence[PageKey]:
        return self.prefix.keys

    @property
    def asking(self) -> bool:
        """Whether storage works for a request that still waits."""
        return self.first is not None


def ballot_of(held: Held, ends: Flags, *, done: bool) -> Flags:
    """What a rank votes of its answer: whether it is one, then the ends beyond ``held.base``."""
    return np.concatenate((np.array([done]), ends[held.base + 1 :]))


def ends_of(held: Held, ballot: Flags) -> Flags:
    """The ends that all ranks have voted for, bool [limit + 1]."""
    ends = np.zeros(held.limit + 1, np.bool_)
    ends[held.base + 1 :] = ballot[1:]
    return ends

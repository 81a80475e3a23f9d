"""What one waiting request asks of storage, through all of its attempts, and what it holds for it.

Owns the records. A request is in one phase at a time, and a phase names all that is held in it:

    Idle ------> Asking      the tree's pages are pinned, storage is asked
              or Awaiting    another request asks for the same pages
    Awaiting --> Idle        that one has its pages, or will not get them
    Asking ----> Reading     host pages are allocated, storage fills them
              or Idle        there is nothing to fetch, or no room
    Reading ---> Ready       they are the tree's, and pinned
              or Idle        they are free
    Asking, Reading -> Left  the request is admitted or gone; its operation runs on
    any -------> Idle        the request is admitted or gone, or its operation has ended

``Prefetcher`` and ``Sharing`` move it; must not decide (``policy.prefetch``) or touch pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

import numpy as np

from stratakv.agreement.ballot import Flags
from stratakv.core.ids import PageIds, PageKey, PrefetchId, TicketId
from stratakv.core.page_keys import PageHasher
from stratakv.policy.prefetch import Fetching, Probing
from stratakv.policy.prefetch_ends import CachedPrefix, Objects
from stratakv.policy.prefetch_reasons import Reason, Tally
from stratakv.tiers.prefetch.fetches import FromStorage
from stratakv.tree.lease import HostHold

OnSettled: TypeAlias = Callable[[Tally | None], None]
"""Called with what storage had for a request, when its prefetch has ended; None: with nothing, it
was never asked."""


def ignored(_: Tally | None) -> None:
    """What storage had for a request that has failed counts for nothing."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing is under way and nothing is held: not yet, for now, or any more."""


@dataclass(frozen=True, slots=True, eq=False)
class Awaiting:
    """``leader`` asks for the same pages."""

    leader: "PrefetchRequest"


@dataclass(frozen=True, slots=True, eq=False)
class Asking:
    """``hold``: what the question counts on in the tree. ``first``: the first page asked for.
    ``epoch``: of the store, when it was asked."""

    ticket: TicketId
    state: Probing
    hold: HostHold
    first: PageKey
    epoch: int
    objects: Objects


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """``pages``: by group, what the fetch fills; the others as for ``Asking``."""

    ticket: TicketId
    state: Fetching
    hold: HostHold
    first: PageKey
    epoch: int
    pages: tuple[PageIds, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """``hold``: what ``came`` has made usable."""

    hold: HostHold
    came: FromStorage


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """The request is admitted on ``end`` pages, or gone (0). ``was`` has not ended: its hold is
    released, its pages are the operation's; for ``reason`` it comes to nothing."""

    was: Asking | Reading
    end: int
    reason: Reason
    settled: OnSettled


PrefetchPhase: TypeAlias = Idle | Awaiting | Asking | Reading | Ready | Left
IDLE: Final = Idle()
NEXT: Final[dict[type[PrefetchPhase], tuple[type[PrefetchPhase], ...]]] = {
    Idle: (Idle, Awaiting, Asking),
    Awaiting: (Idle,),
    Asking: (Idle, Reading, Left),
    Reading: (Idle, Ready, Left),
    Ready: (Idle,),
    Left: (Idle,),
}


class PrefetchRequest:
    """``prefix``: of the prompt, ``whole`` the last end it can use."""

    def __init__(self, id_: PrefetchId, prefix: PageHasher, whole: int, started_s: float) -> None:
        self.id = id_
        self.prefix = prefix
        self.whole = whole
        self.started_s = started_s
        self._phase: PrefetchPhase = IDLE

    @property
    def phase(self) -> PrefetchPhase:
        return self._phase

    def enter(self, phase: PrefetchPhase) -> None:
        """The next phase; what the one before held is released, or held on in this one."""
        legal = type(phase) in NEXT[type(self._phase)]
        assert legal, f"no prefetch goes from {self._phase} to {phase}"
        self._phase = phase

    @property
    def keys(self) -> Sequence[PageKey]:
        return self.prefix.keys

    @property
    def asking(self) -> bool:
        """Whether storage works for a request that still waits."""
        return isinstance(self._phase, Asking | Reading)

    @property
    def operation(self) -> Asking | Reading | None:
        """What is under way, for the request or after it has left."""
        match self._phase:
            case Asking() | Reading() as under_way:
                return under_way
            case Left(was=was):
                return was
            case Idle() | Awaiting() | Ready():
                return None
            case _:
                assert_never(self._phase)


def ballot_of(held: CachedPrefix, ends: Flags, *, done: bool) -> Flags:
    """What a rank votes of its answer: whether it is one, then the ends beyond ``held.base``."""
    return np.concatenate((np.array([done]), ends[held.base + 1 :]))


def ends_of(held: CachedPrefix, ballot: Flags) -> Flags:
    """The ends that all ranks have voted for, bool [limit + 1]."""
    ends = np.zeros(held.limit + 1, np.bool_)
    ends[held.base + 1 :] = ballot[1:]
    return ends

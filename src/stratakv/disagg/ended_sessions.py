"""Sessions that are over where prompts are computed, of which somebody may yet hear by name: one
side has given them up before the other one came, or they were handed over.

Owns for how long, and of how many, that is remembered, and what it means to who comes: names are a
peer's, and it may invent any number of them. Pure.
"""

from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Final

from stratakv.disagg.transport import PeerId

FAILED_OVER: Final = "prefill has failed over it"
HANDED_OVER: Final = "it was handed over before: a session is one request"


class How(Enum):
    GIVEN_UP_HERE = auto()  # which decode does not know
    GIVEN_UP_THERE = auto()  # before its request came, which may be on its way
    HANDED_OVER = auto()  # both know; who comes under that name brings an old one


@dataclass(frozen=True, slots=True)
class _End:
    how: How
    peer: PeerId | None
    reason: str
    until_s: float


class EndedSessions:
    """Of each peer ``most`` that were given up and as many that were handed over, each for
    ``keep_s``; beyond that the oldest is forgotten."""

    def __init__(self, most: int, keep_s: float) -> None:
        self._most, self._keep_s = most, keep_s
        self._ends: dict[str, _End] = {}  # in the order of their times, as all below
        self._given_up: dict[str, None] = {}
        self._names: dict[tuple[PeerId | None, bool], dict[str, None]] = {}

    def __len__(self) -> int:
        """Of which a side does not know."""
        return len(self._given_up)

    def add(self, name: str, how: How, peer: PeerId | None, reason: str, now_s: float) -> float:
        """``peer``: whose name it counts as, None: this side's. When it is forgotten."""
        self.forget(name)
        self.expire(now_s)
        end = _End(how, peer, reason, now_s + self._keep_s)
        names = self._names.get(_kind(end), {})
        if len(names) == self._most:
            self.forget(next(iter(names)))
        self._ends[name] = end
        self._names.setdefault(_kind(end), {})[name] = None
        if how is not How.HANDED_OVER:
            self._given_up[name] = None
        return end.until_s

    def forget(self, name: str) -> None:
        """Both sides know, or nobody comes any more."""
        end = self._ends.pop(name, None)
        if end is not None:
            names = self._names[_kind(end)]
            del names[name]
            if not names:
                del self._names[_kind(end)]
            self._given_up.pop(name, None)

    def asked(self, name: str, now_s: float) -> str | None:
        """Why what decode asks for is not computed, which it knows then; None: it may be."""
        end = self._come(name, now_s)
        return None if end is None else end.reason

    def arrived(self, name: str, now_s: float) -> str | None:
        """Why a request that has come is not handed over; None: it may be. Where this side has
        given the session up, it is another request of that name."""
        end = self._come(name, now_s)
        return None if end is None or end.how is How.GIVEN_UP_HERE else end.reason

    def given_up(self, name: str, now_s: float) -> bool:
        """Whether decode, which gives up what it has not asked for, need not be remembered."""
        end = self._come(name, now_s)
        return end is not None and end.how is not How.GIVEN_UP_THERE

    def _come(self, name: str, now_s: float) -> _End | None:
        self.expire(now_s)
        end = self._ends.get(name)
        if end is not None and end.how is not How.HANDED_OVER:
            self.forget(name)
        return end

    def expire(self, now_s: float) -> float:
        """Forget those for which nobody has come in time; when the next one is due that was given
        up."""
        while self._ends and now_s >= next(iter(self._ends.values())).until_s:
            self.forget(next(iter(self._ends)))
        return self._ends[next(iter(self._given_up))].until_s if self._given_up else inf


def _kind(end: _End) -> tuple[PeerId | None, bool]:
    return end.peer, end.how is How.HANDED_OVER

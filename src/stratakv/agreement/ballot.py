"""What ranks vote on each step, as lanes of one vector whose element-wise minimum is the result.

Owns the layout, which depends on nothing that may differ between ranks. Pure: must not know what
the work is, nor how ranks reach each other.

Work of one kind ends in the order of its submission on every rank, so a count shows which
operations have ended, and MIN of counts shows which have ended everywhere. What an operation
*found* (which ends of a prefix are usable, which pages were stored) may differ, and travels as one
0/1 flag per lane: MIN is AND only lane by lane, so flags are never packed and lengths never sent as
numbers (rank A may be able to use 5 pages, rank B 2 or 3).

The flags of a kind are one stream, operation after operation, of which a ballot carries as much as
fits: a very long prefix takes several ballots, and an operation has ended with its last flag.

What goes on in no order has a lane of its own while it lasts, a *slot*: a number, of which the
least counts.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Flags: TypeAlias = npt.NDArray[np.bool_]
LaneValues: TypeAlias = npt.NDArray[np.int64]
Begun: TypeAlias = "Mapping[Work, Flags]"
"""By kind, what earlier ballots have reported of the oldest operation, which has more flags; alike
on all ranks."""


class Work(IntEnum):
    """Kinds of asynchronous work."""

    BACKUP = 0
    LOAD = 1
    QUERY = 2
    FETCH = 3
    STORE = 4
    TOUCH = 5
    REMOVE = 6


class SlotKind(IntEnum):
    """Kinds of what has a slot. All ranks give slots to the same things, in the same order."""

    SESSION = 0
    PART = 1
    LINK = 2
    LEAST_TOKEN = 3
    MOST_TOKEN = 4  # negated, so that the least is the most


FLAGS: Final = (64, 0, 4096, 4096, 1024, 0, 0)
"""Lanes for the flags of each kind. What does not fit goes on in the next ballot."""
SLOTS: Final = (1024, 1024, 256, 1024, 1024)
"""Slots of each kind."""
MOST: Final = 1 << 20
"""The most operations of a kind without flags that one ballot ends."""
FIELDS: Final = 8
"""Digests that are compared, each in two lanes: d and -d. All ranks have the same d iff the minimum
of the one is minus the minimum of the other."""
DIGEST_BITS: Final = 62

_COUNTS: Final = 2 * FIELDS
_STARTS: Final = tuple(_COUNTS + len(Work) + sum(FLAGS[:kind]) for kind in range(len(FLAGS)))
_SLOTS: Final = _COUNTS + len(Work) + sum(FLAGS)
_PLACES: Final = tuple(_SLOTS + sum(SLOTS[:kind]) for kind in range(len(SLOTS)))
LANES: Final = _SLOTS + sum(SLOTS)
NOTHING: Final[Begun] = {}


class Ballot:
    """One rank's votes; an operation that it does not report counts as not ended. ``begun``: as the
    last ballot has left it."""

    def __init__(self, begun: Begun = NOTHING) -> None:
        self.lanes: LaneValues = np.zeros(LANES, np.int64)
        self._begun = begun
        self._widths: dict[Work, list[int]] = {}

    def cast(self, work: Work, found: Iterable[Flags]) -> None:
        """The oldest operations of a kind have ended here, with these flags, as far as they fit.

        An operation has the same number of flags on every rank, and at least one.
        """
        start, room = _STARTS[work], FLAGS[work]
        assert room, f"{work.name} has no flags"
        first = len(self._begun.get(work, ()))
        at, widths = 0, list[int]()
        for flags in found:
            assert len(flags), f"no flags of one {work.name}"
            widths.append(len(flags))
            votes = flags[first : first + room - at]
            self.lanes[start + at : start + at + len(votes)] = votes
            at += len(votes)
            if at == room:
                break
            first = 0
        self._widths[work] = widths
        self.lanes[_COUNTS + work] = at

    def count(self, work: Work, ended: int) -> None:
        """The same for work without flags."""
        assert not FLAGS[work], f"{work.name} has flags"
        self.lanes[_COUNTS + work] = min(ended, MOST)

    def vote(self, kind: SlotKind, votes: LaneValues) -> None:
        """What this rank has of each slot, from the first one on."""
        assert len(votes) <= SLOTS[kind], f"{len(votes)} slots of {kind.name}"
        self.lanes[_PLACES[kind] : _PLACES[kind] + len(votes)] = votes

    def digest(self, field: int, value: int) -> None:
        """``value``: of ``DIGEST_BITS`` bits."""
        self.lanes[2 * field] = value
        self.lanes[2 * field + 1] = -value

    def result(self, least: LaneValues) -> "BallotResult":
        """``least``: the minimum over all ranks' lanes."""
        return BallotResult(least, self._begun, self._widths)


class BallotResult:
    """What all ranks know after a ballot, alike on each. ``begun``: for the next one."""

    def __init__(self, least: LaneValues, begun: Begun, widths: Mapping[Work, list[int]]) -> None:
        self._least = least
        self._agreed: dict[Work, list[Flags]] = {}
        self.begun = dict(begun)
        for work, cast in widths.items():
            count = least.item(_COUNTS + work)
            if count:
                self._read(work, least[_STARTS[work] : _STARTS[work] + count] > 0, cast)

    def _read(self, work: Work, votes: Flags, widths: list[int]) -> None:
        """``votes``: the part of a kind's stream that every rank has voted on."""
        if work in self.begun:
            votes = np.concatenate((self.begun.pop(work), votes))
        found = self._agreed[work] = list[Flags]()
        at = 0
        for width in widths:
            if at + width > len(votes):
                break
            found.append(votes[at : at + width])
            at += width
        if at < len(votes):
            self.begun[work] = votes[at:]

    def ended(self, work: Work) -> int:
        """How many operations, the oldest ones, have ended on every rank."""
        return len(self.flags(work)) if FLAGS[work] else self._least.item(_COUNTS + work)

    def flags(self, work: Work) -> list[Flags]:
        """Of each operation that has ended on every rank, what was found on every rank."""
        return self._agreed.get(work, [])

    def least(self, kind: SlotKind) -> LaneValues:
        """Of each slot, the least of all ranks; 0 where nobody has voted. Not to be written to."""
        return self._least[_PLACES[kind] : _PLACES[kind] + SLOTS[kind]]

    def differing(self, fields: int) -> int | None:
        """The first of ``fields`` digests that is not the same on all ranks; None: all are."""
        lanes = self._least[: 2 * fields].tolist()
        pairs = zip(lanes[::2], lanes[1::2], strict=True)
        return next((at for at, (least, most) in enumerate(pairs) if least != -most), None)

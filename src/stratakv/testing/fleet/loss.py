"""The death of a rank: where it is drawn to come, and what the others see of it.

Owns the points at which a rank may end; each is called on the way of every rank. A rank that is
dead says nothing and writes nothing any more, as a process that was killed. Must not know what the
others do about it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from stratakv.agreement.ballot import LaneValues
from stratakv.agreement.ranks import nothing
from stratakv.core.errors import RankLostError
from stratakv.testing.fleet.thread_ranks import Rendezvous, ThreadRanks


class Point(Enum):
    STEP = auto()  # before a step
    BROADCAST = auto()  # before the message
    BALLOT = auto()  # before a ballot
    RESULT = auto()  # within a ballot: its vote has reached all, but not all have the result
    WRITE = auto()  # within a batch of objects


POINTS: Final = tuple(Point)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """``rank`` ends at ``point`` of its step number ``step``; where that is a write, at the first
    one from there on, when ``objects`` more are stored. ``deaf``: other ranks that never get the
    result of the ballot in which it ends."""

    rank: int
    step: int
    point: Point
    objects: int = 0
    deaf: frozenset[int] = frozenset()


class RankDied(BaseException):
    """Not an ``Exception``: nothing in a process that was killed can catch it."""


class Fate:
    """Of one rank. ``steps``: how many it has done; ``over``: it was asked to stop."""

    def __init__(self, loss: Loss | None, rank: int) -> None:
        self.steps = 0
        self.over = False
        self.dead = False
        self._rank = rank
        self._loss = loss
        self._left = 0 if loss is None else loss.objects

    def count_step(self) -> None:
        self.steps += 1

    def stop(self) -> None:
        """It was asked to."""
        self.over = True

    def meets(self, point: Point) -> None:
        """RankDied where the rank ends here, or has ended before."""
        if self.dead or self._due(point):
            self.dead = True
            raise RankDied(f"rank {self._rank} ends in step {self.steps}, at its {point.name}")

    def reaches(self, rank: int) -> bool:
        """Whether another rank has the result of the ballot in which this one ends, and so does the
        whole of that step."""
        loss = self._loss
        return loss is not None and loss.point is Point.RESULT and rank not in loss.deaf

    def misses(self) -> bool:
        """Whether the result of a ballot does not reach this rank."""
        loss = self._loss
        return (
            loss is not None
            and loss.point is Point.RESULT
            and self.steps == loss.step
            and self._rank in loss.deaf
            and not self.over
        )

    def _due(self, point: Point) -> bool:
        loss = self._loss
        if loss is None or self.over or loss.rank != self._rank or loss.point is not point:
            return False
        if point is not Point.WRITE:
            return self.steps == loss.step
        if self.steps < loss.step:
            return False
        self._left -= 1
        return self._left < 0


class MortalRanks(ThreadRanks):
    """One rank's end of a rendezvous, to which it may not come."""

    def __init__(self, rank: int, rendezvous: Rendezvous, fate: Fate) -> None:
        super().__init__(rank, rendezvous)
        self._fate = fate

    def all_reduce_min(
        self, lanes: LaneValues, meanwhile: Callable[[], None] = nothing
    ) -> LaneValues:
        self._fate.meets(Point.BALLOT)
        result = super().all_reduce_min(lanes, meanwhile)
        self._fate.meets(Point.RESULT)
        if self._fate.misses():
            raise RankLostError("a rank was lost in the ballot, and the result with it")
        return result

    def broadcast(self, message: bytes) -> bytes:
        self._fate.meets(Point.BROADCAST)
        return super().broadcast(message)

    def gather(self, text: str) -> Sequence[str]:
        self._fate.meets(Point.BALLOT)
        return super().gather(text)

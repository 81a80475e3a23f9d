"""What ranks need of each other: two collectives a step, and one for when they differ.

Owns the protocol and the group of one. Must not know what is exchanged.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from stratakv.agreement.ballot import LaneValues


def nothing() -> None:
    pass


class Ranks(Protocol):
    """The tensor-parallel ranks of one engine. Every verb is called by all of them, in the same
    order; RankLostError where one of them does not come within the group's time limit."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce_min(
        self, lanes: LaneValues, meanwhile: Callable[[], None] = nothing
    ) -> LaneValues:
        """The element-wise minimum over all ranks; ``lanes`` may be used for it. ``meanwhile`` is
        done between saying what is here and waiting for the others."""
        ...

    def broadcast(self, message: bytes) -> bytes:
        """What rank 0 passes; the others pass anything."""
        ...

    def gather(self, text: str) -> Sequence[str]:
        """Every rank's text, in order."""
        ...

    def close(self) -> None: ...


class SingleRank:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce_min(
        self, lanes: LaneValues, meanwhile: Callable[[], None] = nothing
    ) -> LaneValues:
        meanwhile()
        return lanes

    def broadcast(self, message: bytes) -> bytes:
        return message

    def gather(self, text: str) -> Sequence[str]:
        return [text]

    def close(self) -> None:
        pass

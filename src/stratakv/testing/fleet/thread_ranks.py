"""Ranks as threads of one process that take turns: only one runs at a time, each up to its next
collective, and who is next is drawn from a seed; so nothing depends on how threads are scheduled,
and whatever ranks share without talking, such as a store, they come to in an order that is drawn.

Owns the rendezvous and its faults: ranks that call different things, or that end while others wait,
are named, and nobody hangs. Must not know what is exchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from threading import Lock
from typing import Any, Final, TypeVar

import numpy as np

from stratakv.agreement.ballot import LaneValues
from stratakv.agreement.ranks import nothing
from stratakv.core.errors import RankLostError

T = TypeVar("T")
MOST_COLLECTIVES: Final = 50_000
"""A run of a few hundred steps that meets more often goes round in circles."""


@dataclass(frozen=True, slots=True, eq=False)
class _Collective:
    kind: str
    shape: tuple[int, ...]
    value: object

    def __str__(self) -> str:
        return f"{self.kind}{list(self.shape)}"


class Rendezvous:
    """``collectives`` counts them. A rank's thread calls ``begin`` first and ``leave`` last.
    ``seed``: of the order of turns."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.collectives = 0
        self._random = Random(seed)
        self._turns = [Lock() for _ in range(size)]
        for turn in self._turns:
            turn.acquire()
        self._calls: list[_Collective | None] = [None] * size
        self._gone: dict[int, str] = {}
        self._fault: str | None = None
        self._result: Any = None

    def start(self) -> None:
        """Let one rank begin; the others follow as it comes to its first rendezvous."""
        self._turns[self._random.randrange(self.size)].release()

    @property
    def broken(self) -> bool:
        """Whether a rank has left: no rendezvous comes about any more."""
        return bool(self._gone)

    def begin(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._turns[rank].acquire()

    def meet(
        self,
        rank: int,
        kind: str,
        shape: tuple[int, ...],
        value: object,
        combine: Callable[[list[Any]], T],
    ) -> T:
        """``combine(values)`` of all ranks, by rank. RankLostError where a rank has ended;
        AssertionError where one calls something else."""
        self._look()
        self._calls[rank] = _Collective(kind, shape, value)
        after = self._next(rank)
        if after is None:
            self._close(combine)
        else:
            self._turns[after].release()
            self._turns[rank].acquire()
        self._look()
        return self._result

    def leave(self, rank: int, why: str) -> None:
        """This rank calls nothing any more."""
        self._gone[rank] = why
        self._calls[rank] = None
        after = self._next(rank)
        if after is None and len(self._gone) < self.size:
            self._lost()
            after = self._next(rank)
        if after is not None:
            self._turns[after].release()

    def waiting(self) -> str:
        """Who waits in which call, and who does not come, for whoever finds that nobody moves."""
        waits = [f"rank {at} in {call}" for at, call in enumerate(self._calls) if call]
        late = [str(at) for at, call in enumerate(self._calls) if not call and at not in self._gone]
        return ", ".join(waits) + (f"; not there: {', '.join(late)}" if late else "")

    def _look(self) -> None:
        if self._fault is not None:
            lost = RankLostError if self._gone else AssertionError
            raise lost(self._fault)

    def _next(self, rank: int) -> int | None:
        """Who goes on: one that has not come yet, or, after a fault, any that is left."""
        left = [
            other
            for other in range(self.size)
            if other not in self._gone
            and other != rank
            and (self._fault is not None or self._calls[other] is None)
        ]
        return self._random.choice(left) if left else None

    def _close(self, combine: Callable[[list[Any]], object]) -> None:
        """All have come that are left."""
        if self._gone:
            self._lost()
            return
        calls = [call for call in self._calls if call is not None]
        if len({str(call) for call in calls}) > 1:
            self._fault = f"ranks do not meet: {self.waiting()}"
            return
        self.collectives += 1
        if self.collectives > MOST_COLLECTIVES:
            self._fault = f"no end after {MOST_COLLECTIVES} collectives, the last one in {calls[0]}"
            return
        try:
            self._result = combine([call.value for call in calls])
        except AssertionError as error:
            self._fault = str(error)
        self._calls = [None] * self.size

    def _lost(self) -> None:
        gone = ", ".join(f"rank {rank} {why}" for rank, why in self._gone.items())
        self._fault = f"{gone}, while others wait: {self.waiting()}"


class ThreadRanks:
    """One rank's end of a rendezvous, as ``Ranks``."""

    def __init__(self, rank: int, rendezvous: Rendezvous) -> None:
        self.rank = rank
        self.size = rendezvous.size
        self.rendezvous = rendezvous

    def all_reduce_min(
        self, lanes: LaneValues, meanwhile: Callable[[], None] = nothing
    ) -> LaneValues:
        meanwhile()
        return self.rendezvous.meet(self.rank, "all_reduce_min", lanes.shape, lanes, _least)

    def broadcast(self, message: bytes) -> bytes:
        return self.rendezvous.meet(self.rank, "broadcast", (), message, _first)

    def gather(self, text: str) -> Sequence[str]:
        return self.rendezvous.meet(self.rank, "gather", (), text, _all)

    def close(self) -> None:
        pass


def _least(lanes: list[LaneValues]) -> LaneValues:
    least = lanes[0].copy()
    for other in lanes[1:]:
        np.minimum(least, other, out=least)
    least.setflags(write=False)  # all ranks read the same one
    return least


def _first(messages: list[bytes]) -> bytes:
    return messages[0]


def _all(texts: list[str]) -> list[str]:
    return texts

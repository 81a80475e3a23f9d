"""Counts and times what a rank sends the others, from where it sends it.

Owns the yardsticks: bare collectives of the same bytes, in the same steps, and the barriers that
make both fair. Must not change what is exchanged.

Every other step is left as it is. In the one between, by lot and alike on all ranks, one thing is
timed between two barriers: the ballot, or a bare all-reduce of a copy of the same lanes, which the
ballot follows; the message, or a bare broadcast before it; the tick, so that its time is not the
others' lateness. A ballot and its yardstick thus have the same before and after them: no rank that
is late to wait for, and none that is already at work again. Where ranks share cores that counts:
who has its result first and goes on computing keeps the others from theirs, and the time doubles,
whatever the collective. Collectives are counted in ``torch.distributed`` itself: one that passes
``agreement`` by counts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from stratakv.agreement.ballot import LaneValues
from stratakv.agreement.ranks import nothing
from stratakv.agreement.torch_ranks import BROADCAST_BYTES, TorchRanks

Result = TypeVar("Result")
_all_reduce: Final[Callable[..., object]] = dist.all_reduce
_broadcast: Final[Callable[..., object]] = dist.broadcast


class TimedPart(Enum):
    """What is timed of a step, between barriers."""

    NOTHING = 0
    TICK = 1
    BALLOT = 2
    BARE_ALLREDUCE = 3
    BROADCAST = 4
    BARE_BROADCAST = 5


TIMED: Final = tuple(TimedPart)[1:]


@dataclass(slots=True)
class MeterRecord:
    """Of one rank. ``ballots`` and ``broadcasts``: by step that did not wait for a copy.
    ``taken_s``: by turn; of nothing it is the tick as it comes. ``met_s``: of the ticks that are
    timed between barriers, the all-reduce; ``agreed_s`` this with the digests and the reading of
    what came."""

    ballots: list[int] = field(default_factory=list[int])
    broadcasts: list[int] = field(default_factory=list[int])
    waited: int = 0
    taken_s: dict[TimedPart, list[float]] = field(
        default_factory=lambda: {turn: [] for turn in TimedPart}
    )
    met_s: list[float] = field(default_factory=list[float])
    agreed_s: list[float] = field(default_factory=list[float])
    steps: int = 0
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0


class Meter:
    """``Ranks`` that are listened to. A step ends with its tick, which ``tick`` runs."""

    def __init__(self, ranks: TorchRanks) -> None:
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size
        self.record = MeterRecord()
        self._bare = torch.zeros(BROADCAST_BYTES, dtype=torch.uint8)
        self._calls = {"all_reduce": 0, "broadcast": 0}
        self._ticking = self._waited = False
        self._lots = np.random.default_rng(0)
        self._turn = TimedPart.NOTHING
        self._last_s = 0.0  # what the last ballot has taken
        for name in self._calls:  # this process does nothing else
            setattr(dist, name, self._counted(name))

    def _counted(self, name: str) -> Callable[..., object]:
        original: Callable[..., object] = getattr(dist, name)

        def counted(*args: object, **named: object) -> object:
            self._calls[name] += 1
            return original(*args, **named)

        return counted

    # -- ranks -----------------------------------------------------------------------------------

    def all_reduce_min(
        self, lanes: LaneValues, meanwhile: Callable[[], None] = nothing
    ) -> LaneValues:
        if not self._ticking:  # a wait inside the step
            return self._ranks.all_reduce_min(lanes, meanwhile)
        if self._turn is TimedPart.BARE_ALLREDUCE:
            bare = torch.from_numpy(lanes.copy())
            self._timed(lambda: _all_reduce(bare, op=dist.ReduceOp.MIN))
        if self._turn is TimedPart.BALLOT:
            meanwhile()
            return self._timed(lambda: self._ranks.all_reduce_min(lanes))
        begin_s = time.perf_counter()
        least = self._ranks.all_reduce_min(lanes, meanwhile)
        self._last_s = time.perf_counter() - begin_s
        return least

    def broadcast(self, message: bytes) -> bytes:
        if self._turn is TimedPart.BARE_BROADCAST:
            self._timed(lambda: _broadcast(self._bare, 0))
        if self._turn is TimedPart.BROADCAST:
            return self._timed(lambda: self._ranks.broadcast(message))
        return self._ranks.broadcast(message)

    def _timed(self, call: Callable[[], Result]) -> Result:
        dist.barrier()
        begin_s = time.perf_counter()
        result = call()
        self.record.taken_s[self._turn].append(time.perf_counter() - begin_s)
        dist.barrier()
        return result

    def gather(self, text: str) -> Sequence[str]:
        return self._ranks.gather(text)

    def close(self) -> None:
        self._ranks.close()

    # -- steps -----------------------------------------------------------------------------------

    def waits(self) -> None:
        """This step waits for a copy, which takes ballots."""
        self._waited = True

    def agreed(self, taken_s: float) -> None:
        """The last ballot took that long in all: with the digests before it."""
        if self._ticking and self._turn is TimedPart.TICK:
            self.record.met_s.append(self._last_s)
            self.record.agreed_s.append(taken_s)

    def tick(self, run: Callable[[], None]) -> None:
        record, self._ticking = self.record, True
        if self._turn is TimedPart.TICK:
            self._timed(run)
        elif self._turn is TimedPart.NOTHING:
            begin_s = time.perf_counter()
            run()
            record.taken_s[TimedPart.NOTHING].append(time.perf_counter() - begin_s)
        else:
            run()
        self._ticking = False
        if self._waited:
            record.waited += 1
        else:
            record.ballots.append(self._calls["all_reduce"])
            record.broadcasts.append(self._calls["broadcast"])
        self._calls = dict.fromkeys(self._calls, 0)
        self._waited = False
        record.steps += 1
        self._turn = TimedPart.NOTHING
        if record.steps % 2:
            self._turn = TIMED[self._lots.integers(len(TIMED))]

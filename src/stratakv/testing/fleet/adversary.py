"""When the work of one rank ends, and whether it goes well: from a seed, and as unkind as may be.

Owns a rank's randomness, all of it, so that what a rank does depends on its seed and on what it is
given, never on when another rank runs. Must not know what the work is.
"""

from dataclasses import dataclass
from random import Random
from typing import Final

STALL: Final = 0.004
"""How often a lane stops for a while, per look at it, where it stalls at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """Of one rank. ``pace``: how likely each lane's oldest piece of work ends at a look at it.
    ``stalls``: the most looks for which a lane may stand still. The rest are probabilities: per
    plan, per call of the store or per object. ``forgets``: per step, that objects of this rank's
    store vanish."""

    pace: dict[str, float]
    stalls: int = 0
    backup_fails: float = 0.0
    call_fails: float = 0.0
    read_misses: float = 0.0
    read_fails: float = 0.0
    read_corrupt: float = 0.0
    contains_lies: float = 0.0
    write_refused: float = 0.0
    write_fails: float = 0.0
    forgets: float = 0.0
    loses: float = 0.0


class Adversary:
    """``lanes`` of work have names: "backup", "load", "storage"."""

    def __init__(self, seed: int, fault_rates: FaultRates) -> None:
        self.fault_rates = fault_rates
        self.random = Random(seed)
        self._still: dict[str, int] = {}

    def strikes(self, chance: float) -> bool:
        return chance > 0 and self.random.random() < chance

    def moves(self, lane: str) -> bool:
        """Whether the oldest work of a lane ends now."""
        left = self._still.get(lane, 0)
        if left:
            self._still[lane] = left - 1
            return False
        if self.fault_rates.stalls and self.random.random() < STALL:
            self._still[lane] = self.random.randrange(self.fault_rates.stalls)
            return False
        return self.random.random() < self.fault_rates.pace[lane]

    def hold(self, lane: str, looks: int) -> None:
        """Nothing of a lane ends for so long."""
        self._still[lane] = looks

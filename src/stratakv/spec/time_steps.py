"""Between which bounds a state layer's time steps lie.

Owns the reading of those fields. Must not know who applies them
(``engine.huggingface.time_steps``).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from stratakv.spec.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class TimeSteps:
    """Mamba-2's dt, after softplus, is cut off below ``low`` and above ``high``."""

    low: float
    high: float

    @property
    def bind(self) -> bool:
        """Whether any time step can be outside; softplus is never below 0."""
        return self.low > 0 or self.high < math.inf


ReadTimeSteps: TypeAlias = Callable[[ModelConfig], TimeSteps | None]

_PAIR: Final = "a list of two numbers, the least and the largest time step"


def unbounded(_: ModelConfig) -> None:
    """Nothing is cut off."""


def limited(config: ModelConfig) -> TimeSteps:
    """``time_step_limit``, [least, largest]; without it, nothing is cut off."""
    if "time_step_limit" not in config.fields:
        return TimeSteps(0.0, math.inf)
    match config.fields["time_step_limit"]:
        case [low, high] if _number(low) and _number(high):
            return TimeSteps(float(cast("float", low)), float(cast("float", high)))
        case _:
            raise config.fault("time_step_limit", _PAIR)


def limited_below(config: ModelConfig) -> TimeSteps:
    """``time_step_min`` alone: these families ignore their own ``time_step_limit``."""
    low = config.fields.get("time_step_min")
    if not _number(low):
        raise config.fault("time_step_min", "a number, the least time step")
    return TimeSteps(float(cast("float", low)), math.inf)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)

"""How much of a device its tier takes, as an operator writes it: bytes, or a share of what is free.

Owns the two forms and what they come to. Must not ask a device how much it has.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

from stratakv.core.choices import given
from stratakv.core.errors import ConfigError
from stratakv.core.units import ALLOWED, format_bytes, parse_bytes

FLAG: Final = "--device-memory"
DEFAULTS: Final[Mapping[str, str]] = {"cpu": "2GiB", "cuda": "0.85"}
"""By --device. What a share leaves is a step's: activations, and what libraries take."""
_SHARE: Final = re.compile(r"\d*\.\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """``share``: above 0, and 1 at most; of what is free on the device beside the model."""

    share: float


DeviceMemory: TypeAlias = MemoryBytes | MemoryShare


def device_memory_of(text: str, device: str) -> DeviceMemory:
    """``text``: a number with a point and without a unit is a share, all else bytes. ConfigError
    for what is neither, for a share above 1, and for one of a CPU, whose memory others take too."""
    if _SHARE.fullmatch(text.strip()) is None:
        return MemoryBytes(parse_bytes(text, FLAG))
    if device == "cpu":
        raise ConfigError(
            f"{given(FLAG, text)}: a share is of a GPU's free memory, with --device cuda; allowed "
            f"with --device cpu is {ALLOWED}"
        )
    share = float(text)
    if not 0 < share <= 1:
        raise ConfigError(
            f"{given(FLAG, text)}: a number without a unit is a share of what is free; allowed is "
            f"above 0, and 1 at most, or {ALLOWED}"
        )
    return MemoryShare(share)


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """``size_bytes``: what the device tier may take. ``text``: how that came about, as refusals
    begin."""

    size_bytes: int
    text: str

    @classmethod
    def of(cls, memory: DeviceMemory, text: str, free_bytes: int) -> "DeviceBudget":
        """``text``: as the operator wrote ``memory``; ``free_bytes``: on the device."""
        match memory:
            case MemoryBytes(size_bytes):
                return cls(size_bytes, text)
            case MemoryShare(share):
                return cls(int(free_bytes * share), f"{text} of {format_bytes(free_bytes)}")
            case _:
                assert_never(memory)

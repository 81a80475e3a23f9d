"""What an engine counts, and tells whoever watches it. Owns the records; must not count."""

from collections.abc import Mapping
from dataclasses import dataclass

from stratakv.tiers.statistics import PoolStats, StorageStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """``waiting`` counts the ``retracted`` requests too. ``cached_*_tokens`` count what admitted
    prompts did not have to compute; ``known_tokens`` what the cache knew of them, on any tier, and
    ``lost_tokens`` what of that they had to compute all the same, by tier and reason. A request
    counts among these when what storage does for it has ended."""

    waiting: int
    retracted: int
    running: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    cached_device_tokens: int
    cached_host_tokens: int
    cached_storage_tokens: int
    known_tokens: int
    lost_tokens: Mapping[tuple[str, str], int]
    pages: tuple[PoolStats, ...]
    counters: Mapping[str, int]
    storage: StorageStats | None


@dataclass(slots=True)
class Totals:
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0
    cached_storage_tokens: int = 0

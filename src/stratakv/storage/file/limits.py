"""What a file store may take of a disk, and for how long it keeps pages. Owns the record."""

from dataclasses import dataclass
from typing import Final

LOOK_S: Final = 1.0
"""How often to look for segments that lost their writer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """``quota_bytes``: of all processes that share the directory. ``ttl_s`` counts from the last
    use. ``slots``: of a new segment; None: what suits the quota."""

    quota_bytes: int
    ttl_s: float | None = None
    power_safe: bool = False
    slots: int | None = None

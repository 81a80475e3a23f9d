"""What the tiers count and report of themselves. Owns the records; plain data, no decisions."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from stratakv.core.counts import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Pages of one group on one tier; ``evictable`` ones hold a prefix that nothing pins."""

    group: str
    tier: str
    total: int
    free: int
    evictable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStats:
    """The storage tier since the start. ``pages`` and ``tokens``: counts by what happened to
    them. ``lost_tokens``: found in storage and not given to the request, by reason; with
    ``tokens["hits"]`` they are ``tokens["found"]``. ``abandoned``: prefetches, by reason.
    ``reading_off``, ``writing_off``: the store failed lately and is left alone for a while.
    ``busy``: requests run, or pages are on their way between device, host and storage; where not,
    all that was to be stored has been answered for."""

    pages: Mapping[str, int]
    tokens: Mapping[str, int]
    lost_tokens: Mapping[str, int]
    abandoned: Mapping[str, int]
    reading_off: bool
    writing_off: bool
    busy: bool


AGE_BOUNDS_S: Final = (
    0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 10800.0, 86400.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AgeCounts:
    """Pages of one group by age: ``counts`` of those up to each of ``AGE_BOUNDS_S``, but above the
    one before, and last of those beyond all. ``tier`` is empty where there are no tiers."""

    tier: str
    group: str
    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAgeStats:
    """``lifetime``: of pages that have left a tier, from their coming. ``idle_before_evict``: of
    the same, from their last use. ``reuse_gap``: of pages that a request was given, from the use
    before."""

    lifetime: tuple[AgeCounts, ...] = ()
    idle_before_evict: tuple[AgeCounts, ...] = ()
    reuse_gap: tuple[AgeCounts, ...] = ()


@dataclass(slots=True)
class Counters(Counts):
    """Counts since the start, in pages unless named otherwise. Why a cached token was not served is
    counted in tokens, by ``losses``."""

    backup_pages: int = 0
    backup_bytes: int = 0
    backup_failed_pages: int = 0
    dropped_backup_pages: int = 0  # no host page could be had
    load_pages: int = 0
    load_bytes: int = 0
    load_waited: int = 0  # over the budget, in requests and steps
    evicted_device_pages: int = 0
    evicted_host_pages: int = 0
    dropped_dirty_pages: int = 0  # evicted from the device without a host copy
    dropped_cold_pages: int = 0  # the same, but no checkpoint needed them
    duplicate_pages: int = 0
    snapshots: int = 0  # states that requests gave to the tree
    snapshots_skipped: int = 0  # states not kept, because no page was left to go on with
    spilled: int = 0  # requests that left pages on the host to go on, as they ran
    retracted: int = 0  # in requests
    retracted_pages: int = 0  # saved for a retraction, beyond what the host had already
    retracted_unsaved: int = (
        0  # retracted requests that are recomputed: kept apart, host full, or lost
    )
    copy_waits: int = 0  # times an allocation had to wait for a copy in flight

    def snapshot(self) -> dict[str, int]:
        return asdict(self)

"""What crosses the cache's boundary. Owns the records and counters; plain data, no decisions."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum, Flag, auto
from operator import sub

from stratakv.core.ids import TicketId


class CacheUse(Flag):
    """What a request does with the cache. READ: it goes on from cached pages. STORE: it leaves its
    own to others. One that does not do both is kept apart: its pages are its own while it runs."""

    NOTHING = 0
    READ = auto()
    STORE = auto()
    ALL = READ | STORE


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """Where a request's prefix came from, in tokens.

    ``device``: usable as it lay there; ``host``: how much further a load took it; ``storage``: how
    much of that load this request's own prefetch had brought to the host, which ``host`` does not
    count. ``groups_*`` are aligned with the spec's groups and count only what each rule needed.
    ``use``: what it was to do with the cache at all.
    """

    device: int
    host: int
    storage: int
    groups_device: tuple[int, ...]
    groups_host: tuple[int, ...]
    groups_storage: tuple[int, ...]
    use: CacheUse = CacheUse.ALL

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage

    def fetched(self, tokens: int, groups: Sequence[int]) -> "CachedTokens":
        """The same, where up to ``tokens``, and up to ``groups[g]`` of group g, of what the host
        had came from storage."""
        storage = min(tokens, self.host)
        came = tuple(map(min, groups, self.groups_host))
        return replace(
            self,
            host=self.host - storage,
            storage=storage,
            groups_host=tuple(map(sub, self.groups_host, came)),
            groups_storage=came,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request has a row and a leased prefix; ``tickets`` are the loads its first forward waits
    for. Tokens from ``computed`` on are to be computed; one that was retracted has more behind it
    than the pages that ``cached`` counts."""

    row: int
    computed: int
    cached: CachedTokens
    tickets: tuple[TicketId, ...]


class Refusal(Enum):
    """Why a request is not admitted this step. It stays where it is in the queue."""

    NO_ROW = auto()
    NO_PAGES = auto()
    LOAD_BUDGET = auto()
    SAVING = auto()  # a retracted request whose pages are still on their way to the host


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
    ``reading_off``, ``writing_off``: the store failed lately and is left alone for a while."""

    pages: Mapping[str, int]
    tokens: Mapping[str, int]
    lost_tokens: Mapping[str, int]
    abandoned: Mapping[str, int]
    reading_off: bool
    writing_off: bool


@dataclass(slots=True)
class Counters:
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
    retracted: int = 0  # in requests
    retracted_pages: int = 0  # saved for a retraction, beyond what the host had already
    retracted_unsaved: int = (
        0  # retracted requests that are recomputed: kept apart, host full, or lost
    )
    copy_waits: int = 0  # times an allocation had to wait for a copy in flight

    def snapshot(self) -> dict[str, int]:
        return asdict(self)

"""What crosses the cache's boundary. Owns the records; plain data, no decisions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Tokens of a prompt by the tier that had them."""

    device: int
    host: int
    storage: int

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """Where a request's prefix came from, in tokens.

    ``device``: usable as it lay there; ``host``: how much further a load took it; ``storage``: how
    much of that load this request's own prefetch had brought to the host, which ``host`` does not
    count. ``groups_*`` are aligned with the spec's groups and count only what each rule needed.
    ``use``: what it was to do with the cache at all. ``prefill``: what of the prompt another engine
    had, which computed it for this one; None: this one did.
    """

    device: int
    host: int
    storage: int
    groups_device: tuple[int, ...]
    groups_host: tuple[int, ...]
    groups_storage: tuple[int, ...]
    use: CacheUse = CacheUse.ALL
    prefill: TierTokens | None = None

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage

    @classmethod
    def of_pages(
        cls,
        page_tokens: int,
        device_end: int,
        end: int,
        spans: Sequence[int],
        loaded: Sequence[int],
    ) -> "CachedTokens":
        """``end`` pages, ``device_end`` of them without a load; of group g ``spans[g]`` were
        needed, ``loaded[g]`` of those from the host."""
        there = map(sub, spans, loaded)
        return cls(
            device=device_end * page_tokens,
            host=(end - device_end) * page_tokens,
            storage=0,
            groups_device=tuple(pages * page_tokens for pages in there),
            groups_host=tuple(pages * page_tokens for pages in loaded),
            groups_storage=(0,) * len(loaded),
        )

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
    GAVE_UP = auto()  # what it had saved was in its own way, and is let go of: ask once more

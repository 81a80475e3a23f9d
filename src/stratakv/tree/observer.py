"""Who observes a cache: the protocols by which it is notified of what happens to the pages.

Owns the protocols. Given to constructors, None where nobody observes; all calls come on the thread
that changes the tree, at once and in order. An observer must not touch the cache.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from stratakv.core.ids import GroupId, NodeIds, PageKey, TokenIds
from stratakv.core.page_keys import Namespace
from stratakv.tree.residency import ResidencyEvent


class Medium(Enum):
    """vLLM's words for the tiers."""

    DEVICE = "GPU"
    HOST = "CPU"
    STORAGE = "STORAGE"


class CacheObserver(Protocol):
    """A page counts as being on a tier from the moment it can be read there until it leaves."""

    def inserted(
        self, namespace: Namespace, keys: Sequence[PageKey], first: int, tokens: TokenIds
    ) -> None:
        """The pages ``keys[first:]`` are about to enter the tree; ``tokens`` (int32 [n]) is the
        whole prefix, full pages and perhaps more."""
        ...

    def stored(self, medium: Medium, group: GroupId, keys: Sequence[PageKey]) -> None:
        """``keys`` can be read at ``medium`` from now on."""
        ...

    def removed(self, medium: Medium, group: GroupId, keys: Sequence[PageKey]) -> None:
        """``medium`` has ``keys`` no more, as far as the cache knows."""
        ...

    def gone(self, keys: Sequence[PageKey]) -> None:
        """``keys`` have left the tree altogether: device and host have nothing of them."""
        ...

    def dropped(self) -> None:
        """Device and host were emptied on purpose; ``removed`` and ``gone`` have been called for
        every page, and may be forgotten."""
        ...


class PageWatcher(Protocol):
    """Notified in rows of the tree, whose meaning ends with the page: for figures alone."""

    def moved(self, group: GroupId, rows: NodeIds, event: ResidencyEvent) -> None:
        """``event`` has happened to the group's pages of ``rows``."""
        ...

    def used(self, group: int, rows: NodeIds, *, hit: bool) -> None:
        """A request uses these pages; ``hit``: it has just been given them."""
        ...

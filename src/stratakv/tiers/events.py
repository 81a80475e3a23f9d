"""What the cache tells the outside about its pages: stored, removed, cleared, per tier and group.

Owns the tokens, parents and namespaces of the pages in the tree, which the tree itself does not
know, and the records that come out. Must not know a wire or a socket. Follows a tree from its
beginning through its journal; what nobody takes grows without bound.

A tenant shows as a digest of its salt, ``TENANT`` before it, 32 hex digits. vLLM publishes the salt
itself; here it is a secret between a client and its server, and whoever knows it can ask for that
tenant's pages, so it must not travel to every subscriber. A router that is told a salt finds the
digest by itself. A salt that can be guessed can be found by trying: salts are to be random.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain, compress, count, pairwise, repeat
from operator import itemgetter, ne
from typing import Final, TypeAlias, assert_never

import numpy as np

from stratakv.core.ids import GroupId, PageKey, TokenIds
from stratakv.core.page_keys import Namespace
from stratakv.tree.journal import Change, Journal, Note

TENANT: Final = b"stratakv-tenant-1:"


class Medium(Enum):
    """vLLM's words for the tiers."""

    DEVICE = "GPU"
    HOST = "CPU"
    STORAGE = "STORAGE"


@dataclass(frozen=True, slots=True, eq=False)
class PagesStored:
    """A chain of pages that can be read at ``medium`` from now on.

    ``parent``: the page before the first; None at the start of a prefix. tokens: int32
    [len(keys) * page_tokens], in order; [0] where they are not known, then ``parent`` says nothing.
    ``tenant``: "" without a salt. ``lora``: "" without an adapter.
    """

    medium: Medium
    group: GroupId
    keys: Sequence[PageKey]
    parent: PageKey | None
    tokens: TokenIds
    tenant: str
    lora: str


@dataclass(frozen=True, slots=True, eq=False)
class PagesRemoved:
    """Pages, in any order, that ``medium`` has lost."""

    medium: Medium
    group: GroupId
    keys: Sequence[PageKey]


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing is cached on device and host. vLLM's word knows no tiers, so a router forgets what is
    in storage too, until it comes back."""


Describe: TypeAlias = Callable[[Namespace, Sequence[PageKey], int, TokenIds], None]
"""``CacheEvents.describe``."""

CacheEvent: TypeAlias = PagesStored | PagesRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class _Origin:
    tenant: str
    lora: str


_Page: TypeAlias = tuple[bytes, PageKey | None, _Origin]
"""Tokens as int32 bytes, parent, origin."""
_TOKENS, _PARENT = itemgetter(0), itemgetter(1)


class CacheEvents:
    """``adapters``: digests by name, as ``Namespaces`` has them. One thread calls it, the one that
    changes the tree."""

    def __init__(self, page_tokens: int, adapters: Mapping[str, bytes]) -> None:
        self.journal: Final = Journal()
        self._page_tokens = page_tokens
        self._lora_of = {digest: name for name, digest in adapters.items()}
        self._pages: dict[PageKey, _Page] = {}
        self._news: list[CacheEvent] = []

    def __len__(self) -> int:
        """Pages whose tokens are known."""
        return len(self._pages)

    def describe(
        self, namespace: Namespace, keys: Sequence[PageKey], first: int, tokens: TokenIds
    ) -> None:
        """The pages ``keys[first:]`` are about to enter the tree; ``tokens`` (int32 [n]) is the
        whole prefix, full pages and perhaps more."""
        fresh = keys[first:]
        data = tokens[first * self._page_tokens : len(keys) * self._page_tokens].tobytes()
        texts: list[bytes] = np.frombuffer(data, f"V{4 * self._page_tokens}").tolist()
        parents = chain((keys[first - 1] if first else None,), fresh)
        origin = _Origin(tenant_of(namespace.salt), self._lora_of.get(namespace.adapter, ""))
        # The chain of parents is one longer than the pages: the last page is nobody's parent here.
        self._pages.update(
            zip(fresh, zip(texts, parents, repeat(origin), strict=False), strict=True)
        )

    def stored_in_storage(self, group: GroupId, keys: Sequence[PageKey]) -> None:
        """Storage holds ``keys`` from now on. What it drops later is its own affair, and is not
        told: a router must take a page in storage for likely, not for certain."""
        self._news += self._stored(Medium.STORAGE, group, keys)

    def gone_from_storage(self, group: GroupId, keys: Sequence[PageKey]) -> None:
        """Storage was emptied or taken away: it has ``keys`` no more. Nor has it those that the
        tree does not know any more, which are not told."""
        self._news.append(PagesRemoved(Medium.STORAGE, group, keys))

    def cleared(self) -> None:
        """The tree was emptied on purpose: whatever was noted before is void."""
        self.journal.take()
        self._news = [AllCleared()]
        self._forget()

    def take(self) -> list[CacheEvent]:
        """What has happened since the last ``take``, oldest first."""
        news, self._news = self._news, []
        for note in self.journal.take():
            news += self._told(note)
        self._forget()
        return news

    def _forget(self) -> None:
        deque(map(self._pages.pop, self.journal.gone(), repeat(None)), maxlen=0)

    def _told(self, note: Note) -> Iterator[CacheEvent]:
        match note.change:
            case Change.DEVICE_STORED:
                yield from self._stored(Medium.DEVICE, note.group, note.keys)
            case Change.HOST_STORED:
                yield from self._stored(Medium.HOST, note.group, note.keys)
            case Change.DEVICE_REMOVED:
                yield PagesRemoved(Medium.DEVICE, note.group, note.keys)
            case Change.HOST_REMOVED:
                yield PagesRemoved(Medium.HOST, note.group, note.keys)
            case _:
                assert_never(note.change)

    def _stored(
        self, medium: Medium, group: GroupId, keys: Sequence[PageKey]
    ) -> Iterator[CacheEvent]:
        """One record per unbroken chain: a parent is told for its first page only."""
        known = list(map(self._pages.get, keys))
        pages = [page for page in known if page is not None]
        if len(pages) < len(keys):
            yield PagesStored(medium, group, keys, None, np.empty(0, np.int32), "", "")
            return
        breaks = compress(count(1), map(ne, map(_PARENT, pages[1:]), keys))
        for start, stop in pairwise((0, *breaks, len(keys)) if keys else ()):
            part = pages[start:stop]
            tokens = np.frombuffer(b"".join(map(_TOKENS, part)), np.int32)
            _, parent, origin = part[0]
            yield PagesStored(
                medium, group, keys[start:stop], parent, tokens, origin.tenant, origin.lora
            )


@lru_cache(maxsize=1024)
def tenant_of(salt: str) -> str:
    """How events name the tenant of a salt; "" without one."""
    return hashlib.sha256(TENANT + salt.encode()).hexdigest()[:32] if salt else ""

"""What the cache reports of its pages: stored, removed, cleared, per tier and group.

Owns the tokens, parents and namespaces of the pages in the tree, which the tree itself does not
know, and the records that come out. Must not know a wire or a socket. A ``CacheObserver``, from
its tree's beginning; what nobody takes grows without bound.

A tenant shows as a digest of its salt, ``TENANT`` before it, 32 hex digits. vLLM publishes the salt
itself; here it is a secret between a client and its server, and whoever knows it can ask for that
tenant's pages, so it must not travel to every subscriber. A router that is given a salt finds the
digest by itself. A salt that can be guessed can be found by trying: salts are to be random.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress, count, pairwise, repeat
from operator import itemgetter, ne
from typing import Final, TypeAlias

import numpy as np

from stratakv.core.ids import GroupId, PageKey, TokenIds
from stratakv.core.page_keys import Namespace
from stratakv.tree.observer import Medium

TENANT: Final = b"stratakv-tenant-1:"


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
        self._page_tokens = page_tokens
        self._lora_of = {digest: name for name, digest in adapters.items()}
        self._pages: dict[PageKey, _Page] = {}
        self._events: list[CacheEvent] = []

    def __len__(self) -> int:
        """Pages whose tokens are known."""
        return len(self._pages)

    def inserted(
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

    def stored(self, medium: Medium, group: GroupId, keys: Sequence[PageKey]) -> None:
        """``keys`` can be read at ``medium`` from now on. What storage drops later is its own
        affair, and is not reported: a router must take a page there for likely, not for certain."""
        self._events += self._stored(medium, group, keys)

    def removed(self, medium: Medium, group: GroupId, keys: Sequence[PageKey]) -> None:
        """``medium`` has ``keys`` no more. Where storage was emptied or taken away, it has none of
        those either that the tree does not know any more, which are not reported."""
        self._events.append(PagesRemoved(medium, group, keys))

    def gone(self, keys: Sequence[PageKey]) -> None:
        """``keys`` have left the tree: their tokens are not needed any more."""
        deque(map(self._pages.pop, keys, repeat(None)), maxlen=0)

    def dropped(self) -> None:
        """The tree was emptied on purpose: whatever was noted before is void."""
        self._events = [AllCleared()]

    def take(self) -> list[CacheEvent]:
        """What has happened since the last ``take``, oldest first."""
        events, self._events = self._events, []
        return events

    def _stored(
        self, medium: Medium, group: GroupId, keys: Sequence[PageKey]
    ) -> Iterator[CacheEvent]:
        """One record per unbroken chain: a parent is given for its first page only."""
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

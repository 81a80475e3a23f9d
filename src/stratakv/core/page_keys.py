"""Page keys: chained SHA-256 of a prefix, rooted in a namespace.

Owns the identity of a page on every tier. A key cannot be built without a ``Namespace``, so no two
models, cache layouts, adapters or tenants can ever meet. Must not know trees or storage.
"""

import hashlib
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np

from stratakv.core.ids import PageKey, TokenIds

FORMAT: Final = b"stratakv-page-key-1"
UNITS: Final = (b"0", b"1")
"""Ends every namespace: a page is full without the token after it, and a unit of the prefix is one
token. Draft heads that read ahead, or in bigrams, would say otherwise."""
AGAIN: Final = b"stratakv-page-computed-again"
NO_SUSPECTS: Final[AbstractSet[PageKey]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything beside the tokens that decides what a page's bytes are, and who may read them.

    Fields are length-framed: ("ab", "c") and ("a", "bc") differ.
    """

    model: bytes
    spec_digest: bytes
    adapter: bytes = b""
    salt: str = ""

    def adapted(self, digest: bytes) -> "Namespace":
        """The pages of the model under another adapter; ``digest``: of its weights, never a name.
        Two names of one adapter share pages, one name of two adapters does not."""
        return replace(self, adapter=digest)

    def salted(self, salt: str) -> "Namespace":
        """The same pages for another tenant."""
        return replace(self, salt=salt)

    def root(self) -> bytes:
        """Digest that stands before page 0."""
        framed = hashlib.sha256()
        parts = (FORMAT, self.model, self.spec_digest, self.adapter, self.salt.encode(), *UNITS)
        for part in parts:
            framed.update(len(part).to_bytes(8, "little") + part)
        return framed.digest()


Chain: TypeAlias = Callable[[bytes, bytes, int], list[PageKey]]
"""Of the key before the first page, the bytes of whole pages, and the bytes of each."""


def hashlib_chain(previous: bytes, data: bytes, page_bytes: int) -> list[PageKey]:
    """SHA-256 of each page behind the key before it."""
    sha, keys = hashlib.sha256, list[PageKey]()
    append = keys.append
    for at in range(0, len(data), page_bytes):
        previous = sha(previous + data[at : at + page_bytes]).digest()
        append(PageKey(previous))
    return keys


_fastest: Chain = hashlib_chain
try:  # not built without a compiler; the module refuses a processor without the instructions
    from stratakv.core import _page_keys

    _fastest = _page_keys.chain
except ImportError:
    pass
DEFAULT_CHAIN: Final = _fastest
"""In C several times as fast; what the loop takes is calls, not hashing."""


class PageHasher:
    """Extends one prefix's chain of page keys; each full page is hashed once. ``tokens``: what was
    given last, not copied. ``suspects``: keys under which a page may hold something else; where the
    chain comes to one it parts from it, so that nothing is found or left there or below."""

    __slots__ = (
        "_page_bytes",
        "_page_tokens",
        "_previous",
        "_suspects",
        "keys",
        "namespace",
        "tokens",
    )

    def __init__(
        self,
        namespace: Namespace,
        page_tokens: int,
        suspects: AbstractSet[PageKey] = NO_SUSPECTS,
    ) -> None:
        self.namespace: Final = namespace
        self._suspects = suspects
        self._page_tokens = page_tokens
        self._page_bytes = 4 * page_tokens
        self._previous = namespace.root()
        self.keys: list[PageKey] = []
        self.tokens: TokenIds = np.empty(0, np.int32)

    def extend(self, tokens: TokenIds) -> Sequence[PageKey]:
        """Hash the pages that ``tokens``, the whole prefix so far, has completed since last time.

        tokens: int32 [n]. Returns the new keys only; all of them are in ``keys``.
        """
        if not isinstance(tokens, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"tokens must be an int32 array, got a {type(tokens).__name__}")
        if tokens.dtype != np.int32:
            raise TypeError(f"tokens must be int32, got {tokens.dtype}")
        self.tokens = tokens
        first = len(self.keys)
        full = len(tokens) // self._page_tokens
        data = tokens[first * self._page_tokens : full * self._page_tokens].tobytes()
        fresh = DEFAULT_CHAIN(self._previous, data, self._page_bytes)
        if self._suspects and not self._suspects.isdisjoint(fresh):
            fresh = self._parted(data)
        if fresh:
            self._previous = fresh[-1]
        self.keys += fresh
        return fresh

    def _parted(self, data: bytes) -> list[PageKey]:
        """The same, parting from what is suspect."""
        size, previous = self._page_bytes, self._previous
        fresh: list[PageKey] = []
        for at in range(0, len(data), size):
            previous = hashlib.sha256(previous + data[at : at + size]).digest()
            while previous in self._suspects:
                previous = hashlib.sha256(previous + AGAIN).digest()
            fresh.append(PageKey(previous))
        return fresh

    def trusted(self, tokens: TokenIds) -> "PageHasher":
        """Of ``tokens``, the whole prefix; itself where none of its keys is suspect by now."""
        if not self._suspects or self._suspects.isdisjoint(self.keys):
            return self
        again = PageHasher(self.namespace, self._page_tokens, self._suspects)
        again.extend(tokens)
        return again


def page_keys(tokens: TokenIds, namespace: Namespace, page_tokens: int) -> list[PageKey]:
    """Keys of every full page of ``tokens`` (int32 [n])."""
    hasher = PageHasher(namespace, page_tokens)
    hasher.extend(tokens)
    return hasher.keys

"""Who ``bench tree`` measures: the tree as an engine drives it, and the sketch beside it.

Owns the subjects that need nothing beside the library; SGLang's is in ``tree_sglang``.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import numpy as np

from stratakv.bench.tree_sketch import SketchIndex, sketch_keys
from stratakv.core.ids import NONE, GroupId, LayerId, PageKey, TokenIds
from stratakv.core.page_keys import Namespace, page_keys
from stratakv.spec.groups import ANCHOR, BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepWindow, Retention
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree

NAMESPACE = Namespace(model=b"bench", spec_digest=b"bench")


Operation: TypeAlias = Callable[[], object]
"""Made with all that it is given, so that its time is its own."""


class Subject(Protocol):
    """One index of prefixes, and what is done to it."""

    def uses(self, tokens: TokenIds) -> Mapping[str, Operation]:
        """Of a prompt all of which is there: ``match``; ``lock_unlock``, after which its pages may
        leave again; ``lease_release``, the same with the device pages collected in between."""
        ...

    def new(self, tokens: TokenIds) -> Operation:
        """Match a prompt that nobody has hashed."""
        ...

    def insert(self, tokens: TokenIds) -> Operation:
        """What of a prompt is not there."""
        ...

    def evict(self, pages: int) -> Operation: ...


def spec_of(page: int, window: int) -> CacheSpec:
    rules: list[Retention] = [KeepAll()]
    if window:
        rules.append(KeepWindow(window))
    buffer = BufferSpec(
        name="k", layers=(LayerId(0),), rows_per_page=page, row_shape=(8,), dtype="float16"
    )
    return CacheSpec(
        page_tokens=page,
        groups=tuple(
            CacheGroup(id=GroupId(i), name=f"g{i}", retention=rule, buffers=(buffer,))
            for i, rule in enumerate(rules)
        ),
    )


class Strata:
    """The production tree, driven as an engine drives it."""

    def __init__(self, page: int, window: int, nodes: int) -> None:
        self._groups = 2 if window else 1
        self._tree = PrefixTree(spec_of(page, window), nodes)
        self._page = page
        self._next = 0

    def _keys(self, tokens: TokenIds) -> list[PageKey]:
        return page_keys(tokens, NAMESPACE, self._page)

    def _match(self, keys: list[PageKey]) -> int:
        return self._tree.match(keys, len(keys)).device_end

    def uses(self, tokens: TokenIds) -> Mapping[str, Operation]:
        keys, leases = self._keys(tokens), self._tree.leases
        assert self._match(keys) == len(keys), "a prompt is not there"

        def lease_release() -> None:
            lease = leases.take(keys, len(keys))
            leases.pages(lease, ANCHOR)
            leases.release(lease)

        return {
            "match": lambda: self._match(keys),
            "lock_unlock": lambda: leases.release(leases.take(keys, len(keys))),
            "lease_release": lease_release,
        }

    def new(self, tokens: TokenIds) -> Operation:
        return lambda: self._match(self._keys(tokens))

    def insert(self, tokens: TokenIds) -> Operation:
        keys = self._keys(tokens)
        have = self._match(keys)
        pages = np.arange(self._next, self._next + len(keys) - have, dtype=np.int32)
        self._next += len(pages)
        return lambda: self._tree.insert(keys, have, [pages] * self._groups)

    def evict(self, pages: int) -> Operation:
        return lambda: self._tree.eviction.evict(Tier.DEVICE, ANCHOR, pages)


class Sketch:
    """Its match collects the pages, so there is no lock without them."""

    def __init__(self, page: int, nodes: int) -> None:
        self._index = SketchIndex(nodes)
        self._page = page
        self._next = 0

    def uses(self, tokens: TokenIds) -> Mapping[str, Operation]:
        keys, index = sketch_keys(tokens, self._page), self._index

        def lease_release() -> None:
            rows, _ = index.match(keys)
            index.pin(rows, 1)
            index.pin(rows, -1)

        return {"match": lambda: index.match(keys), "lease_release": lease_release}

    def new(self, tokens: TokenIds) -> Operation:
        return lambda: self._index.match(sketch_keys(tokens, self._page))

    def insert(self, tokens: TokenIds) -> Operation:
        keys, index = sketch_keys(tokens, self._page), self._index
        have = len(index.match(keys)[0])
        pages = np.arange(self._next, self._next + len(keys) - have, dtype=np.int32)
        self._next += len(pages)

        def insert() -> None:
            tip = int(index.match(keys[have - 1 : have])[0][-1]) if have else NONE
            index.insert(keys, have, tip, pages)

        return insert

    def evict(self, pages: int) -> Operation:
        return lambda: self._index.evict(pages)


def tokens_of(rng: np.random.Generator, count: int) -> TokenIds:
    return rng.integers(0, 150_000, count, dtype=np.int32)

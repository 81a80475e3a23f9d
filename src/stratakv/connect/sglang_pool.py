"""One of SGLang's host pools and where its pages are kept.

Owns the way between a page's rows in the pool and the bytes that are stored. Must not import
SGLang, nor say which pages a prefix needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from stratakv.connect.blocking_pages import BlockingPages
from stratakv.connect.namespace import EngineNamespace
from stratakv.connect.pool_hits import Flags
from stratakv.core.ids import GroupId
from stratakv.storage.backend import ObjectKey

HostKVCache: TypeAlias = Any
"""SGLang's host pools, which have no class in common."""
MARK: Final = b"\1"
"""Of a page without bytes: what is stored in its place."""
COPIED_BYTES: Final = 8 << 20
"""Read at a time where pages are copied: they are still in the processor's cache then, and the
memory that they pass through is made once."""


@dataclass(frozen=True, slots=True, eq=False)
class HostPool:
    """One host pool and where its pages are kept. ``rows``: indices that a page has.
    ``page_bytes``: 0 of an anchor without bytes, whose pages are marked as stored (DeepSeek-V4's:
    what counts lies in the pools beside it). ``in_place``: a page lies in one piece."""

    host: HostKVCache
    rows: int
    page_bytes: int
    dtype: torch.dtype
    namespace: EngineNamespace
    shard: int
    pages: BlockingPages
    in_place: bool

    def names(self, keys: Sequence[str]) -> list[ObjectKey]:
        return [
            ObjectKey(self.namespace.page_key(key.encode()), GroupId(0), self.shard) for key in keys
        ]

    def contains(self, keys: Sequence[str]) -> Flags:
        return self.pages.contains(self.names(keys))

    def load(self, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """What pages hold that were not loaded is undefined."""
        names = self.names(keys)
        if self.in_place:
            return self._read(names, self._memory(keys, indices))
        if not self.page_bytes:
            return self._read(names, self._marks(len(keys)))
        some = max(1, COPIED_BYTES // self.page_bytes)
        memory = np.empty((min(some, len(keys)), self.page_bytes), np.uint8)
        hit: list[bool] = []
        for start in range(0, len(keys), some):
            part = names[start : start + some]
            hit += self.pages.read(part, [row.data for row in memory[: len(part)]])
            for row, at in zip(memory, range(start, len(hit)), strict=False):
                if hit[at]:
                    page = torch.from_numpy(row).view(self.dtype)
                    self.host.set_from_flat_data_page(int(indices[at * self.rows]), page)
        self.pages.touch(names, hit)
        return hit

    def store(self, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        return self._write(keys, self._memory(keys, indices) if self.page_bytes else ())

    def load_into(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Pages that lie outside the pool; what those hold that were not loaded is undefined."""
        into = [_bytes_of(page) for page in pages] if self.page_bytes else self._marks(len(keys))
        return self._read(self.names(keys), into)

    def store_from(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        return self._write(keys, [_bytes_of(page) for page in pages])

    def _write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        stored = pages if self.page_bytes else [memoryview(MARK)] * len(keys)
        return self.pages.write(self.names(keys), stored)

    def _read(self, names: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[bool]:
        hit = self.pages.read(names, into)
        self.pages.touch(names, hit)
        return hit

    def _marks(self, count: int) -> list[memoryview]:
        """For what is stored of pages without bytes."""
        return [memoryview(bytearray(len(MARK))) for _ in range(count)]

    def _memory(self, keys: Sequence[str], indices: torch.Tensor) -> list[memoryview]:
        """Of each page; a copy where it does not lie in one piece."""
        firsts = [int(indices[at * self.rows]) for at in range(len(keys))]
        return [_bytes_of(self.host.get_data_page(first, flat=True)) for first in firsts]

    def fits(self, keys: Sequence[str], indices: torch.Tensor | None) -> bool:
        return indices is not None and len(indices) == len(keys) * self.rows


def _bytes_of(page: torch.Tensor) -> memoryview:
    """Its own where it lies in one piece; the view keeps what it is of."""
    return page.flatten().view(torch.uint8).numpy().data


def lies_in_one_piece(host: HostKVCache, page_bytes: int) -> bool:
    """Whether a flat page is the pool's own memory: two copies would lie in two places."""
    if not page_bytes:
        return False
    one, other = (host.get_data_page(0, flat=True) for _ in range(2))
    return bool(one.is_contiguous() and one.data_ptr() == other.data_ptr())

"""One of SGLang's host pools and where its pages are kept.

Owns the way between a page's rows in the pool and the bytes that are stored. Must not import
SGLang, nor say which pages a prefix needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from stratakv.connect.blocking_pages import BlockingPages, Bytes
from stratakv.connect.namespace import EngineNamespace
from stratakv.connect.pool_hits import Flags
from stratakv.core.ids import GroupId
from stratakv.storage.backend import ObjectKey

HostKVCache: TypeAlias = Any
"""SGLang's host pools, which have no class in common."""
MARK: Final = b"\1"
"""Of a page without bytes: what is stored in its place."""


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
        """What was not loaded is as it was."""
        firsts = self._firsts(indices)

        def put(at: int, row: Bytes) -> None:
            if self.in_place:
                _copy(row, self.host.get_data_page(firsts[at], flat=True))
            else:
                page = torch.from_numpy(row).view(self.dtype)
                self.host.set_from_flat_data_page(firsts[at], page)

        return self._read(keys, put)

    def store(self, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """Page by page into memory that is there: all of them at once would be new memory, which
        takes several times as long as the copy."""
        if not self.page_bytes:
            return self.store_from(keys, [])
        firsts = self._firsts(indices)

        def take(at: int, row: Bytes) -> None:
            page = self.host.get_data_page(firsts[at], flat=True)
            np.copyto(row, np.frombuffer(_bytes_of(page), np.uint8))

        return self.pages.write_from(self.names(keys), self.page_bytes, take)

    def _firsts(self, indices: torch.Tensor) -> list[int]:
        """Of each page its first row."""
        return indices[:: self.rows].tolist()

    def load_into(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Pages that lie outside the pool; what was not loaded is as it was."""
        return self._read(keys, lambda at, row: _copy(row, pages[at]))

    def store_from(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """A page that lies in one piece is the pool's own memory, and is copied: a store that
        hangs may write it when SGLang has another page there."""
        marks = [memoryview(MARK)] * len(keys)
        own = [page.clone() for page in pages] if self.in_place else pages
        stored = [_bytes_of(page) for page in own] if self.page_bytes else marks
        return self.pages.write(self.names(keys), stored)

    def _read(self, keys: Sequence[str], put: Callable[[int, Bytes], None]) -> list[bool]:
        names = self.names(keys)
        if self.page_bytes:
            hit = self.pages.read(names, self.page_bytes, put)
        else:
            hit = self.pages.read(names, len(MARK), lambda _at, _row: None)
        self.pages.touch(names, hit)
        return hit

    def fits(self, keys: Sequence[str], indices: torch.Tensor | None) -> bool:
        return indices is not None and len(indices) == len(keys) * self.rows


def _copy(row: Bytes, page: torch.Tensor) -> None:
    np.copyto(np.frombuffer(_bytes_of(page), np.uint8), row)


def _bytes_of(page: torch.Tensor) -> memoryview:
    """Its own where it lies in one piece; the view keeps what it is of."""
    return page.flatten().view(torch.uint8).numpy().data


def lies_in_one_piece(host: HostKVCache, page_bytes: int) -> bool:
    """Whether a flat page is the pool's own memory: two copies would lie in two places."""
    if not page_bytes:
        return False
    one, other = (host.get_data_page(0, flat=True) for _ in range(2))
    return bool(one.is_contiguous() and one.data_ptr() == other.data_ptr())

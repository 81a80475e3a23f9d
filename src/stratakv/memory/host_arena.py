"""Bytes of the host tier: one page-first arena per group.

Owns the arena; must not allocate page ids (``allocator``), copy (``transfer``) or persist.
"""

import numpy as np

from stratakv.core.ids import PageIds
from stratakv.memory.layout import HostPageLayout
from stratakv.memory.mapped import POISON, mapped_bytes, rows_of
from stratakv.spec.groups import CacheGroup


class HostArena:
    """``bytes``: uint8 [pages, stride_bytes]; row i is host page i, laid out as ``layout`` says.

    Memory is touched when a page is first written, so a large arena costs nothing at start. A group
    without buffers has an arena of zero bytes.
    """

    def __init__(self, group: CacheGroup, pages: int) -> None:
        self.group = group
        self.pages = pages
        self.layout = HostPageLayout.of(group)
        self.bytes = mapped_bytes(pages, self.layout.stride_bytes)
        self._whole = self.bytes.reshape(-1).data

    @property
    def size_bytes(self) -> int:
        """pages x ``layout.stride_bytes``: what the arena takes once every page was written."""
        return self.bytes.nbytes

    def views(self, pages: PageIds) -> list[memoryview]:
        """The bytes of each page, writable, ``layout.page_bytes`` long; no copies."""
        stride, size = self.layout.stride_bytes, self.layout.page_bytes
        whole = self._whole
        return [whole[at : at + size] for at in (pages.astype(np.int64) * stride).tolist()]

    def poison(self, pages: PageIds) -> None:
        """Fill pages with 0xFF bytes: NaN in every float dtype."""
        self.bytes[rows_of(pages)] = POISON

"""Where each layer's bytes lie inside a host page. Owns the page-first layout; takes no memory.

A host page is one contiguous run of bytes that holds every sidecar and every layer of that page,
buffer after buffer, layer after layer, without holes: one page is one storage object, one
``pwritev``, one RDMA descriptor, and a sidecar that is shorter than its keys cannot exist.
"""

from dataclasses import dataclass

from stratakv.core.ids import LayerId
from stratakv.spec.groups import CacheGroup


@dataclass(frozen=True, slots=True)
class PageSlice:
    """One layer of one buffer of one page: ``bytes`` bytes at ``offset_bytes`` in the host page.

    ``buffer`` indexes ``CacheGroup.buffers``, ``layer`` indexes that buffer's ``layers``.
    """

    buffer: int
    layer: int
    layer_id: LayerId
    offset_bytes: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HostPageLayout:
    """``page_bytes`` is what a page holds; ``stride_bytes`` the distance to the next page."""

    segments: tuple[PageSlice, ...]
    page_bytes: int
    stride_bytes: int

    @classmethod
    def of(cls, group: CacheGroup) -> "HostPageLayout":
        """The one layout of a group; a group without buffers gets no segments and stride 0."""
        segments: list[PageSlice] = []
        offset = 0
        for at, buffer in enumerate(group.buffers):
            for layer, layer_id in enumerate(buffer.layers):
                segments.append(PageSlice(at, layer, layer_id, offset, buffer.layer_bytes))
                offset += buffer.layer_bytes
        assert offset == group.page_bytes, f"{group.name}: {offset} != {group.page_bytes} bytes"
        return cls(tuple(segments), offset, group.host_stride_bytes)

"""Bytes without a model: patterns that show any page that was swapped, torn, stale or cut short.

Owns the pattern. Stands in for the forward pass wherever only bytes matter: write pages under
their keys, move them as you like, verify them under the same keys. Must not move bytes itself.
"""

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import GroupId, LayerId, PageIds, PageKey
from stratakv.memory.device_pools import DevicePages
from stratakv.memory.host_arena import HostArena
from stratakv.memory.layout import HostPageLayout, PageSlice
from stratakv.memory.mapped import Bytes, rows_of
from stratakv.spec.groups import BufferSpec, CacheSpec

Words = npt.NDArray[np.uint64]

_STEP: Final = 0x9E3779B97F4A7C15
_MIX: Final = 0xBF58476D1CE4E5B9
_MASK: Final = 2**64 - 1


class PatternWriter:
    """Every 8 bytes of a page depend on its key, group, buffer, layer, row and place in the row.

    A page's key names its prefix, so another page's bytes, an older prefix's, another layer's or
    another sidecar's never pass. Vectorised: one pattern per (buffer, layer), whatever the pages.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self._layouts = [HostPageLayout.of(group) for group in spec.groups]

    def write(
        self, pools: DevicePages, group: GroupId, pages: PageIds, keys: Sequence[PageKey]
    ) -> None:
        """Fill device pages, every sidecar and layer: ``pages[i]`` holds the prefix ``keys[i]``."""
        for segment in self._layouts[group].segments:
            buffer = self._spec.groups[group].buffers[segment.buffer]
            pattern = self._pattern(group, segment, keys).reshape(len(keys), segment.bytes)
            pools.layer_pages(group, buffer.name, segment.layer)[rows_of(pages)] = pattern

    def verify_device(
        self,
        pools: DevicePages,
        group: GroupId,
        pages: PageIds,
        keys: Sequence[PageKey],
        layers: Collection[LayerId] | None = None,
    ) -> None:
        """AssertionError, naming the first wrong row, unless device pages hold these prefixes.

        ``layers``: only these (None: all), for a load of which only some have landed.
        """
        for segment in self._layouts[group].segments:
            if layers is None or segment.layer_id in layers:
                buffer = self._spec.groups[group].buffers[segment.buffer]
                found = pools.layer_pages(group, buffer.name, segment.layer)[rows_of(pages)]
                shape = (len(pages), buffer.rows_per_page, buffer.row_bytes)
                self._compare("device", group, segment, pages, keys, found.reshape(shape))

    def verify_host(
        self, arena: HostArena, group: GroupId, pages: PageIds, keys: Sequence[PageKey]
    ) -> None:
        """AssertionError, naming the first wrong row, unless host pages hold these prefixes."""
        found = arena.bytes[pages]
        for segment in self._layouts[group].segments:
            buffer = self._spec.groups[group].buffers[segment.buffer]
            stop = segment.offset_bytes + segment.bytes
            rows = found[:, segment.offset_bytes : stop]
            shape = (len(pages), buffer.rows_per_page, buffer.row_bytes)
            self._compare("host", group, segment, pages, keys, rows.reshape(shape))

    def host_pages(self, group: GroupId, keys: Sequence[PageKey]) -> Bytes:
        """uint8 [n, page_bytes]: what host pages (and storage objects) of these prefixes hold."""
        layout = self._layouts[group]
        pages = np.empty((len(keys), layout.page_bytes), np.uint8)
        for segment in layout.segments:
            stop = segment.offset_bytes + segment.bytes
            pattern = self._pattern(group, segment, keys)
            pages[:, segment.offset_bytes : stop] = pattern.reshape(len(keys), segment.bytes)
        return pages

    def _pattern(self, group: GroupId, segment: PageSlice, keys: Sequence[PageKey]) -> Bytes:
        """uint8 [n, rows_per_page, row_bytes]."""
        buffer = self._spec.groups[group].buffers[segment.buffer]
        place = (group * 1021 + segment.buffer) * 65521 + segment.layer
        words = _words(_seeds(keys), place, buffer)
        return words.view(np.uint8)[:, :, : buffer.row_bytes]

    def _compare(
        self,
        tier: str,
        group: GroupId,
        segment: PageSlice,
        pages: PageIds,
        keys: Sequence[PageKey],
        found: Bytes,
    ) -> None:
        wrong = (found != self._pattern(group, segment, keys)).any(axis=2)
        if not wrong.any():
            return
        at, row = (int(index[0]) for index in np.nonzero(wrong))
        spec = self._spec.groups[group]
        raise AssertionError(
            f"group {spec.name}, buffer {spec.buffers[segment.buffer].name}, layer "
            f"{segment.layer_id}: {tier} page {pages[at]} does not hold its prefix from row {row} "
            f"on ({np.count_nonzero(wrong.any(axis=1))} of {len(pages)} pages are wrong)"
        )


def _seeds(keys: Sequence[PageKey]) -> Words:
    """uint64 [n]: the first 8 bytes of each key."""
    joined = b"".join(key[:8] for key in keys)
    assert len(joined) == 8 * len(keys), "a page key has at least 8 bytes"
    return np.frombuffer(joined, np.uint64)


def _words(seeds: Words, place: int, buffer: BufferSpec) -> Words:
    """uint64 [n, rows, words of a row], mixed so that neighbours share no byte but by chance."""
    per_row = -(-buffer.row_bytes // 8)
    count = buffer.rows_per_page * per_row
    # Python's integers for the offset: numpy warns when a scalar product wraps.
    offset = np.uint64(place * 0xD6E8FEB86659FD93 & _MASK)
    lanes = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)) ^ offset
    mixed = seeds[:, None] ^ lanes
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(_MIX)
    mixed ^= mixed >> np.uint64(29)
    return mixed.reshape(len(seeds), buffer.rows_per_page, per_row)

"""Where pages lie in registered memory, and the writes that take pages of one side to the other.

Owns the map from (group, page) to bytes of a region, and the pairing: by group and page index,
never by where either side has put a page. Must not know requests. A peer's places come from another
machine: nothing of them is believed before it was checked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from stratakv.cache.footprint import GroupPages, TransferPages
from stratakv.core.errors import TransportError
from stratakv.core.ids import NONE, GroupId, PageIds
from stratakv.disagg.transport import Indices, Memory, Writes
from stratakv.memory.device_pools import DevicePages
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import needed

_LARGEST: Final = 2**62
"""What no offset of any memory comes to."""


@dataclass(frozen=True, slots=True, eq=False)
class PagePlaces:
    """One row for each layer of each buffer of each group, in the spec's order: ``size`` bytes of
    page p are at ``base + p * stride`` of region ``region``, for p below ``pages``. A group without
    buffers has no row. int64 [n] each."""

    group: Indices
    region: Indices
    base: Indices
    stride: Indices
    size: Indices
    pages: Indices

    def columns(self) -> dict[str, list[int]]:
        return {each.name: getattr(self, each.name).tolist() for each in fields(self)}

    @staticmethod
    def of_columns(found: Any) -> "PagePlaces":  # noqa: ANN401 - from a peer
        """TransportError where it is none."""
        try:
            columns = [np.array(found[each.name], np.int64) for each in fields(PagePlaces)]
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise TransportError(f"the peer's page layout cannot be read: {error!r}") from error
        places = PagePlaces(*columns)
        if any(each.shape != (places.size.size,) for each in columns):
            raise TransportError("the peer's page layout has columns of several lengths")
        if any(((each < 0) | (each > _LARGEST)).any() for each in columns):
            raise TransportError("the peer's page layout has a number that is none of a page")
        return places

    def refusal(self, peer: "PagePlaces") -> str:
        """Why pages of one side are not pages of the other, with both values; "": they are."""
        ours, theirs = self.parts(), peer.parts()
        if ours == theirs:
            return ""
        return f"bytes of a page's parts, by group, are {ours} here and {theirs} there"

    def parts(self) -> dict[int, list[int]]:
        """Bytes of each part of a page, by group."""
        parts: dict[int, list[int]] = {}
        for group, size in zip(self.group.tolist(), self.size.tolist(), strict=True):
            parts.setdefault(group, []).append(size)
        return parts

    def verify(self, pages: TransferPages, spec: CacheSpec) -> None:
        """TransportError where a peer with these places asks for other ``pages`` than somebody with
        ``spec`` may want, or for some that it does not have."""
        if [each.group for each in pages.groups] != [group.id for group in spec.groups]:
            raise TransportError("the peer names pages of other groups")
        for group, asked in zip(spec.groups, pages.groups, strict=True):
            span = needed(group.retention, pages.tokens, spec.page_tokens)
            last = len(span) if group.stateful else span.stop - asked.first
            wanted = (asked.first == NONE) if group.stateful else asked.first >= span.start
            if not wanted or len(asked.pages) != last:
                raise TransportError(
                    f"the peer asks for {len(asked.pages)} pages from {asked.first} on of group "
                    f"{group.name}; {pages.tokens} tokens need {span}"
                )
            room = self.pages[self.group == group.id]
            if len(room) and len(asked.pages) and int(asked.pages.max()) >= int(room.min()):
                raise TransportError(f"the peer names pages of group {group.name} it has not")
            if (asked.pages < 0).any() or len(np.unique(asked.pages)) != len(asked.pages):
                raise TransportError(f"the peer names a page of group {group.name} twice, or none")

    def writes(self, source: TransferPages, peer: "PagePlaces", target: TransferPages) -> Writes:
        """What takes the pages of ``source`` that ``target`` wants to ``target``, which are of the
        same tokens. AssertionError where ``source`` lacks one."""
        assert not self.refusal(peer), "pages of another layout"
        parts = [
            self._rows(group, here, peer, there) for group, here, there in source.paired(target)
        ]
        table = np.concatenate([np.empty((5, 0), np.int64), *parts], axis=1)
        return Writes(*table)

    def _rows(self, group: GroupId, here: PageIds, peer: "PagePlaces", there: PageIds) -> Indices:
        """int64 [5, parts x pages], a part after the other, so that neighbours may be joined."""
        ours, theirs = np.flatnonzero(self.group == group), np.flatnonzero(peer.group == group)
        count = len(here)
        return np.stack(
            [
                np.repeat(self.region[ours], count),
                _offsets(self, ours, here),
                np.repeat(peer.region[theirs], count),
                _offsets(peer, theirs, there),
                np.repeat(self.size[ours], count),
            ]
        )


def _offsets(places: PagePlaces, rows: Indices, pages: PageIds) -> Indices:
    found = places.base[rows, None] + places.stride[rows, None] * pages.astype(np.int64)
    return found.ravel()


Row = tuple[int, int, int, int, int, int]


def _places(rows: Iterator[Row]) -> PagePlaces:
    table = np.array(list(rows), np.int64).reshape(-1, 6)
    return PagePlaces(*(table[:, at].copy() for at in range(6)))


def device_places(spec: CacheSpec, pools: DevicePages) -> tuple[list[Memory], PagePlaces]:
    """Regions of a device that the CPU can address, each layer of each buffer one."""
    regions: list[Memory] = []

    def rows() -> Iterator[Row]:
        for group in spec.groups:
            for buffer in group.buffers:
                for layer in range(len(buffer.layers)):
                    pages = pools.layer_pages(group.id, buffer.name, layer)
                    count, size = pages.shape
                    stride = pages.strides[0]
                    length = (count - 1) * stride + size if count else 0
                    regions.append(np.lib.stride_tricks.as_strided(pages, (length,), (1,)))
                    yield group.id, len(regions) - 1, 0, stride, size, count

    places = _places(rows())
    return regions, places


def host_places(
    spec: CacheSpec, arenas: Sequence[HostArena], first: int = 0
) -> tuple[list[Memory], PagePlaces]:
    """Regions of the host tier, each group's arena one; they are counted from ``first`` on."""

    def rows() -> Iterator[Row]:
        for at, (group, arena) in enumerate(zip(spec.groups, arenas, strict=True), first):
            stride = arena.layout.stride_bytes
            for part in arena.layout.segments:
                yield group.id, at, part.offset_bytes, stride, part.bytes, arena.pages

    return [arena.bytes.reshape(-1) for arena in arenas], _places(rows())


def pages_of(group: GroupId, first: int, pages: Sequence[int]) -> GroupPages:
    """As a message has them."""
    return GroupPages(group, first, np.array(pages, np.int32))

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
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.spec.retention import needed
from stratakv.tree.nodes import TIERS, Tier

_LARGEST: Final = 2**61
"""What no offset of any memory comes to. Three of them are an int64."""


@dataclass(frozen=True, slots=True, eq=False)
class PagePlaces:
    """One row for each layer of each buffer of each group on a ``tier``, in the spec's order:
    ``size`` bytes of page p are at ``base + p * stride`` of region ``region``, for p below
    ``pages``. A group without buffers has no row. int64 [n] each."""

    tier: Indices
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
        ends = places.base + places.size
        if (places.stride > (_LARGEST * 2 - ends) // np.maximum(places.pages, 1)).any():
            raise TransportError("the peer's page layout has a page that no memory holds")
        return places

    def refusal(self, peer: "PagePlaces") -> str:
        """Why pages of one side are not pages of the other, with both values; "": they are."""
        ours, theirs = self.parts(), peer.parts()
        for tier in TIERS:  # one format of a page, wherever it lies
            found = theirs | peer.parts(tier)
            if ours != found:
                return f"bytes of a page's parts, by group, are {ours} here and {found} there"
        return ""

    def parts(self, *tiers: Tier) -> dict[int, list[int]]:
        """Bytes of each part of a page, by group, on the first of ``tiers`` where it has any."""
        parts: dict[int, list[int]] = {}
        for tier in tiers or TIERS:
            on_tier: dict[int, list[int]] = {}
            here = self.tier == tier
            sizes = zip(self.group[here].tolist(), self.size[here].tolist(), strict=True)
            for group, size in sizes:
                on_tier.setdefault(group, []).append(size)
            parts = on_tier | parts
        return parts

    def beside(self, other: "PagePlaces") -> "PagePlaces":
        """These and those of ``other``."""
        return PagePlaces(
            *(
                np.concatenate((getattr(self, each.name), getattr(other, each.name)))
                for each in fields(PagePlaces)
            )
        )

    def verify(self, pages: TransferPages, spec: CacheSpec) -> None:
        """TransportError where a peer with these places asks for other ``pages`` than somebody with
        ``spec`` may want, or for some that it does not have."""
        asked = {group.id: list[GroupPages]() for group in spec.groups}
        for one in pages.groups:
            asked.setdefault(one.group, []).append(one)
        allowed = ([Tier.DEVICE], [Tier.HOST, Tier.DEVICE])
        in_order = [one.group for one in pages.groups] == sorted(one.group for one in pages.groups)
        there = all([one.tier for one in some] in allowed for some in asked.values())
        if len(asked) != len(spec.groups) or not in_order or not there:
            raise TransportError("the peer names pages of other groups")
        for group in spec.groups:
            span = needed(group.retention, pages.tokens, spec.page_tokens)
            self._verify_span(asked[group.id], group, span, pages.tokens)
            for one in asked[group.id]:
                self._verify_pages(one, group)

    def _verify_span(
        self, asked: Sequence[GroupPages], group: CacheGroup, span: range, tokens: int
    ) -> None:
        """Whether ``asked`` is the end of what is needed, without a hole."""
        first, count = asked[0].first, sum(len(one.pages) for one in asked)
        last = len(span) if group.stateful else span.stop - first
        wanted = (first == NONE) if group.stateful else first >= span.start
        if len(asked) > 1:
            wanted &= not group.stateful and asked[1].first == first + len(asked[0].pages)
        if not wanted or count != last:
            raise TransportError(
                f"the peer asks for {count} pages from {first} on of group {group.name}; "
                f"{tokens} tokens need {span}"
            )

    def _verify_pages(self, asked: GroupPages, group: CacheGroup) -> None:
        """Whether the peer has the pages that it names."""
        room = self.pages[(self.group == group.id) & (self.tier == asked.tier)]
        none = asked.tier == Tier.HOST and not len(room)
        beyond = len(room) and len(asked.pages) and int(asked.pages.max()) >= int(room.min())
        if none or beyond:
            raise TransportError(f"the peer names pages of group {group.name} it has not")
        if (asked.pages < 0).any() or len(np.unique(asked.pages)) != len(asked.pages):
            raise TransportError(f"the peer names a page of group {group.name} twice, or none")

    def writes(self, source: TransferPages, peer: "PagePlaces", target: TransferPages) -> Writes:
        """What takes the pages of ``source`` that ``target`` wants to ``target``, which are of the
        same tokens. AssertionError where ``source`` lacks one."""
        assert not self.refusal(peer), "pages of another layout"
        parts = [self._rows(here, peer, there) for here, there in source.paired(target)]
        table = np.concatenate([np.empty((5, 0), np.int64), *parts], axis=1)
        return Writes(*table)

    def _rows(self, here: GroupPages, peer: "PagePlaces", there: GroupPages) -> Indices:
        """int64 [5, parts x pages], a part after the other, so that neighbours may be joined."""
        ours = np.flatnonzero((self.group == here.group) & (self.tier == here.tier))
        theirs = np.flatnonzero((peer.group == there.group) & (peer.tier == there.tier))
        count = len(here.pages)
        return np.stack(
            [
                np.repeat(self.region[ours], count),
                _offsets(self, ours, here.pages),
                np.repeat(peer.region[theirs], count),
                _offsets(peer, theirs, there.pages),
                np.repeat(self.size[ours], count),
            ]
        )


def _offsets(places: PagePlaces, rows: Indices, pages: PageIds) -> Indices:
    found = places.base[rows, None] + places.stride[rows, None] * pages.astype(np.int64)
    return found.ravel()


Row = tuple[int, int, int, int, int, int, int]


def _places(rows: Iterator[Row]) -> PagePlaces:
    table = np.array(list(rows), np.int64).reshape(-1, 7)
    return PagePlaces(*(table[:, at].copy() for at in range(7)))


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
                    yield Tier.DEVICE, group.id, len(regions) - 1, 0, stride, size, count

    places = _places(rows())
    return regions, places


def host_places(arenas: Sequence[HostArena], first: int = 0) -> tuple[list[Memory], PagePlaces]:
    """Regions of ``arenas``, each one; they are counted from ``first`` on."""

    def rows() -> Iterator[Row]:
        for at, arena in enumerate(arenas, first):
            stride = arena.layout.stride_bytes
            for part in arena.layout.segments:
                size = part.bytes
                yield Tier.HOST, arena.group.id, at, part.offset_bytes, stride, size, arena.pages

    return [arena.bytes.reshape(-1) for arena in arenas], _places(rows())


def places_of(
    spec: CacheSpec, pools: DevicePages, arenas: Sequence[HostArena]
) -> tuple[list[Memory], PagePlaces]:
    """All that peers write to or read: the device tier, and of groups that have their home on the
    host, whose pages need not be on the device, their host tier."""
    regions, places = device_places(spec, pools)
    home = [arenas[group.id] for group in spec.groups if group.at_home_on_host]
    more, beside = host_places(home, len(regions))
    return [*regions, *more], places.beside(beside)


def pages_of(
    group: GroupId, first: int, pages: Sequence[int], tier: int = Tier.DEVICE
) -> GroupPages:
    """As a message has them. ValueError for a ``tier`` that is none."""
    return GroupPages(group, first, np.array(pages, np.int32), Tier(tier))

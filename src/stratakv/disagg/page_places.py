"""Where pages lie in registered memory, and the writes that take pages of one side to the other.

Owns the map from (group, page) to bytes of a region, and the pairing: by group and page index,
never by where either side has put a page. Must not know requests. A peer's places come from another
machine: nothing of them is believed before it was checked.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Final, TypeAlias

import numpy as np

from stratakv.cache.footprint import GroupPages, TransferPages
from stratakv.core.errors import TransportError
from stratakv.core.ids import NONE, GroupId, PageIds
from stratakv.disagg.handshake import ALL, SideRank
from stratakv.disagg.transport import Indices, Memory, Writes
from stratakv.memory.device_pools import DevicePages
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.spec.retention import handed_over
from stratakv.spec.sharding import row_slices
from stratakv.tree.nodes import TIERS, Tier

_OFFSETS, _PEER_OFFSETS = 1, 3
"""Among the columns of ``Writes``."""
_LARGEST: Final = 2**61
"""What no offset of any memory comes to. Three of them are an int64."""


@dataclass(frozen=True, slots=True, eq=False)
class PagePlaces:
    """One row for each layer of each buffer of each group on a ``tier``, in the spec's order:
    ``size`` bytes of page p are at ``base + p * stride`` of region ``region``, for p below
    ``pages``: ``pieces`` equal ones, of which each begins ``step`` after the one before. A group
    without buffers has no row, and one that another rank of this side receives. int64 [n] each."""

    tier: Indices
    group: Indices
    region: Indices
    base: Indices
    stride: Indices
    size: Indices
    pages: Indices
    pieces: Indices
    step: Indices

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
        if (places.pieces < 1).any() or (places.size % np.maximum(places.pieces, 1)).any():
            raise TransportError("the peer's page layout has pieces that are no parts of a page")
        if (places.step > _LARGEST // places.pieces).any():
            raise TransportError("the peer's page layout has a piece that no memory holds")
        ends = places.base + np.maximum(places.size, places.step * places.pieces)
        if (places.stride > (_LARGEST * 2 - ends) // np.maximum(places.pages, 1)).any():
            raise TransportError("the peer's page layout has a page that no memory holds")
        return places

    def refusal(self, peer: "PagePlaces", one_sided: Container[int] = ()) -> str:
        """Why pages of one side are not pages of the other, with both values; "": they are.
        ``one_sided``: groups that one of the two may leave out."""
        ours, theirs = self.parts(), peer.parts()
        out = {group for group in ours.keys() ^ theirs.keys() if group in one_sided}
        ours = {group: sizes for group, sizes in ours.items() if group not in out}
        for tier in TIERS:  # one format of a page, wherever it lies
            every = theirs | peer.parts(tier)
            found = {group: sizes for group, sizes in every.items() if group not in out}
            if ours != found:
                return f"bytes of a page's parts, by group, are {ours} here and {found} there"
        for group, (mine, other) in product(ours, product(TIERS, TIERS)):
            here, there = self.pieces[self.of(group, mine)], peer.pieces[peer.of(group, other)]
            if not (len(here) and len(there)):
                continue
            if ((here != there) & (here > 1) & (there > 1)).any():
                return (
                    f"pieces of a page's parts of group {group} are {here.tolist()} here and "
                    f"{there.tolist()} there"
                )
        return ""

    def of(self, group: int, tier: Tier) -> Indices:
        """The rows of a group's pages there."""
        return np.flatnonzero((self.group == group) & (self.tier == tier))

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
            span = handed_over(group.retention, pages.tokens, spec.page_tokens)
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
        here = bool((self.group == group.id).any())  # else another of its ranks receives them
        none = asked.tier == Tier.HOST and here and not len(room)
        beyond = len(room) and len(asked.pages) and int(asked.pages.max()) >= int(room.min())
        if none or beyond:
            raise TransportError(f"the peer names pages of group {group.name} it has not")
        if (asked.pages < 0).any() or len(np.unique(asked.pages)) != len(asked.pages):
            raise TransportError(f"the peer names a page of group {group.name} twice, or none")

    def paired(self, peer: "PagePlaces") -> "PairedPlaces":
        """With a peer's that are of the same layout."""
        every = {*self.parts(), *peer.parts()}
        assert not self.refusal(peer, every), "pages of another layout"
        ways = product(every, TIERS, TIERS)
        return PairedPlaces(
            peer, {way: found for way in ways if (found := _pieces(self, peer, *way))}
        )


TierRoute: TypeAlias = tuple[int, Tier, Tier]
"""A group, and the tiers from which and to which its pages go."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Every piece of a page of one group that both sides have on a tier, as ``Writes`` has its
    columns: those of page 0, and what comes to each with the next page here, or there. int64
    [5, n, 1]."""

    first: Indices
    stride: Indices

    @property
    def count(self) -> int:
        return self.first.shape[1]

    def write(self, here: PageIds, there: PageIds, found: Indices) -> None:
        """Into ``found`` [5, n * pages], pages innermost."""
        pages = np.zeros((5, 1, len(here)), np.int64)
        pages[_OFFSETS], pages[_PEER_OFFSETS] = here, there
        pages = self.stride * pages
        pages += self.first
        found[:] = pages.reshape(5, -1)


@dataclass(frozen=True, slots=True, eq=False)
class PairedPlaces:
    """Of this side and of one peer, whose ``places`` are kept: what does not depend on a request is
    worked out once."""

    places: PagePlaces
    _ways: Mapping[TierRoute, _Pieces]

    def writes(self, source: TransferPages, target: TransferPages) -> Writes:
        """What takes the pages of ``source`` that ``target`` wants to ``target``, which are of the
        same tokens; nothing of a group that one side leaves out. Pages innermost, so that
        neighbours may be joined. AssertionError where ``source`` lacks a page."""
        found = [
            (pieces, here.pages, there.pages)
            for here, there in source.paired(target)
            if (pieces := self._ways.get((here.group, here.tier, there.tier))) is not None
        ]
        columns = np.empty((5, sum(each.count * len(here) for each, here, _ in found)), np.int64)
        at = 0
        for pieces, here, there in found:
            part = slice(at, at + pieces.count * len(here))
            pieces.write(here, there, columns[:, part])
            at = part.stop
        return Writes(*columns)


def _pieces(
    here: PagePlaces, there: PagePlaces, group: int, tier: Tier, peer_tier: Tier
) -> _Pieces | None:
    """None where one of the two has no pages there."""
    ours, theirs = here.of(group, tier), there.of(group, peer_tier)
    if not (len(ours) and len(theirs)):
        return None
    count = np.maximum(here.pieces[ours], there.pieces[theirs])
    part = np.repeat(np.arange(len(ours)), count)
    piece = np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count)
    size = (here.size[ours] // count)[part]
    first = (
        here.region[ours[part]], _bases(here, ours[part], piece, size),
        there.region[theirs[part]], _bases(there, theirs[part], piece, size), size,
    )  # fmt: skip
    stride = np.zeros((5, len(part)), np.int64)
    stride[_OFFSETS], stride[_PEER_OFFSETS] = here.stride[ours[part]], there.stride[theirs[part]]
    return _Pieces(np.stack(first)[:, :, None], stride[:, :, None])


def _bases(places: PagePlaces, rows: Indices, piece: Indices, size: Indices) -> Indices:
    """Where piece ``piece[i]`` of row ``rows[i]`` lies in page 0."""
    step = np.where(places.pieces[rows] > 1, places.step[rows], size)
    return places.base[rows] + piece * step


Row = tuple[int, int, int, int, int, int, int, int, int]


def _places(rows: Iterator[Row]) -> PagePlaces:
    width = len(fields(PagePlaces))
    table = np.array(list(rows), np.int64).reshape(-1, width)
    return PagePlaces(*(table[:, at].copy() for at in range(width)))


def device_places(
    spec: CacheSpec, pools: DevicePages, share: SideRank = ALL
) -> tuple[list[Memory], PagePlaces]:
    """Regions of a device that the CPU can address, each layer of each buffer one, and where in
    them ``share`` lies."""
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
                    if group.id in share.left_out:
                        continue
                    cut, at = share.cut(group.id), len(regions) - 1
                    part = row_slices(buffer, cut.index, cut.count)
                    place = group.id, at, part.offset_bytes, stride, part.count * part.bytes
                    yield Tier.DEVICE, *place, count, part.count, part.stride_bytes

    places = _places(rows())
    return regions, places


def host_places(arenas: Sequence[HostArena], first: int = 0) -> tuple[list[Memory], PagePlaces]:
    """Regions of ``arenas``, each one; they are counted from ``first`` on."""

    def rows() -> Iterator[Row]:
        for at, arena in enumerate(arenas, first):
            stride = arena.layout.stride_bytes
            for part in arena.layout.segments:
                place = arena.group.id, at, part.offset_bytes, stride, part.bytes
                yield Tier.HOST, *place, arena.pages, 1, part.bytes

    return [arena.bytes.reshape(-1) for arena in arenas], _places(rows())


def places_of(
    spec: CacheSpec, pools: DevicePages, arenas: Sequence[HostArena], share: SideRank = ALL
) -> tuple[list[Memory], PagePlaces]:
    """All of ``share`` that peers write to or read: the device tier, and of groups that have their
    home on the host, whose pages need not be on the device, their host tier."""
    regions, places = device_places(spec, pools, share)
    home = [group.id for group in spec.groups if group.at_home_on_host]
    assert all(share.cut(group).count == 1 for group in home), "rows that are chosen are all heads'"
    home = [arenas[group] for group in home if group not in share.left_out]
    more, beside = host_places(home, len(regions))
    return [*regions, *more], places.beside(beside)


def pages_of(
    group: GroupId, first: int, pages: Sequence[int], tier: int = Tier.DEVICE
) -> GroupPages:
    """As a message has them. ValueError for a ``tier`` that is none."""
    return GroupPages(group, first, np.array(pages, np.int32), Tier(tier))

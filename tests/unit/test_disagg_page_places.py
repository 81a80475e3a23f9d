"""Every byte of every page that is wanted goes where the other side has put that page, and no other
byte moves: other page numbers, other strides, live pages, groups without pages or bytes.
"""

from dataclasses import replace

import numpy as np
import pytest

from stratakv.cache.footprint import TransferPages
from stratakv.core.errors import TransportError
from stratakv.core.ids import NONE, GroupId, LayerId
from stratakv.disagg.page_places import PagePlaces, device_places, host_places, pages_of
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.memory.mapped import POISON
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepWindow
from stratakv.tree.nodes import Tier

PAGE = 4


def buffer(name, layers, rows, width):
    return BufferSpec(
        name=name,
        layers=tuple(map(LayerId, layers)),
        rows_per_page=rows,
        row_shape=(width,),
        dtype="float32",
    )


def group(number, name, rule, *buffers):
    return CacheGroup(id=GroupId(number), name=name, retention=rule, buffers=buffers)


SPEC = CacheSpec(
    page_tokens=PAGE,
    groups=(
        group(0, "full", KeepAll(), buffer("key", [0, 3], PAGE, 3), buffer("value", [0, 3], 1, 5)),
        group(1, "window", KeepWindow(6), buffer("key", [1], PAGE, 2)),
        group(2, "state", KeepBoundary(), buffer("conv", [2], 1, 7)),
        group(3, "empty", KeepAll()),
    ),
)
COUNTS = (9, 6, 3, 9)


class StridedPools:
    """A foreign engine's: pages of a layer lie apart, in no common memory."""

    def __init__(self, spec, pages):
        self.pages, self.spec = pages, spec
        self._layers = {
            (each.id, one.name, layer): np.full(
                (pages[each.id], one.layer_bytes + 13), POISON, "u1"
            )
            for each in spec.groups
            for one in each.buffers
            for layer in range(len(one.layers))
        }

    def layer_pages(self, group, buffer_name, layer):
        found = self._layers[group, buffer_name, layer]
        return found[:, : found.shape[1] - 13]


class ArenaPages:
    """Host pages, seen as a device's are."""

    def __init__(self, spec, pages):
        self.arenas = [HostArena(each, n) for each, n in zip(spec.groups, pages, strict=True)]
        self._spec = spec
        for arena in self.arenas:
            arena.bytes[:] = POISON

    def layer_pages(self, group, buffer_name, layer):
        arena, names = self.arenas[group], [b.name for b in self._spec.groups[group].buffers]
        at = next(
            one
            for one in arena.layout.segments
            if (one.buffer, one.layer) == (names.index(buffer_name), layer)
        )
        return arena.bytes[:, at.offset_bytes : at.offset_bytes + at.bytes]


def opened(kind, pages=COUNTS):
    if kind == "host":
        ends = ArenaPages(SPEC, pages)
        return ends, *host_places(ends.arenas)
    ends = (DevicePools if kind == "device" else StridedPools)(SPEC, pages)
    for layer in layers_of(ends).values():
        layer[:] = POISON
    return ends, *device_places(SPEC, ends)


def layers_of(ends):
    return {
        (each.id, one.name, layer): ends.layer_pages(each.id, one.name, layer)
        for each in SPEC.groups
        for one in each.buffers
        for layer in range(len(one.layers))
    }


def on(kind, pages):
    """The same pages, where an end of that kind has them."""
    tier = Tier.HOST if kind == "host" else Tier.DEVICE
    groups = tuple(replace(each, tier=tier) for each in pages.groups)
    return replace(pages, groups=groups)


def asked(tokens, *groups):
    return TransferPages(
        tokens, tuple(pages_of(GroupId(at), *each) for at, each in enumerate(groups))
    )


SOURCE = asked(19, (0, [7, 1, 8, 2, 5]), (3, [4, 0]), (NONE, [2]), (0, [0, 1, 2, 3, 4]))
TARGET = asked(19, (2, [0, 6, 3]), (3, [1, 5]), (NONE, [0]), (2, [8, 7, 6]))


def move(memories, writes, peer_memories):
    columns = (writes.regions, writes.offsets, writes.peer_regions, writes.peer_offsets)
    for region, at, to_region, to, size in zip(
        *(each.tolist() for each in (*columns, writes.sizes)), strict=True
    ):
        peer_memories[to_region][to : to + size] = memories[region][at : at + size]


KINDS = ["device", "strided", "host"]


@pytest.mark.parametrize("there", KINDS)
@pytest.mark.parametrize("here", KINDS)
def test_every_wanted_page_arrives_and_no_other_byte_changes(here, there):
    rng = np.random.default_rng(1)
    source, memories, ours = opened(here)
    target, peer_memories, theirs = opened(there, (12, 7, 4, 12))
    for layer in layers_of(source).values():
        layer[:] = rng.integers(0, 255, layer.shape)
    writes = ours.paired(theirs).writes(on(here, SOURCE), on(there, TARGET))
    move(memories, writes, peer_memories)
    wanted = {0: {0: 8, 6: 2, 3: 5}, 1: {1: 4, 5: 0}, 2: {0: 2}}
    filled = layers_of(source)
    for (at, name, layer), found in layers_of(target).items():
        right = np.full(found.shape, POISON, np.uint8)
        for to, page in wanted[at].items():
            right[to] = filled[at, name, layer][page]
        np.testing.assert_array_equal(found, right)


def test_what_was_not_of_the_pages_stays():
    """Between pages, and behind them."""
    source, memories, ours = opened("device")
    target, peer_memories, theirs = opened("strided")
    for layer in layers_of(source).values():
        layer[:] = 1
    move(memories, ours.paired(theirs).writes(SOURCE, TARGET), peer_memories)
    assert all((layer[:, -13:] == POISON).all() for layer in target._layers.values())


def test_nothing_wanted_is_no_write():
    _, _, places = opened("device")
    none = asked(19, (5, []), (5, []), (NONE, []), (5, []))
    assert not len(places.paired(places).writes(SOURCE, none).sizes)


def test_writes_of_neighbours_are_neighbours():
    _, _, places = opened("device")
    source = asked(8, (0, [3, 4]), (0, []), (NONE, []), (0, []))
    writes = places.paired(places).writes(
        source, asked(8, (0, [5, 6]), (0, []), (NONE, []), (0, []))
    )
    assert writes.sizes.tolist() == [48, 48, 48, 48, 20, 20, 20, 20]
    assert writes.regions.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert writes.offsets.tolist() == [144, 192, 144, 192, 60, 80, 60, 80]
    assert writes.peer_offsets.tolist() == [240, 288, 240, 288, 100, 120, 100, 120]


def test_what_is_not_here_cannot_be_sent():
    _, _, places = opened("device")
    short = asked(19, (3, [2, 5]), (3, [4, 0]), (NONE, [2]), (0, [0, 1, 2, 3, 4]))
    with pytest.raises(AssertionError, match="pages from 2 on, not 3"):
        places.paired(places).writes(short, TARGET)


def test_another_layout_is_refused_with_both_values():
    wide = group(1, "window", KeepWindow(6), buffer("key", [1], PAGE, 3))
    other = replace(SPEC, groups=(SPEC.groups[0], wide, *SPEC.groups[2:]))
    _, _, ours = opened("device")
    _, theirs = device_places(other, DevicePools(other, COUNTS))
    refusal = ours.refusal(theirs)
    assert "1: [32]" in refusal
    assert "1: [48]" in refusal
    assert not ours.refusal(opened("host")[2])
    with pytest.raises(AssertionError, match="another layout"):
        ours.paired(theirs).writes(SOURCE, TARGET)


def test_what_travels_is_read_again():
    _, _, places = opened("strided")
    again = PagePlaces.of_columns(places.columns())
    assert again.columns() == places.columns()


@pytest.mark.parametrize(
    "change",
    [
        {"base": None},
        {"base": [1]},
        {"size": "x"},
        {"region": [-1] * 6},
        {"stride": [2**63] * 6},
        {"stride": [2**61] * 6, "pages": [2**61] * 6},
        {"stride": [2**60] * 6},
    ],
)
def test_a_layout_that_is_none_is_refused(change):
    _, _, places = opened("device")
    with pytest.raises(TransportError, match="page layout"):
        PagePlaces.of_columns({**places.columns(), **change})


WRONG = {
    "another group": TransferPages(19, TARGET.groups[:3]),
    "too early": asked(19, (2, [0, 6, 3]), (1, [1, 5, 0, 2]), (NONE, [0]), (2, [8, 7, 6])),
    "too few": asked(19, (2, [0, 6]), (3, [1, 5]), (NONE, [0]), (2, [8, 7, 6])),
    "no state": asked(19, (2, [0, 6, 3]), (3, [1, 5]), (NONE, []), (2, [8, 7, 6])),
    "tokens for a state": asked(19, (2, [0, 6, 3]), (3, [1, 5]), (0, [0]), (2, [8, 7, 6])),
    "beyond its pool": asked(19, (2, [0, 9, 3]), (3, [1, 5]), (NONE, [0]), (2, [8, 7, 6])),
    "twice": asked(19, (2, [3, 6, 3]), (3, [1, 5]), (NONE, [0]), (2, [8, 7, 6])),
    "no page": asked(19, (2, [-1, 6, 3]), (3, [1, 5]), (NONE, [0]), (2, [8, 7, 6])),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_peer_that_asks_for_what_nobody_may_want_is_refused(wrong):
    _, _, places = opened("device")
    places.verify(TARGET, SPEC)
    again = asked(19, (2, [0, 6, 3]), (2, [1, 5, 0]), (NONE, [0]), (2, [8, 7, 6]))
    places.verify(again, SPEC)  # what the same prompt can hit
    with pytest.raises(TransportError, match="the peer"):
        places.verify(wrong, SPEC)

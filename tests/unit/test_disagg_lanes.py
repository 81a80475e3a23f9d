"""Where two sides have other numbers of ranks, each rank gets the heads that are its own, and what
all have alike once: byte by byte, both ways, and refused where pages are no whole slices."""

from dataclasses import replace

import numpy as np
import pytest

from stratakv.cache.footprint import TransferPages
from stratakv.core.errors import ConfigError, TransportError
from stratakv.core.ids import NONE, GroupId, LayerId
from stratakv.disagg.handshake import ALL, SideRank
from stratakv.disagg.lanes import shares
from stratakv.disagg.page_places import PagePlaces, device_places, pages_of
from stratakv.memory.device_pools import DevicePools
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepBoundary
from stratakv.spec.sharding import Sharding

PAGE, HEADS = 4, 4


def buffer(name, layers, shape, rows=PAGE):
    ids = tuple(map(LayerId, layers))
    return BufferSpec(name=name, layers=ids, rows_per_page=rows, row_shape=shape, dtype="float32")


FULL = CacheGroup(
    id=GroupId(0), name="full", retention=KeepAll(),
    buffers=(buffer("key", [0, 2], (HEADS, 3)), buffer("value", [0, 2], (HEADS, 5))),
)  # fmt: skip
STATE = CacheGroup(
    id=GroupId(1), name="state", retention=KeepBoundary(), buffers=(buffer("s", [1], (7,), 1),)
)
WHOLE = CacheSpec(page_tokens=PAGE, groups=(FULL, STATE))


def sharding(ranks, split=True):
    return Sharding(whole=WHOLE, ranks=ranks, heads=(HEADS, 1), split=split and ranks > 1)


def asked(pages, state):
    return TransferPages(8, (pages_of(GroupId(0), 0, pages), pages_of(GroupId(1), NONE, [state])))


SOURCE, TARGET = asked([3, 1], 2), asked([0, 4], 1)


class Side:
    """Every rank's pools, filled by their heads' numbers, or empty; and its lanes."""

    def __init__(self, ranks, lanes, *, receives, seed=None):
        self.own = sharding(ranks)
        self.pools = [DevicePools(self.own.spec, (6, 6)) for _ in range(ranks)]
        whole = None if seed is None else self.numbers(seed)
        self.lanes = []
        for rank, pools in enumerate(self.pools):
            for (group, name, layer), rows in self.layers(rank).items():
                rows[:] = 0
                if whole is not None:
                    all_heads = whole[group, name, layer]
                    mine = HEADS // ranks if self.own.splits(group) else all_heads.shape[2]
                    first = rank * mine if self.own.splits(group) else 0
                    rows[:] = all_heads[:, :, first : first + mine]
            for share in shares(self.own, sharding(lanes), rank, receives=receives):
                self.lanes.append((share, *device_places(self.own.spec, pools, share)))

    @staticmethod
    def numbers(seed):
        rng = np.random.default_rng(seed)
        return {
            (group.id, one.name, layer): rng.random((6, one.rows_per_page, *one.row_shape), "f4")
            for group in WHOLE.groups
            for one in group.buffers
            for layer in range(len(one.layers))
        }

    def layers(self, rank):
        return {
            (group.id, one.name, layer): self.pools[rank]
            .layer_pages(group.id, one.name, layer)
            .view("f4")
            .reshape(6, one.rows_per_page, *one.row_shape)
            for group in self.own.spec.groups
            for one in group.buffers
            for layer in range(len(one.layers))
        }


def hand_over(source, target):
    """How many bytes went, by group of one page."""
    moved = 0
    for (_, memories, ours), (_, there, theirs) in zip(source.lanes, target.lanes, strict=True):
        assert not ours.refusal(theirs, {1})
        writes = ours.paired(theirs).writes(SOURCE, TARGET)
        columns = (writes.regions, writes.offsets, writes.peer_regions, writes.peer_offsets)
        for region, at, to_region, to, size in zip(
            *(each.tolist() for each in (*columns, writes.sizes)), strict=True
        ):
            there[to_region][to : to + size] = memories[region][at : at + size]
            moved += size
    return moved


@pytest.mark.parametrize(("here", "there"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 4), (4, 2)])
def test_every_rank_gets_its_own_heads_and_no_other_byte_changes(here, there):
    lanes = max(here, there)
    source = Side(here, lanes, receives=False, seed=1)
    target = Side(there, lanes, receives=True)
    moved = hand_over(source, target)
    right, pages = source.numbers(1), {0: {0: 3, 4: 1}, 1: {1: 2}}
    for rank in range(there):
        for (group, name, layer), found in target.layers(rank).items():
            whole = right[group, name, layer]
            count = found.shape[2]
            first = rank * count if target.own.splits(group) else 0
            wanted = np.zeros_like(found)
            for to, page in pages[group].items():
                wanted[to] = whole[page, :, first : first + count]
            np.testing.assert_array_equal(found, wanted)
    assert moved == 2 * FULL.page_bytes + there * STATE.page_bytes, "a state once for each rank"


def test_neighbours_among_cut_pages_are_whole_rows():
    """No more ranges than rows: a rank's heads of one token are one piece."""
    source = Side(1, 2, receives=False, seed=1)
    target = Side(2, 2, receives=True)
    writes = source.lanes[1][2].paired(target.lanes[1][2]).writes(SOURCE, TARGET)
    assert len(writes.sizes) == 2 * 4 * PAGE + 1
    assert sorted(set(writes.sizes.tolist())) == [2 * 3 * 4, 7 * 4, 2 * 5 * 4]


def test_heads_of_the_wrong_rank_are_seen():
    """Seeded: the check above is worth something."""
    source = Side(1, 2, receives=False, seed=1)
    target = Side(2, 2, receives=True)
    source.lanes.reverse()
    hand_over(source, target)
    key = target.layers(0)[0, "key", 0]
    assert not np.array_equal(key[0], source.numbers(1)[0, "key", 0][3, :, :2])


def test_ranks_that_do_not_split_as_the_others_do_are_refused():
    uneven = replace(sharding(4), split=False)
    with pytest.raises(ConfigError, match=r"--peer-tp 4: with --tp 2 group 'full'.*allowed"):
        shares(sharding(2), uneven, 0, receives=True)
    found = shares(sharding(1), replace(sharding(2), split=False), 0, receives=True)
    assert [share.left_out for share in found] == [frozenset(), {0, 1}]
    assert [share.cut(GroupId(0)).count for share in found] == [1, 1]


def test_a_group_is_left_out_only_where_another_rank_has_it():
    _, ours = device_places(WHOLE, DevicePools(WHOLE, (6, 6)))
    lacking = SideRank(1, 2, left_out=frozenset({GroupId(1)}))
    _, theirs = device_places(WHOLE, DevicePools(WHOLE, (6, 6)), lacking)
    assert "1: [28]" in ours.refusal(theirs)
    assert "1: [28]" in theirs.refusal(ours)
    assert not ours.refusal(theirs, {1})
    assert ALL.cut(GroupId(1)).count == 1


def test_pieces_that_do_not_fit_are_refused():
    _, _, ours = Side(1, 2, receives=False).lanes[0]
    _, _, others = Side(1, 4, receives=False).lanes[0]
    halves = PagePlaces.of_columns({**ours.columns(), "pieces": [2] * 5})
    assert "pieces of a page's parts of group 0 are" in ours.refusal(halves)
    assert "bytes of a page's parts" in ours.refusal(others)
    for wrong in (0, 5):
        with pytest.raises(TransportError, match="pieces that are no parts"):
            PagePlaces.of_columns({**ours.columns(), "pieces": [wrong] * 5})
    with pytest.raises(TransportError, match="a piece that no memory holds"):
        PagePlaces.of_columns({**ours.columns(), "step": [2**61] * 5})

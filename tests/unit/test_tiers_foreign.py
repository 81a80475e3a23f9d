"""Another engine's device pages over our host tier: it names them, and has laid them out itself."""

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from stratakv.core.ids import NONE, GroupId, LayerId
from stratakv.core.page_keys import Namespace, page_keys
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.foreign_pages import ForeignPages, Place
from stratakv.memory.host_arena import HostArena
from stratakv.sim.instant_transfer import InstantTransfer
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepWindow
from stratakv.tiers.tiered_cache import TieredCache, TierOptions
from stratakv.transfer.cpu import DEFAULT_COPIER, CpuTransferEngine
from stratakv.transfer.numpy_copy import NumpyCopier
from stratakv.tree.check import check
from stratakv.tree.nodes import Tier

PAGE = 2
DEVICE_PAGES = 12
GAP = 0xEE
"""What lies between an engine's pages is its own."""


def spec_of(*rules):
    groups = [
        CacheGroup(
            id=GroupId(at),
            name=f"g{at}",
            retention=rule,
            buffers=tuple(
                BufferSpec(
                    name=name, layers=layers, rows_per_page=PAGE, row_shape=(size,), dtype="uint8"
                )
                for name, size in (("k", 3), ("v", 5))
            ),
        )
        for at, rule, layers in zip(
            range(3), (KeepAll(), *rules), ((LayerId(0), LayerId(2)), (LayerId(1),)), strict=False
        )
    ]
    return CacheSpec(page_tokens=PAGE, groups=tuple(groups))


class Foreign:
    """An engine with pools of its own: every layer of every buffer lies apart, its pages further
    from each other than they are long, by another distance each."""

    def __init__(self, spec, host=8, copier=DEFAULT_COPIER):
        self.spec = spec
        self.memory, places = {}, {}
        for group in spec.groups:
            for buffer in group.buffers:
                for layer in range(len(buffer.layers)):
                    where = (group.id, buffer.name, layer)
                    stride = buffer.layer_bytes + 7 * (1 + len(self.memory))
                    self.memory[where] = np.full((DEVICE_PAGES, stride), GAP, np.uint8)
                    places[where] = Place(self.memory[where].ctypes.data, stride)
        self.sizes = {
            (group.id, buffer.name): buffer.layer_bytes
            for group in spec.groups
            for buffer in group.buffers
        }
        pools = ForeignPages(spec, [DEVICE_PAGES] * len(spec.groups), places)
        arenas = [HostArena(group, host) for group in spec.groups]
        self.engine = CpuTransferEngine(spec, pools, arenas, copier)
        options = TierOptions(foreign_pages=pools.pages)
        none = [PageAllocator(0) for _ in spec.groups]
        self.host = [PageAllocator(host) for _ in spec.groups]
        self.tiers = TieredCache(spec, (none, self.host), self.engine, options, arenas)

    def write(self, group, page, value):
        for (of, name, _), memory in self.memory.items():
            if of == group:
                memory[page, : self.sizes[of, name]] = value

    def read(self, group, page):
        """The one value of a page; everything between pages must be as it was."""
        values = set()
        for (of, name, _), memory in self.memory.items():
            if of == group:
                size = self.sizes[of, name]
                values.update(memory[page, :size].tolist())
                assert (memory[:, size:] == GAP).all(), "bytes between pages were touched"
        (value,) = values
        return value

    def save(self, keys, first, pages):
        return self.tiers.foreign.save_from(keys, first, [np.array(p, np.int32) for p in pages])

    def load(self, hold, pages):
        return self.tiers.foreign.load_into(hold, [np.array(p, np.int32) for p in pages])

    def until_ended(self, tickets):
        while not self.tiers.foreign.ended(tickets):
            assert self.tiers.progress.wait(), "a copy was lost"
        self.tiers.check()

    def serve(self, keys, first, *pages):
        tickets = self.save(keys, first, pages)
        assert tickets
        self.until_ended(tickets)


@contextmanager
def foreign(*rules, **settings):
    it = Foreign(spec_of(*rules), **settings)
    try:
        yield it
        it.tiers.check()
    finally:
        it.engine.close()


def keys_of(prompt, pages):
    tokens = np.full(pages * PAGE, prompt, np.int32)
    return page_keys(tokens, Namespace(model=b"foreign", spec_digest=b""), PAGE)


def test_what_was_saved_from_an_engines_pages_comes_back_into_others_of_its_pages():
    with foreign(KeepWindow(3)) as it:
        keys = keys_of(1, 3)
        for page, value in zip((3, 1, 7), (30, 10, 70), strict=True):
            it.write(0, page, value)
        for page, value in zip((5, 0), (51, 1), strict=True):
            it.write(1, page, value)
        it.serve(keys, 0, (3, 1, 7), (NONE, 5, 0))
        found = it.tiers.match(keys, 3)
        assert (found.device_end, found.end) == (0, 3)
        hold = it.tiers.hold(keys, 3)
        assert (hold.end, hold.starts) == (3, [0, 1])
        tickets = it.load(hold, ((8, 9, 10), (2, 4)))
        it.tiers.release(hold)
        it.until_ended(tickets)
        assert [it.read(0, page) for page in (8, 9, 10)] == [30, 10, 70]
        assert [it.read(1, page) for page in (2, 4)] == [51, 1]


def test_a_page_is_in_the_tree_when_its_copy_has_ended_and_not_before():
    with foreign() as it:
        keys = keys_of(1, 2)
        tickets = it.save(keys, 0, ((0, 1),))
        assert it.tiers.match(keys, 2).end == 0
        it.tiers.check()  # its host pages are the save's
        it.until_ended(tickets)
        assert it.tiers.match(keys, 2).end == 2


def test_a_prefix_grows_chunk_by_chunk_and_never_beyond_what_the_host_has():
    with foreign() as it:
        keys = keys_of(1, 4)
        assert it.save(keys, 2, ((2, 3),)) is None
        it.serve(keys[:2], 0, (0, 1))
        it.serve(keys, 2, (2, 3))
        assert it.tiers.match(keys, 4).end == 4


def test_what_a_load_reads_stays_on_the_host_until_it_has_ended():
    with foreign() as it:
        keys = keys_of(1, 2)
        it.serve(keys, 0, (0, 1))
        hold = it.tiers.hold(keys, 2)
        tickets = it.load(hold, ((4, 5),))
        it.tiers.release(hold)
        it.tiers.pools.push_out(Tier.HOST)
        assert it.tiers.match(keys, 2).end == 2
        it.until_ended(tickets)
        it.tiers.pools.push_out(Tier.HOST)
        assert it.tiers.match(keys, 2).end == 0
        assert it.host[0].available() == 8


def test_a_layer_can_be_read_when_its_gate_has_opened():
    with foreign(KeepWindow(3)) as it:
        keys = keys_of(1, 2)
        for group in (0, 1):
            it.write(group, 1, 10 + group)
        it.serve(keys, 0, (0, 1), (NONE, 1))
        hold = it.tiers.hold(keys, 2)
        assert hold.starts == [0, 0]
        tickets = it.load(hold, ((4, 5), (5,)))
        gate = it.tiers.copies.flights.gate(tickets)
        for group, layers in ((1, (1,)), (0, (0, 2))):
            for layer in layers:
                gate.wait(LayerId(layer))
            assert it.read(group, 5) == 10 + group
        it.tiers.release(hold)
        it.until_ended(tickets)


def test_what_a_save_goes_on_from_stays_until_it_has_ended():
    with foreign() as it:
        keys = keys_of(1, 3)
        it.serve(keys[:2], 0, (0, 1))
        tickets = it.save(keys, 2, ((2,),))
        it.tiers.pools.push_out(Tier.HOST)
        it.until_ended(tickets)
        assert it.tiers.match(keys, 3).end == 3


def test_pages_that_the_host_has_already_are_given_back():
    with foreign() as it:
        keys = keys_of(1, 2)
        both = [it.save(keys, 0, (pages,)) for pages in ((0, 1), (2, 3))]
        for tickets in both:
            it.until_ended(tickets)
        assert it.host[0].available() == 6


def test_the_least_used_make_room_and_without_room_nothing_begins():
    with foreign(host=2) as it:
        it.serve(keys_of(1, 2), 0, (0, 1))
        it.serve(keys_of(2, 1), 0, (2,))
        assert it.tiers.match(keys_of(1, 2), 2).end == 1
        hold = it.tiers.hold(keys_of(2, 1), 1)
        assert it.save(keys_of(3, 2), 0, ((3, 4),)) is None
        it.tiers.release(hold)
        assert not it.tiers.progress.busy


@pytest.mark.parametrize("kept", [1, 2])
def test_what_is_needed_at_an_end_that_is_kept_leaves_last(kept):
    with foreign(KeepWindow(3)) as it:
        for prompt in (1, 2):
            keys = keys_of(prompt, 4)
            it.serve(keys, 0, (0, 1, 2, 3), (NONE, NONE, 2, 3))
            if prompt == kept:
                hold = it.tiers.hold(keys, 4)
                it.tiers.keep(hold)
                it.tiers.release(hold)
        window = it.host[1]
        it.tiers.pools.make_room(Tier.HOST, GroupId(1), window.available() + 2)
        ends = [it.tiers.match(keys_of(prompt, 4), 4).end for prompt in (1, 2)]
        assert ends == ([4, 0] if kept == 1 else [0, 4])


class Fails(NumpyCopier):
    def gather(self, route, device, host):
        raise OSError("no")


def test_a_save_that_fails_leaves_nothing():
    with foreign(copier=Fails()) as it:
        it.until_ended(it.save(keys_of(1, 2), 0, ((0, 1),)))
        assert it.tiers.match(keys_of(1, 2), 2).end == 0
        assert it.host[0].available() == 8


def test_a_place_that_is_missing_and_pages_that_overlap_are_refused():
    spec = spec_of()
    with pytest.raises(ValueError, match=r"no place for layer 0 of g0\.k"):
        ForeignPages(spec, [1], {})
    whole = {
        (group.id, buffer.name, layer): Place(1 << 20, 1)
        for group in spec.groups
        for buffer in group.buffers
        for layer in range(len(buffer.layers))
    }
    with pytest.raises(ValueError, match="6 bytes lie 1 bytes apart"):
        ForeignPages(spec, [1], whole)
    nowhere = {where: Place(0, 1 << 10) for where in whole}
    with pytest.raises(ValueError, match="no memory is at address 0"):
        ForeignPages(spec, [1], nowhere)


# -- what an engine may get wrong ----------------------------------------------------------------

WRONG = {
    "a group too few": ((3, 1, 7),),
    "a page too few": ((3, 1), (NONE, 5, 0)),
    "a page too many in a window": ((3, 1, 7), (4, NONE, 5, 0)),
    "beyond the last page": ((3, 1, DEVICE_PAGES), (NONE, 5, 0)),
    "below the first": ((3, 1, 7), (-2, 5, 0)),
    "none where all are kept": ((3, NONE, 7), (NONE, 5, 0)),
}


def picture(it):
    return it.tiers.pools.stats(), [space.available() for space in it.host]


@pytest.mark.parametrize("pages", WRONG.values(), ids=WRONG.keys())
def test_a_save_of_pages_that_cannot_be_changes_nothing(pages):
    with foreign(KeepWindow(3)) as it:
        before = picture(it)
        with pytest.raises(ValueError, match="save_from: "):
            it.save(keys_of(1, 3), 0, pages)
        assert not it.tiers.progress.busy
        assert picture(it) == before
        it.serve(keys_of(1, 3), 0, (3, 1, 7), (NONE, 5, 0))


@pytest.mark.parametrize(
    "pages", [((8, 9, 10),), ((8, 9), (2, 4)), ((8, 9, 12), (2, 4)), ((8, NONE, 10), (2, 4))]
)
def test_a_load_into_pages_that_cannot_be_changes_nothing(pages):
    with foreign(KeepWindow(3)) as it:
        it.serve(keys_of(1, 3), 0, (3, 1, 7), (NONE, 5, 0))
        hold = it.tiers.hold(keys_of(1, 3), 3)
        before = picture(it)
        with pytest.raises(ValueError, match="load_into: "):
            it.load(hold, pages)
        assert picture(it) == before
        it.until_ended(it.load(hold, ((8, 9, 10), (2, 4))))
        it.tiers.release(hold)


def test_pages_are_named_as_int32_and_by_a_first_page_that_is_there():
    with foreign() as it:
        with pytest.raises(ValueError, match="group 0 takes an int32 array, this is a list"):
            it.tiers.foreign.save_from(keys_of(1, 2), 0, [[0, 1]])
        with pytest.raises(ValueError, match="load_into: group 0 takes an int32 array"):
            it.tiers.foreign.load_into(it.tiers.hold([], 0), [[]])
        with pytest.raises(ValueError, match="group 0 takes pages as int32, these are int64"):
            it.tiers.foreign.save_from(keys_of(1, 2), 0, [np.arange(2)])
        for first in (-1, 3):
            with pytest.raises(ValueError, match=f"page {first} of 2"):
                it.save(keys_of(1, 2), first, ((),))


@pytest.mark.parametrize("verb", ["hold", "lease"])
def test_only_what_a_match_finds_can_be_held(verb):
    with foreign() as it:
        it.serve(keys_of(1, 2), 0, (0, 1))
        for keys, end in ((keys_of(2, 2), 2), (keys_of(1, 3), 3), (keys_of(1, 2), -1)):
            with pytest.raises(ValueError, match=f"{verb}: {end} pages"):
                getattr(it.tiers, verb)(keys, end)


@pytest.mark.parametrize("short", range(4))
def test_there_is_one_of_everything_for_every_group(short):
    spec = spec_of(KeepWindow(3))
    device, host, arenas, counts = (
        [make() for _ in range(2 - (short == at))]
        for at, make in enumerate(
            (partial(PageAllocator, 0), partial(PageAllocator, 4), object, lambda: DEVICE_PAGES)
        )
    )
    with pytest.raises(ValueError, match=r"1 .* for 2 groups"):
        TieredCache(spec, (device, host), None, TierOptions(foreign_pages=counts), arenas)


def test_who_did_not_say_how_many_pages_there_are_gets_the_name_of_the_option():
    with foreign() as it:
        it.tiers = TieredCache(it.spec, ([PageAllocator(0)], it.host), it.engine, TierOptions())
        with pytest.raises(ValueError, match=r"device pages \(TierOptions.foreign_pages\) none"):
            it.save(keys_of(1, 2), 0, ((0, 1),))


def test_a_hold_that_was_released_is_neither_loaded_nor_kept():
    """Its pages may be another prompt's by now."""
    with foreign(KeepWindow(3)) as it:
        it.serve(keys_of(1, 3), 0, (3, 1, 7), (NONE, 5, 0))
        hold = it.tiers.hold(keys_of(1, 3), 3)
        it.tiers.release(hold)
        before = picture(it)
        with pytest.raises(ValueError, match="load_into: the hold was released"):
            it.load(hold, ((8, 9, 10), (2, 4)))
        with pytest.raises(ValueError, match="keep: the lease was released"):
            it.tiers.keep(hold)
        assert picture(it) == before


NOT_OURS = {name: pages for name, pages in WRONG.items() if name != "none where all are kept"}


@pytest.mark.parametrize("verb", ["insert", "land"])
@pytest.mark.parametrize("pages", NOT_OURS.values(), ids=NOT_OURS.keys())
def test_pages_of_its_own_that_cannot_be_change_nothing(verb, pages):
    spec = spec_of(KeepWindow(3))
    spaces = [[PageAllocator(DEVICE_PAGES) for _ in spec.groups] for _ in range(2)]
    tiers = TieredCache(spec, (spaces[0], spaces[1]), InstantTransfer(), TierOptions())
    act = partial(getattr(tiers, verb), keys_of(1, 3))
    columns = [np.array(of, np.int32) for of in pages]
    good = [np.array(of, np.int32) for of in ((3, 1, 7), (NONE, 5, 0))]
    for first, given in (
        (0, columns),
        (4, good),
        (-1, good),
        (0, [good[0] * 1.0, good[1]]),
        (0, [[3, 1, 7], good[1]]),
    ):
        with pytest.raises(ValueError, match=f"{verb}: "):
            act(first, given)
    assert len(tiers.tree) == 0
    check(tiers.tree)

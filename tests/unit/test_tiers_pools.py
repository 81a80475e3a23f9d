"""The page spaces of both tiers: what they make free, for whom, and what of it is counted."""

from itertools import product

import numpy as np
import pytest

from stratakv.core.ids import NONE, GroupId
from stratakv.policy.write import WriteBack
from stratakv.spec.retention import KeepWindow
from stratakv.testing.specs import small_spec
from stratakv.tiers.pools import check_pages
from stratakv.tree.effects import Backup, FreeDevice, FreeHost
from stratakv.tree.nodes import TIERS, Tier
from tests.tier_machine import NAMESPACE, TierMachine

SPEC = small_spec([KeepWindow(3)], page_tokens=2)
ANCHOR, WINDOW = GroupId(0), GroupId(1)
DEVICE, HOST = Tier.DEVICE, Tier.HOST


def machine(device=8, host=8, write=None):
    return TierMachine(SPEC, 0, device, host, write)


def serve(it, prompt, pages, *, kept=True):
    """Computed, kept as a checkpoint perhaps, and left."""
    keys = it.prefix([prompt] * pages).keys
    columns = []
    for group, count in ((0, pages), (1, min(pages, 2))):
        taken = it.cache.pools.take(GroupId(group), count, it.cache.progress.wait)
        column = np.full(pages, NONE, np.int32)
        column[-count:] = taken
        for index, page in zip(range(pages - count, pages), taken.tolist(), strict=True):
            view = it.arenas[DEVICE][group].bytes[page]
            view[:] = np.frombuffer(it.content(keys[index], group), np.uint8)
        columns.append(column)
    it.events.inserted(NAMESPACE, keys, 0, np.repeat(np.full(pages, prompt, np.int32), 2))
    it.cache.insert(keys, 0, columns)
    lease = it.cache.lease(keys, pages)
    if kept:
        it.cache.keep(lease)
    it.cache.release(lease)
    return keys


def free(it, tier):
    return [space.available() for space in it.cache.pools.tiers[tier]]


# -- pages that come from outside ----------------------------------------------------------------


def accepted(pages, lengths=(2, 1), capacity=(4, 3)):
    try:
        check_pages("verb", pages, lengths, capacity, "pages of a test")
    except ValueError as error:
        return str(error)
    return None


def ids(*pages):
    return np.array(pages, np.int32)


def test_exactly_the_pages_that_are_there_are_accepted():
    for first, second, other in product(range(-3, 6), range(-3, 6), range(-3, 5)):
        right = all(NONE <= page < 4 for page in (first, second)) and NONE <= other < 3
        assert (accepted([ids(first, second), ids(other)]) is None) == right
    assert accepted([ids(), ids()], (0, 0), (0, 0)) is None
    assert accepted([ids(NONE), ids()], (1, 0), (0, 0)) is None


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ([ids(0, 1)], "verb: pages of 1 groups for 2"),
        ([ids(0, 1), [0]], "verb: group 1 takes an int32 array, this is a list"),
        ([ids(0, 1).astype(np.int64), ids(0)],
         "verb: group 0 takes pages as int32, these are int64"),
        ([ids(0), ids(0)], "verb: group 0 takes 2 pages, these are [1]"),
        ([ids(0, 1), ids(0).reshape(1, 1)], "verb: group 1 takes 1 pages, these are [1, 1]"),
        ([ids(3, 9), ids(0)], "verb: group 0 has pages of a test 0 to 3, not 3 to 9"),
        ([ids(-5, 2), ids(0)], "verb: group 0 has pages of a test 0 to 3, not -5 to 2"),
        ([ids(0, NONE), ids(3)], "verb: group 1 has pages of a test 0 to 2, not 3 to 3"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_is_wrong_with_which_group(pages, why):
    assert accepted(pages) == why


def test_of_no_pages_none_is_there():
    assert accepted([ids(0, 0), ids(0)], capacity=(0, 3)) == (
        "verb: group 0 has pages of a test none, not 0 to 0"
    )


# -- room ----------------------------------------------------------------------------------------


def test_room_costs_what_is_short_and_no_more():
    for wanted in range(1, 9):
        it = machine(host=0)
        serve(it, 1, 3)
        assert it.cache.pools.make_room(DEVICE, ANCHOR, wanted) == max(5, wanted)
        assert free(it, DEVICE)[ANCHOR] == max(5, wanted)
        counters = it.cache.pools.counters
        assert counters.evicted_device_pages >= max(0, wanted - 5)
        assert counters.evicted_host_pages == 0
        assert counters.dropped_dirty_pages == counters.evicted_device_pages
        assert it.cache.pools.make_room(DEVICE, ANCHOR, 99) == 8
        it.check()


def test_what_leaves_either_tier_is_counted_there():
    it = machine()
    serve(it, 1, 3)
    it.settle()
    counters = it.cache.pools.counters
    it.cache.pools.push_out(DEVICE)
    assert (counters.evicted_device_pages, counters.evicted_host_pages) == (5, 0)
    assert free(it, DEVICE) == [8, 8]
    assert counters.dropped_dirty_pages == counters.dropped_cold_pages == 0
    it.cache.pools.push_out(HOST)
    assert (counters.evicted_device_pages, counters.evicted_host_pages) == (5, 5)
    assert free(it, HOST) == [8, 8]
    assert not len(it.cache.tree)


def test_what_no_checkpoint_needs_is_dropped_under_a_count_of_its_own():
    it = machine(host=0)
    serve(it, 1, 4, kept=False)
    it.cache.pools.make_room(DEVICE, WINDOW, 8)
    counters = it.cache.pools.counters
    assert (counters.dropped_dirty_pages, counters.dropped_cold_pages) == (0, 2)


def test_spare_room_costs_no_checkpoint_on_the_device():
    it = machine(host=0)
    kept = serve(it, 1, 3)
    serve(it, 2, 3, kept=False)
    assert it.cache.pools.make_spare_room(DEVICE, WINDOW, 8) == 6
    assert it.cache.pools.make_spare_room(DEVICE, WINDOW, 3) == 6
    assert it.cache.match(kept, 3).end == 3
    it.check()


def test_what_is_saved_may_leave_the_device_for_spare_room():
    it = machine()
    kept = serve(it, 1, 3)
    it.settle()
    assert it.cache.pools.make_spare_room(DEVICE, WINDOW, 8) == 8
    assert it.cache.match(kept, 3).end == 3


def test_spare_room_costs_no_checkpoint_on_the_host():
    it = machine()
    kept = serve(it, 1, 3)
    it.settle()
    assert it.cache.pools.make_spare_room(HOST, WINDOW, 8) == 6
    it.cache.pools.push_out(DEVICE)
    assert it.cache.match(kept, 3).end == 3
    it.check()


def test_pages_that_are_nobodys_are_all_that_are_free():
    it = machine()
    serve(it, 1, 3)
    for tier, group in product(TIERS, (ANCHOR, WINDOW)):
        mine = set(it.cache.pools.unowned(tier, group).tolist())
        held = set(it.cache.tree.held(tier, group).tolist())
        assert mine | held == set(range(8))
        assert not mine & held
        it.cache.pools.unowned(tier, group)[:] = 0  # a copy: nobody's list is spoiled
    it.check()


def test_what_was_promised_waits_for_the_copy_that_holds_it():
    it = machine(device=3, host=8)
    serve(it, 1, 3)
    it.cache.copies.submit()  # and is on its way to the host
    assert it.cache.pools.available(ANCHOR) == 0
    pages = it.cache.pools.take(ANCHOR, 2, it.cache.progress.wait)
    assert len(pages) == 2
    counters = it.cache.pools.counters
    assert counters.copy_waits > 0
    assert counters.dropped_dirty_pages == 0
    with pytest.raises(AssertionError, match="admission promised 9 pages of group 0"):
        it.cache.pools.take(ANCHOR, 9, it.cache.progress.wait)


def test_stats_are_of_every_pool_device_first():
    it = machine(device=8, host=9)
    serve(it, 1, 3)
    it.settle()
    assert [(s.tier, s.group, s.total, s.free, s.evictable) for s in it.cache.pools.stats()] == [
        ("device", "g0", 8, 5, 3), ("device", "g1", 8, 6, 2),
        ("host", "g0", 9, 6, 3), ("host", "g1", 9, 7, 2),
    ]  # fmt: skip


def test_effects_are_carried_out_each_where_it_belongs():
    it = machine()
    pools = it.cache.pools
    held = {tier: pools.tiers[tier][WINDOW].alloc(2) for tier in TIERS}
    wanted = Backup(ANCHOR, np.array([3], np.intp))
    asked = pools.execute(
        [FreeHost(WINDOW, held[HOST][:1]), wanted, FreeDevice(WINDOW, held[DEVICE])]
    )
    assert asked == [wanted]
    assert (free(it, DEVICE), free(it, HOST)) == ([8, 8], [8, 7])


def test_under_write_back_what_is_saved_makes_room_before_what_is_colder():
    it = machine(device=8, host=8, write=WriteBack(0.5))
    cold = serve(it, 1, 3)
    warm = serve(it, 2, 3)
    rows = it.cache.tree.internals.nodes
    assert it.cache.copies.backups.save(ANCHOR, np.array([rows.index[key] for key in warm])) == 3
    it.cache.copies.submit()
    it.wait_for_copies()
    it.cache.pools.make_room(DEVICE, ANCHOR, 5)
    assert it.cache.match(cold, 3).anchor_end == 3
    assert it.cache.match(warm, 3).device_end == 0
    assert it.cache.pools.counters.dropped_dirty_pages == 0

import numpy as np
import pytest

from stratakv.core.clock import ManualClock
from stratakv.core.ids import GroupId
from stratakv.spec.retention import KeepWindow
from stratakv.testing.specs import small_spec
from stratakv.tiers.page_ages import FOLDED, PageAges
from stratakv.tiers.statistics import AGE_BOUNDS_S
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree

KEYS = [bytes([n]) * 32 for n in range(4)]
FULL, WINDOW = GroupId(0), GroupId(1)


@pytest.fixture
def clock():
    return ManualClock(1000.0)


@pytest.fixture
def ages(clock):
    return PageAges(small_spec([KeepWindow(1)], page_tokens=1), 9, clock)


@pytest.fixture
def tree(ages):
    return PrefixTree(small_spec([KeepWindow(1)], page_tokens=1), 8, watcher=ages)


def pages(first, count):
    return [np.arange(first, first + count, dtype=np.int32)] * 2


def seconds(counts):
    """How many, and their mean."""
    count = sum(counts.counts)
    return count, counts.sum_s / max(1, count)


def by_place(found):
    return {(one.tier, one.group): seconds(one) for one in found}


def test_a_page_lives_until_it_leaves_and_is_idle_since_its_last_use(tree, ages, clock):
    tree.insert(KEYS, 0, pages(0, 4))
    clock.advance(7)
    lease = tree.leases.take(KEYS, 4)
    clock.advance(2)
    tree.leases.release(lease)
    clock.advance(20)
    tree.eviction.evict(Tier.DEVICE, FULL, 4)
    found = ages.stats()
    full, window = [one.group for one in found.reuse_gap]
    assert by_place(found.lifetime)["device", full] == (4, 29)
    assert by_place(found.idle_before_evict)["device", full] == (4, 20)
    # Of the window the lease needed the last page alone: the others are idle since they came.
    assert by_place(found.lifetime)["device", window] == (4, 29)
    assert by_place(found.idle_before_evict)["device", window] == (4, (20 + 3 * 29) / 4)
    assert by_place(found.lifetime)["host", full] == (0, 0)


def test_the_gap_between_two_uses_is_that_from_letting_go_to_being_given_again(tree, ages, clock):
    tree.insert(KEYS, 0, pages(0, 4))
    clock.advance(5)
    tree.leases.release(tree.leases.take(KEYS, 4))
    clock.advance(11)
    lease = tree.leases.take(KEYS, 3)
    tree.leases.release(lease)
    full, window = ages.stats().reuse_gap
    assert seconds(full) == (7, (4 * 5 + 3 * 11) / 7)
    assert seconds(window) == (2, (5 + 16) / 2)


def test_host_pages_have_ages_of_their_own(tree, ages, clock):
    tree.insert(KEYS[:1], 0, pages(0, 1))
    clock.advance(3)
    rows = tree.internals.nodes.rows()
    tree.copies.begin_backup(FULL, rows, np.zeros(1, np.int32))
    clock.advance(1)
    tree.copies.end_backup(FULL, rows, ok=True)
    tree.eviction.evict(Tier.DEVICE, FULL, 1)
    clock.advance(10)
    tree.eviction.evict(Tier.HOST, FULL, 1)
    found = by_place(ages.stats().lifetime)
    name = ages.stats().reuse_gap[0].group
    assert found["device", name] == (1, 4)
    assert found["host", name] == (1, 11)
    assert by_place(ages.stats().idle_before_evict)["host", name] == (1, 14)


def test_ages_are_counted_by_bound_however_many_there_are(ages, clock):
    rows = np.arange(8, dtype=np.intp)
    rounds = FOLDED // 8 + 3
    for _ in range(rounds):
        clock.advance(1.0)
        ages.used(FULL, rows, hit=True)
    counts = ages.stats().reuse_gap[0].counts
    at = AGE_BOUNDS_S.index(1.0)
    assert len(counts) == len(AGE_BOUNDS_S) + 1
    assert counts[at] == 8 * (rounds - 1)
    assert counts[AGE_BOUNDS_S.index(1800.0)] == 8, "the first, from the clock's zero"

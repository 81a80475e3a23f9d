"""Size must not show: no recursion on deep chains, no walk over the leaves on an eviction."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from stratakv.core.ids import GroupId, PageIds, PageKey
from stratakv.memory.allocator import PageAllocator
from stratakv.spec.retention import KeepWindow, Retention
from stratakv.testing.specs import small_spec
from stratakv.tree.check import check
from stratakv.tree.effects import FreeDevice, FreeHost
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree
from tests.counting import counted

DEVICE, HOST = Tier.DEVICE, Tier.HOST
DEEP = 5000


def tree(pages: int, *rules: Retention) -> PrefixTree:
    return PrefixTree(small_spec(rules, page_tokens=4), pages)


def chain(name: int, length: int) -> list[PageKey]:
    return [PageKey(b"%d/%d" % (name, index)) for index in range(length)]


def grow(cache: PrefixTree, keys: Sequence[PageKey], pages: PageIds, chunk: int) -> None:
    """Insert as a running request does, and finish."""
    lease = cache.leases.take(keys, 0)
    groups = len(cache.spec.groups)
    for first in range(0, len(keys), chunk):
        end = min(first + chunk, len(keys))
        cache.insert(keys[:end], first, [pages[first:end]] * groups)
        cache.leases.advance(lease, keys, end)
    cache.leases.release(lease)


@pytest.mark.parametrize("chunk", [64, DEEP])
def test_a_deep_chain_lives_and_goes_without_recursion(chunk: int) -> None:
    cache = tree(2 * DEEP, KeepWindow(64))
    keys = chain(0, DEEP)
    grow(cache, keys, np.arange(DEEP, dtype=np.int32), chunk)
    assert cache.match(keys, DEEP).device_end == DEEP
    rows = cache.internals.nodes.path(cache.internals.nodes.index[keys[-1]])
    cache.copies.begin_backup(GroupId(0), rows, np.arange(DEEP, dtype=np.int32))
    cache.copies.end_backup(GroupId(0), rows, ok=True)
    for tier, freed in ((DEVICE, FreeDevice), (HOST, FreeHost)):
        effects = cache.eviction.evict(tier, GroupId(0), DEEP)
        pages = [e.pages for e in effects if isinstance(e, freed) and e.group == 0]
        assert sum(map(len, pages)) == DEEP
    assert not len(cache)
    check(cache)


def test_a_deep_chain_drops_a_host_subtree_page_by_page() -> None:
    """A device-only page above thousands on the host."""
    cache = tree(2 * DEEP)
    keys = chain(0, DEEP)
    grow(cache, keys[:1], np.zeros(1, np.int32), 1)
    lease = cache.leases.take(keys, 1)
    cache.land(keys, 1, [np.arange(DEEP - 1, dtype=np.int32)])
    cache.leases.release(lease)
    cache.eviction.evict(DEVICE, GroupId(0), 1)
    assert not len(cache)
    check(cache)


def test_random_traffic_over_long_chains_keeps_every_invariant() -> None:
    chance = random.Random(7)
    cache = tree(800, KeepWindow(12))
    pools = [PageAllocator(800), PageAllocator(800)]
    for step in range(120):
        trunk, depth = chance.randrange(3), chance.randrange(1, 150)
        keys = chain(trunk, depth)
        if chance.random() < 0.5:  # turn off the trunk somewhere
            at = chance.randrange(depth)
            keys[at:] = [PageKey(b"%d:" % step + key) for key in keys[at:]]
        lease = cache.leases.take(keys, cache.match(keys, len(keys)).device_end)
        first = lease.end
        pages: list[PageIds] = []
        for group, pool in enumerate(pools):
            if pool.available() < len(keys) - first:
                give(pools, cache.eviction.evict(DEVICE, GroupId(group), len(keys) - first))
            taken = pool.alloc(len(keys) - first)
            assert taken is not None
            pages.append(taken)
        give(pools, cache.insert(keys, first, pages).effects)
        cache.leases.advance(lease, keys, len(keys))
        if step % 10 == 0:
            check(cache)
        cache.leases.release(lease)
    give(pools, cache.eviction.evict(DEVICE, GroupId(0), 800))
    assert [pool.available() for pool in pools] == [800, 800]


def give(pools: Sequence[PageAllocator], effects: Sequence[object]) -> None:
    for effect in effects:
        if isinstance(effect, FreeDevice):
            pools[effect.group].free(effect.pages)


def calls_of_one_page_evictions(leaves: int) -> int:
    """Of a hundred, among leaves that were used at different times."""
    cache = tree(leaves + 1)
    base = chain(0, 1)
    grow(cache, base, np.array([leaves], np.int32), 1)
    for leaf in range(leaves):
        keys = [*base, PageKey(b"leaf %d" % leaf)]
        lease = cache.leases.take(keys, 1)
        cache.insert(keys, 1, [np.array([leaf], np.int32)])
        cache.leases.release(lease)
    evicted, calls = counted(
        lambda: [cache.eviction.evict(DEVICE, GroupId(0), 1) for _ in range(100)]
    )
    assert all(evicted)
    return calls


def test_an_eviction_costs_the_same_among_ten_thousand_leaves() -> None:
    assert calls_of_one_page_evictions(10000) < 2 * calls_of_one_page_evictions(1000)


def test_queues_do_not_grow_with_use() -> None:
    """Every release offers a path again; stale offers are thrown away in time."""
    cache = tree(64, KeepWindow(8))
    keys = chain(0, 32)
    grow(cache, keys, np.arange(32, dtype=np.int32), 8)
    for _ in range(2000):
        cache.leases.release(cache.leases.take(keys, 32))
    weights = [queue.weight for tier in cache.internals.pins.queues for queue in tier]
    assert max(weights) <= 4 * 64 + 4096 + 33
    check(cache)

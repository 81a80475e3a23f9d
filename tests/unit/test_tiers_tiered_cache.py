"""Pages under their keys, by the verbs of the cache of tiers itself."""

from dataclasses import replace

import numpy as np
import pytest

from stratakv.core.clock import ManualClock
from stratakv.core.ids import NONE, GroupId, RequestId
from stratakv.core.page_keys import Namespace, page_keys
from stratakv.memory.allocator import PageAllocator
from stratakv.sim.instant_transfer import InstantTransfer
from stratakv.spec.groups import Home
from stratakv.spec.retention import KeepAll, KeepWindow
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.testing.compute_queue import ManualFence
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.testing.specs import small_spec
from stratakv.testing.transfer_ends import BackgroundSteps
from stratakv.tiers.tiered_cache import TieredCache, TierOptions
from stratakv.tree.nodes import Tier
from tests.tier_bench import Arena, Bench, Store, form_of, policy_of

SPEC = small_spec([KeepWindow(3)], page_tokens=2)


def cache_of(device, host):
    groups = range(len(SPEC.groups))
    pools = [[PageAllocator(pages) for _ in groups] for pages in (device, host)]
    return TieredCache(SPEC, (pools[0], pools[1]), InstantTransfer(), TierOptions())


def keys_of(prompt, pages):
    tokens = np.full(2 * pages, prompt, np.int32)
    return page_keys(tokens, Namespace(model=b"m", spec_digest=b""), 2)


def insert(cache, keys):
    """Computed and left; its window's pages are its last two."""
    columns = []
    for group, count in ((0, len(keys)), (1, 2)):
        pages = cache.pools.tiers[Tier.DEVICE][group].alloc(count)
        assert pages is not None
        column = np.full(len(keys), NONE, np.int32)
        column[-count:] = pages
        columns.append(column)
    assert cache.insert(keys, 0, columns) == []


def saved(cache, keys):
    """On the host alone."""
    insert(cache, keys)
    lease = cache.lease(keys, len(keys))
    cache.keep(lease)
    cache.release(lease)
    cache.progress.push_out(Tier.DEVICE)
    assert cache.match(keys, len(keys)).device_end == 0


def test_a_lease_that_loads_drops_nothing_that_is_to_be_saved():
    cache, first, second = cache_of(5, 12), keys_of(1, 3), keys_of(2, 4)
    saved(cache, first)
    insert(cache, second)
    assert cache.lease(first, 3) is None, "the second prompt is being saved"
    cache.progress.settle()
    assert cache.lease(first, 3) is not None
    assert cache.pools.counters.dropped_dirty_pages == 0
    assert cache.match(second, 4).anchor_end == 4
    cache.check()


def test_a_lease_pins_what_each_group_needs_and_gives_it_back():
    cache, keys = cache_of(8, 12), keys_of(1, 4)
    insert(cache, keys)
    assert [pool.evictable for pool in cache.pools.stats()[:2]] == [4, 2]
    cache.progress.settle()
    lease = cache.lease(keys, 4)
    assert (lease.end, lease.starts) == (4, [0, 2])
    assert [pool.evictable for pool in cache.pools.stats()[:2]] == [0, 0]
    cache.release(lease)
    assert [pool.evictable for pool in cache.pools.stats()[:2]] == [4, 2]


def test_a_lease_without_room_to_load_leaves_all_as_it_was():
    cache, first, second = cache_of(4, 12), keys_of(1, 3), keys_of(2, 3)
    saved(cache, first)
    insert(cache, second)
    held = cache.lease(second, 3)
    cache.progress.settle()
    before = cache.pools.stats(), len(cache.tree.leases)
    assert cache.lease(first, 3) is None
    assert (cache.pools.stats(), len(cache.tree.leases)) == before
    cache.release(held)
    lease = cache.lease(first, 3)
    assert lease is not None
    assert len(lease.loading) == 1
    assert cache.copies.loading_pages == 3
    cache.progress.settle()
    assert cache.copies.loading_pages == 0
    cache.check()


def test_what_was_computed_twice_is_kept_once_and_counted():
    cache, keys = cache_of(8, 0), keys_of(1, 3)
    insert(cache, keys)
    before = [space.available() for space in cache.pools.tiers[Tier.DEVICE]]
    pages = [space.alloc(count) for space, count in
             zip(cache.pools.tiers[Tier.DEVICE], (3, 2), strict=True)]  # fmt: skip
    remaps = cache.insert(keys, 0, [pages[0], np.array([NONE, *pages[1]], np.int32)])
    assert [(remap.group, remap.indices.tolist()) for remap in remaps] == [
        (0, [0, 1, 2]), (1, [1, 2])
    ]  # fmt: skip
    lease = cache.lease(keys, 3)
    for remap in remaps:
        own = cache.tree.leases.pages(lease, remap.group)
        assert remap.canonical.tolist() == own.tolist()
    cache.release(lease)
    assert [space.available() for space in cache.pools.tiers[Tier.DEVICE]] == before
    assert cache.pools.counters.duplicate_pages == 5
    cache.check()


def test_a_page_that_nobody_accounts_for_is_found_and_named():
    for tier in Tier:
        for group in range(2):
            cache = cache_of(4, 4)
            cache.check()
            page = cache.pools.tiers[tier][group].alloc(1)
            with pytest.raises(AssertionError, match=f"{tier.name} pages of group g{group}: 1 tak"):
                cache.check()
            cache.check(lambda of, its, at=(tier, group), own=page: [own] * ((of, its) == at))
            with pytest.raises(AssertionError, match="one has two owners"):
                cache.check(
                    lambda of, its, at=(tier, group), own=page: [own] * 2 * ((of, its) == at)
                )


@pytest.mark.parametrize("kept", [False, True])
def test_an_end_that_is_kept_outlives_one_that_is_not(kept):
    cache, first, second = cache_of(8, 0), keys_of(1, 3), keys_of(2, 3)
    for keys, keeps in ((first, kept), (second, not kept)):
        insert(cache, keys)
        lease = cache.lease(keys, 3)
        if keeps:
            cache.keep(lease)
        cache.release(lease)
    cache.pools.make_room(Tier.DEVICE, GroupId(1), 6)
    assert [cache.match(keys, 3).end for keys in (first, second)] == [3 * kept, 3 * (not kept)]


def test_nothing_is_written_to_a_host_that_is_not_there():
    cache, keys = cache_of(8, 0), keys_of(1, 3)
    insert(cache, keys)
    cache.progress.settle()
    assert cache.pools.counters.backup_pages == cache.pools.counters.dropped_backup_pages == 0


def test_an_end_that_no_match_finds_cannot_be_leased():
    """The anchor has its pages, and the window has lost those that it needs there."""
    cache, keys = cache_of(8, 12), keys_of(1, 4)
    insert(cache, keys)
    before = cache.pools.stats()
    for end in (2, 5, -1):
        with pytest.raises(ValueError, match=f"lease: {end} pages, of which a match of these keys"):
            cache.lease(keys, end)
    assert cache.pools.stats() == before
    assert not len(cache.tree.leases)
    assert cache.hold(keys, 2).end == 0, "the host has nothing yet"


def fetching(spec, launched):
    """A cache to which a store has brought all of a prompt, as far as it was let."""
    bench = Bench(spec).attach(Store(spec))
    bench.fill(1, 3)
    pools = [[PageAllocator(8) for _ in spec.groups] for _ in "12"]
    options = TierOptions(launched=launched, prefetch=policy_of(spec))
    arenas = [Arena(8, group.page_bytes) for group in spec.groups]
    cache = TieredCache(spec, (pools[0], pools[1]), InstantTransfer(), options, arenas)
    store = bench.backend
    worker = IoWorker(Backends(store, store), form_of(spec), IoLimits(), ManualClock())
    cache.storage.attach(worker)
    return bench, cache, worker


def fetched(bench, cache):
    cache.storage.prefetcher.start(RequestId("a"), bench.prefix(1, 3), 3 * 2 + 1)

    def landed():
        cache.progress.tick(RequestId("a"))
        return cache.match(bench.keys(1, 3), 3).anchor_end == 3

    wait_until(landed, "what the store has")


def test_a_store_waits_for_launched_steps_where_they_read_on_the_host():
    anchor, selected = small_spec([KeepAll()], page_tokens=2).groups
    spec = replace(SPEC, groups=(anchor, replace(selected, home=Home.HOST)))
    held = ManualFence()
    bench, cache, worker = fetching(spec, lambda: held)
    came = BackgroundSteps(lambda: fetched(bench, cache))
    assert not came.done_within(0.1)
    assert not bench.backend.reads
    held.open()
    assert came.done_within(PATIENCE_S)
    assert bench.backend.reads
    assert worker.close(PATIENCE_S)
    bench.close()


def test_a_store_waits_for_no_step_where_none_reads_on_the_host():
    bench, cache, worker = fetching(SPEC, ManualFence)
    fetched(bench, cache)
    assert worker.close(PATIENCE_S)
    bench.close()

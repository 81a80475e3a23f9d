"""Each eviction policy keeps what it promises to keep, where LRU, or a wrong one, would not."""

import numpy as np
import pytest

from stratakv.core.choices import EVICTIONS
from stratakv.core.ids import PageKey
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.testing.specs import small_spec
from stratakv.tree.lease import DeviceLease
from stratakv.tree.order import COLD, WARM
from stratakv.tree.policies import EVICTION_POLICIES, STAMP_BITS
from stratakv.tree.prefix_tree import PrefixTree
from tests.counting import counted
from tests.policy_cache import ANCHOR, DEVICE, HOST, Cache, gone_in_order, singles

# -- all of them ---------------------------------------------------------------------------------


def test_the_table_has_what_the_flag_allows() -> None:
    assert tuple(EVICTION_POLICIES) == EVICTIONS


@pytest.mark.parametrize("policy", EVICTIONS)
def test_the_end_of_a_path_leaves_first(policy: str) -> None:
    cache = Cache(policy)
    cache.serve((0, 1, 2))
    cache.use((0, 1, 2))
    assert list(gone_in_order(cache, (0,), (0, 1), (0, 1, 2))) == [(0, 1, 2), (0, 1), (0,)]


@pytest.mark.parametrize("policy", EVICTIONS)
def test_what_no_checkpoint_needs_leaves_before_what_one_needs(policy: str) -> None:
    cache = Cache(policy, KeepWindow(1))
    cache.serve((0,), (1, 2), (1, 2, 3))  # the state after (1, 2) was continued
    cache.use((1, 2), times=3, priority=9)
    assert (
        COLD < cache.tree.internals.nodes.rank[1].item(cache.row((1, 2))) < WARM
    )  # a milestone is left
    assert next(gone_in_order(cache, (0,), (1, 2), (1, 2, 3), group=1)) == (1, 2)


@pytest.mark.parametrize("policy", EVICTIONS)
def test_an_empty_tree_gives_nothing_and_a_full_one_everything(policy: str) -> None:
    cache = Cache(policy, KeepWindow(2))
    assert cache.evict(5) == 0
    cache.serve((0, 1, 2), (0, 3), (4,))
    cache.use((0, 1, 2), (4,), times=3)
    assert cache.evict(64) == 5
    assert not len(cache.tree)
    assert all(pool.available() == 64 for tier in cache.pools for pool in tier)


def calls_of_one_page_evictions(policy: str, leaves: int) -> int:
    """Of a hundred, in a tree where half of the pages were used again."""
    cache = PrefixTree(small_spec([], page_tokens=1), leaves, EVICTION_POLICIES[policy])
    keys = [PageKey(b"leaf %d" % leaf) for leaf in range(leaves)]
    for leaf in range(leaves):
        cache.insert(keys[leaf : leaf + 1], 0, [np.array([leaf], np.int32)])
    for key in keys[::2]:
        cache.leases.release(cache.leases.take([key], 1))
    evicted, calls = counted(lambda: [cache.eviction.evict(DEVICE, ANCHOR, 1) for _ in range(100)])
    assert all(evicted)
    return calls


@pytest.mark.parametrize("policy", EVICTIONS)
def test_an_eviction_costs_the_same_among_ten_thousand_leaves(policy: str) -> None:
    few, many = (calls_of_one_page_evictions(policy, leaves) for leaves in (1000, 10000))
    assert many < 2 * few


# -- LFU -----------------------------------------------------------------------------------------


def test_lfu_keeps_what_was_used_often_over_what_was_used_last() -> None:
    cache = Cache("lfu")
    cache.serve((0,), (1,), (2,))
    cache.use((0,), times=3)
    cache.use((2,), times=2)
    cache.use((1,))
    assert list(gone_in_order(cache, (0,), (1,), (2,))) == [(1,), (2,), (0,)]


def test_lfu_takes_the_older_of_equals() -> None:
    cache = Cache("lfu")
    cache.serve((0,), (1,))
    cache.use((1,), (0,))
    assert list(gone_in_order(cache, (0,), (1,))) == [(1,), (0,)]


def test_lfu_counts_a_page_that_comes_again_from_nothing() -> None:
    cache = Cache("lfu")
    cache.serve((0,))
    cache.use((0,), times=5)
    cache.evict(1)
    cache.serve((0,), (1,))
    cache.use((1,))
    assert list(gone_in_order(cache, (0,), (1,))) == [(0,), (1,)]


def test_lfu_counts_uses_of_a_groups_own_pages() -> None:
    """Requests that go on from (0, 1) use the prefix (0), but not the state after it."""
    cache = Cache("lfu", KeepBoundary())
    cache.serve((0,), (0, 5), (0, 1), (0,), (9,))  # at a branch (0) stays a checkpoint
    cache.use((0, 1), times=5)
    cache.use((9,), times=4)
    cache.use((0,))
    order = list(gone_in_order(cache, (0,), (0, 1), (9,), group=1))
    assert order == [(0,), (9,), (0, 1)]


def test_lfu_ranks_by_the_number_of_uses_then_by_time() -> None:
    cache = Cache("lfu")
    cache.serve((0,))
    nodes, row = cache.tree.internals.nodes, cache.row((0,))
    ranks: list[int] = []
    for _ in range(3):
        ranks.append(nodes.rank[0].item(row) >> STAMP_BITS)
        cache.use((0,))
    assert ranks == [0, 1, 2]


def test_lfu_counts_what_storage_brought_as_it_counts_what_was_computed() -> None:
    cache = Cache("lfu")
    cache.serve((0,))
    cache.save((0,))
    cache.evict(1)
    pages = cache.pools[HOST][0].alloc(1)
    assert pages is not None
    cache.tree.land(cache.keys((1,)), 0, [pages])
    assert cache.evict(1, tier=HOST) == 1
    assert cache.left((0,), (1,)) == [(1,)], "the older of equals"


@pytest.mark.parametrize("load", [False, True])
def test_lfu_does_not_count_a_request_that_only_comes_back(load: bool) -> None:
    cache = Cache("lfu")
    cache.serve((0,), (1,))
    cache.use((0,))
    leases, keys = cache.tree.leases, cache.keys((1,))
    for _ in range(3):
        take = leases.take_to_load if load else leases.take
        leases.release(take(keys, 1, again=True))
    assert list(gone_in_order(cache, (0,), (1,))) == [(1,), (0,)]


# -- LRU -----------------------------------------------------------------------------------------


def test_a_load_that_was_given_up_used_its_pages_until_then() -> None:
    cache = Cache("lru")
    for prompt in ((0,), (1,)):
        cache.serve(prompt)
        cache.save(prompt)
        cache.evict(1)
    leases = [cache.tree.leases.take_to_load(cache.keys((symbol,)), 1) for symbol in (0, 1)]
    for lease in reversed(leases):
        cache.tree.leases.release(lease)
    assert cache.evict(1, tier=HOST) == 1
    assert cache.left((0,), (1,)) == [(0,)]


def test_where_every_page_counts_as_needed_its_last_use_alone_ranks_it() -> None:
    cache = PrefixTree(small_spec([KeepWindow(1)], page_tokens=1), 4)
    cache.checkpoints.need_everything()
    keys = [PageKey(b"%d" % page) for page in range(3)]
    cache.insert(keys, 0, [np.arange(3, dtype=np.int32)] * 2)
    cache.leases.release(cache.leases.take(keys, 3))
    assert (cache.internals.nodes.rank[1][cache.internals.nodes.rows()] >= WARM).all()


@pytest.mark.parametrize("policy", EVICTIONS)
def test_where_two_have_parted_from_a_continued_end_it_is_a_checkpoint_again(policy: str) -> None:
    cache = Cache(policy, KeepBoundary())
    marked: list[bool] = []
    for prompt in ((0,), (0, 1), (0, 2)):
        cache.serve(prompt)
        marked.append(cache.tree.internals.nodes.checkpoint.item(cache.row((0,))))
    assert marked == [True, False, True]


# -- priority ------------------------------------------------------------------------------------


def test_priority_comes_before_recency() -> None:
    cache = Cache("priority")
    cache.serve((0,), priority=5)
    cache.serve((1,), (2,))
    cache.serve((3,), priority=7)
    cache.use((1,))
    assert list(gone_in_order(cache, *singles(0, 1, 2, 3))) == singles(2, 1, 0, 3)


def test_a_page_counts_by_the_highest_priority_of_its_requests() -> None:
    cache = Cache("priority")
    cache.serve((0,), (1,))
    cache.use((0,), priority=3)
    cache.use((0,), priority=1)
    cache.use((0,), priority=-1)
    cache.use((1,), priority=2)
    assert list(gone_in_order(cache, (0,), (1,))) == [(1,), (0,)]


def test_the_least_priority_counts() -> None:
    cache = Cache("priority")
    cache.serve((0,), (1,))
    cache.use((0,), priority=1)
    cache.use((1,))
    assert list(gone_in_order(cache, (0,), (1,))) == [(1,), (0,)]


def test_a_page_that_comes_again_has_the_priority_of_its_new_request() -> None:
    cache = Cache("priority")
    cache.serve((0,), priority=9)
    cache.evict(1)
    cache.serve((0,))
    cache.serve((1,), priority=1)
    assert list(gone_in_order(cache, (0,), (1,))) == [(0,), (1,)]


def test_priority_orders_checkpoint_pages_of_other_groups() -> None:
    cache = Cache("priority", KeepBoundary())
    cache.serve((0,), priority=2)
    cache.serve((1,))
    assert list(gone_in_order(cache, (0,), (1,), group=1)) == [(1,), (0,)]


def test_an_outsized_priority_is_the_highest() -> None:
    cache = Cache("priority")
    cache.serve((0,), priority=1 << 70)
    cache.serve((1,), priority=3)
    assert list(gone_in_order(cache, (0,), (1,))) == [(1,), (0,)]


def test_a_request_that_has_no_page_yet_counts_for_what_it_will_compute() -> None:
    cache = Cache("priority")
    for symbol, priority in ((0, 1), (1, 0)):
        keys = cache.keys((symbol,))
        lease = cache.tree.leases.take_to_load(keys, 0, priority=priority)
        assert isinstance(lease, DeviceLease)
        pages = cache.pools[DEVICE][0].alloc(1)
        assert pages is not None
        cache.tree.insert(keys, 0, [pages])
        cache.tree.leases.advance(lease, keys, 1)
        cache.tree.leases.release(lease)
    assert list(gone_in_order(cache, (0,), (1,))) == [(1,), (0,)]

"""Each eviction policy keeps what it promises to keep, where LRU, or a wrong one, would not."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from stratakv.core.config import EVICTIONS
from stratakv.core.ids import GroupId, PageKey, TicketId
from stratakv.memory.allocator import PageAllocator
from stratakv.spec.retention import KeepBoundary, KeepWindow, Retention
from stratakv.testing.specs import small_spec
from stratakv.tree.check import check
from stratakv.tree.effects import Effect, FreeDevice, FreeHost
from stratakv.tree.lease import DeviceLease, LoadLease
from stratakv.tree.nodes import Tier
from stratakv.tree.order import COLD, WARM
from stratakv.tree.policies import EVICTION_POLICIES, STAMP_BITS
from stratakv.tree.prefix_tree import PrefixTree
from stratakv.tree.s3_fifo import S3Fifo
from stratakv.tree.segments import HIGH, Segments
from tests.counting import counted

DEVICE, HOST = Tier.DEVICE, Tier.HOST
ANCHOR = GroupId(0)
Prompt = tuple[int, ...]


class Cache:
    """A tree with pools; one symbol of a prompt is one page."""

    def __init__(self, policy: str, *rules: Retention, pages: int = 64) -> None:
        spec = small_spec(rules, page_tokens=1)
        self.groups = range(len(spec.groups))
        self.tree = PrefixTree(spec, 2 * pages, EVICTION_POLICIES[policy]())
        self.pools = [[PageAllocator(pages) for _ in self.groups] for _ in Tier]

    def keys(self, prompt: Prompt) -> list[PageKey]:
        return [PageKey(repr(prompt[: at + 1]).encode()) for at in range(len(prompt))]

    def serve(self, *prompts: Prompt, priority: int = 0) -> None:
        """Compute what is not cached, keep the end as a checkpoint, and finish."""
        for prompt in prompts:
            keys = self.keys(prompt)
            have = self.tree.match(keys, len(keys) - 1).device_end
            lease = self.tree.leases.take(keys, have, priority=priority)
            taken = [pool.alloc(len(keys) - have) for pool in self.pools[DEVICE]]
            pages = [ids for ids in taken if ids is not None]
            self.do(self.tree.insert(keys, have, pages).effects)
            self.tree.leases.advance(lease, keys, len(keys))
            self.do(self.tree.checkpoints.keep(lease, len(keys), have))
            self.tree.leases.release(lease)
            check(self.tree)

    def use(self, *prompts: Prompt, times: int = 1, priority: int = 0) -> None:
        for prompt in prompts * times:
            keys = self.keys(prompt)
            self.tree.leases.release(self.tree.leases.take(keys, len(keys), priority=priority))
            check(self.tree)

    def save(self, prompt: Prompt) -> None:
        for group in self.groups:
            rows = self.tree.backups.unsaved(
                GroupId(group), self.tree.internals.nodes.path(self.row(prompt))
            )
            pages = self.pools[HOST][group].alloc(len(rows))
            assert pages is not None
            self.tree.copies.begin_backup(GroupId(group), rows, pages)
            self.do(self.tree.copies.end_backup(GroupId(group), rows, ok=True))

    def load(self, prompt: Prompt) -> None:
        """A request comes for a prompt that is on the host, loads it, and finishes."""
        lease = self.tree.leases.take_to_load(self.keys(prompt), len(prompt))
        assert isinstance(lease, LoadLease)
        rows = list(lease.host)
        taken = [pool.alloc(len(r)) for pool, r in zip(self.pools[DEVICE], rows, strict=True)]
        moved = self.tree.leases.begin_load(
            lease, [ids for ids in taken if ids is not None], TicketId(1)
        )
        for group in self.groups:
            self.tree.copies.end_load(GroupId(group), rows[group])
        self.tree.leases.release(moved)
        check(self.tree)

    def do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, FreeDevice | FreeHost):
                tier = DEVICE if isinstance(effect, FreeDevice) else HOST
                self.pools[tier][effect.group].free(effect.pages)

    def evict(self, count: int, group: int = 0, tier: Tier = DEVICE) -> int:
        before = self.pools[tier][group].available()
        self.do(self.tree.eviction.evict(tier, GroupId(group), count))
        check(self.tree)
        return self.pools[tier][group].available() - before

    def row(self, prompt: Prompt) -> int:
        return self.tree.internals.nodes.index[self.keys(prompt)[-1]]

    def left(self, *prompts: Prompt) -> list[Prompt]:
        """Those of ``prompts`` that are usable to their ends."""
        return [p for p in prompts if self.tree.match(self.keys(p), len(p)).end == len(p)]


def singles(*symbols: int) -> list[Prompt]:
    return [(symbol,) for symbol in symbols]


def gone_in_order(cache: Cache, *prompts: Prompt, group: int = 0) -> Iterator[Prompt]:
    """``prompts`` in the order in which they leave, one page at a time."""
    left = list(prompts)
    while left and cache.evict(1, group):
        now = cache.left(*left)
        yield from (prompt for prompt in left if prompt not in now)
        left = now


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
    cache = PrefixTree(small_spec([], page_tokens=1), leaves, EVICTION_POLICIES[policy]())
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
    said: list[int] = []
    for _ in range(3):
        said.append(nodes.rank[0].item(row) >> STAMP_BITS)
        cache.use((0,))
    assert said == [0, 1, 2]


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


# -- SLRU ----------------------------------------------------------------------------------------


def test_slru_keeps_what_was_used_twice_through_a_scan() -> None:
    cache = Cache("slru")
    cache.serve((0,), (1,))
    cache.use((0,))
    cache.serve(*singles(*range(10, 40)))
    cache.evict(31)
    assert cache.left((0,), (1,)) == [(0,)]


def test_slru_does_not_count_the_first_request_twice() -> None:
    """Computing, keeping and releasing a page is one use of it."""
    cache = Cache("slru")
    cache.serve((0,), (1,))
    cache.use((1,))
    cache.serve((2,))
    assert list(gone_in_order(cache, (0,), (1,), (2,))) == [(0,), (2,), (1,)]


def test_slru_puts_the_coldest_beyond_the_share_back_on_probation() -> None:
    cache = Cache("slru")
    protected = singles(*range(9))
    cache.serve((30,), *protected)
    cache.use(*protected)  # nine of ten, where eight may be protected: (0) is not any more
    cache.evict(1)
    assert cache.left((30,), (0,)) == [(0,)]
    cache.serve((21,))
    cache.evict(1)
    assert cache.left((21,), (0,), (1,)) == [(21,), (1,)]


def test_slru_protects_a_demoted_page_that_is_used_again() -> None:
    cache = Cache("slru")
    protected = singles(*range(9))
    cache.serve((30,), *protected)
    cache.use(*protected)
    cache.evict(1)
    cache.use((0,))  # demoted before, and now (1) in its place
    cache.serve((21,))
    cache.evict(1)
    assert cache.left((21,), (0,), (1,)) == [(21,), (0,)]


@pytest.mark.parametrize("policy", ["slru", "s3-fifo"])
def test_nobody_has_a_say_in_what_went_cold(policy: str) -> None:
    """A batch may hold a page that nobody needs any more: it must not be ranked anew."""
    cache = Cache(policy, KeepWindow(2))
    cache.serve((0, 1))
    queue = cache.tree.internals.pins.queues[DEVICE][1]
    assert isinstance(queue, Segments)
    rows = cache.tree.internals.nodes.path(cache.row((0, 1)))
    cache.tree.internals.nodes.rank[1][rows] = (COLD, HIGH + 5)
    assert queue.due(HIGH + 9, rows).tolist() == [False, True]
    assert queue.due(COLD, rows).tolist() == [True, False]


@pytest.mark.parametrize("policy", ["slru", "s3-fifo"])
def test_only_what_is_there_and_idle_comes_up_for_a_policys_say(policy: str) -> None:
    cache = Cache(policy)
    queues = [queues[0] for queues in cache.tree.internals.pins.queues]
    cache.serve((0, 1, 2))
    cache.save((0, 1))
    lease = cache.tree.leases.take(cache.keys((0,)), 1)
    rows = cache.tree.internals.nodes.path(cache.row((0, 1, 2)))
    idle = [queue.idle(rows).tolist() for queue in queues if isinstance(queue, Segments)]
    assert idle == [[False, True, True], [True, True, False]]
    cache.tree.leases.release(lease)


@pytest.mark.parametrize("policy", ["slru", "s3-fifo"])
def test_only_a_leaf_of_the_device_comes_up_there_and_any_page_of_the_host(policy: str) -> None:
    cache = Cache(policy)
    cache.serve((0, 1, 2))
    cache.save((0, 1, 2))
    rows = cache.tree.internals.nodes.path(cache.row((0, 1, 2)))
    queues = [queue for (queue,) in cache.tree.internals.pins.queues if isinstance(queue, Segments)]
    for end, on_device in ((2, [False, False]), (3, [True, True, True])):
        due = [queue.due(2 * HIGH, rows[:end]).tolist() for queue in queues]
        assert due == [on_device, [True] * end]


@pytest.mark.parametrize("policy", ["slru", "s3-fifo"])
def test_a_queue_that_was_cleared_is_empty(policy: str) -> None:
    cache = Cache(policy)
    queue = cache.tree.internals.pins.queues[DEVICE][0]
    assert isinstance(queue, Segments)
    assert (queue.pages, queue.high_pages, queue.most) == (0, 0, 0)
    for key in (WARM + 1, HIGH + 1):
        queue.push(key, 0, np.array([0]))
    assert (queue.weight, len(queue.batches())) == (4, 2)
    queue.clear()
    assert (queue.weight, queue.batches()) == (0, [])


# -- S3-FIFO -------------------------------------------------------------------------------------


def test_s3_fifo_lets_pages_that_were_used_once_leave_first() -> None:
    cache = Cache("s3-fifo")
    cache.serve((0,), (1,))
    cache.use((0,), times=2)
    cache.serve(*singles(*range(10, 40)))
    cache.evict(31)
    assert cache.left((0,), (1,)) == [(0,)]


def test_s3_fifo_orders_newcomers_by_when_they_came() -> None:
    cache = Cache("s3-fifo")
    cache.serve((0,), (1,), (2,))
    cache.use((0,))  # once is not enough, and changes no place in the queue
    assert list(gone_in_order(cache, (0,), (1,), (2,))) == [(0,), (1,), (2,)]


def test_s3_fifo_takes_what_it_remembers_to_main() -> None:
    cache = Cache("s3-fifo")
    cache.serve((0,), *singles(*range(10, 30)))
    cache.evict(1)
    assert cache.left((0,)) == []
    cache.serve((0,), (1,))
    cache.serve(*singles(*range(30, 40)))
    cache.evict(21)
    assert cache.left((0,), (1,)) == [(0,)]


def test_s3_fifo_takes_what_the_host_remembers_to_main() -> None:
    cache = Cache("s3-fifo")
    cache.serve((0,), (1,))
    cache.save((0,))
    cache.evict(1)
    cache.load((0,))
    cache.serve(*singles(*range(10, 30)))
    cache.evict(20)
    assert cache.left((0,), (1,)) == [(0,)]
    assert cache.tree.match(cache.keys((0,)), 1).device_end == 1


def test_s3_fifo_takes_from_main_while_few_are_new() -> None:
    """Main is a clock: what was used since it came up last stays for another round."""
    cache = Cache("s3-fifo")
    hot = singles(*range(11))
    cache.serve(*hot)
    cache.use(*hot, times=2)
    cache.serve((20,))
    cache.evict(1)  # all but (20) are in main by now
    assert cache.left((20,), *hot) == hot
    queue = cache.tree.internals.pins.queues[DEVICE][0]
    assert isinstance(queue, Segments)
    assert queue.high_pages == len(hot)
    cache.use((0,))
    cache.serve((21,))  # one of twelve: less than a tenth
    cache.evict(2)
    assert cache.left((21,), *hot) == [(21,), (0,), *hot[3:]]


def test_s3_fifo_remembers_no_more_keys_than_the_pool_has_pages() -> None:
    cache = Cache("s3-fifo", KeepWindow(1), pages=16)
    for symbol in range(100):
        if not cache.pools[DEVICE][0].available():
            cache.evict(1)
        cache.serve((symbol,))
    policy = cache.tree.internals.pins.policy
    assert isinstance(policy, S3Fifo)
    assert policy.remembered(0) == 16
    assert policy.remembered(1) <= 16


def test_s3_fifo_never_ranks_a_page_below_what_hangs_on_it() -> None:
    cache = Cache("s3-fifo")
    cache.serve((0, 1, 2))
    cache.evict(2)
    cache.serve((0, 1, 2))  # (0) is small, what follows is remembered
    path = cache.tree.internals.nodes.path(cache.row((0, 1, 2)))
    rank = cache.tree.internals.nodes.rank[0][path]
    assert (np.diff(rank) <= 0).all()


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
    for symbol, priority in ((0, 3), (1, 0)):
        keys = cache.keys((symbol,))
        lease = cache.tree.leases.take_to_load(keys, 0, priority=priority)
        assert isinstance(lease, DeviceLease)
        pages = cache.pools[DEVICE][0].alloc(1)
        assert pages is not None
        cache.tree.insert(keys, 0, [pages])
        cache.tree.leases.advance(lease, keys, 1)
        cache.tree.leases.release(lease)
    assert list(gone_in_order(cache, (0,), (1,))) == [(1,), (0,)]

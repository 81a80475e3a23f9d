"""SLRU keeps what was used twice, and no more than its share of it."""

import numpy as np
import pytest

from stratakv.spec.retention import KeepWindow
from stratakv.tree.order import COLD, WARM
from stratakv.tree.segmented_queue import HIGH, Segments
from tests.policy_cache import DEVICE, Cache, gone_in_order, singles


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


def test_slru_demotes_the_end_of_a_path_and_protects_the_rest_of_it() -> None:
    cache = Cache("slru", KeepWindow(10))
    prompt = tuple(range(10))
    cache.serve(prompt)
    cache.use(prompt)
    assert cache.evict(1, group=1) == 1
    nodes = cache.tree.internals.nodes
    rank = nodes.rank[1][nodes.path(cache.row(prompt))]
    assert (rank >= HIGH).tolist()[:9] == [True] * 8 + [False]


def test_slru_demotes_as_many_as_are_beyond_the_share() -> None:
    cache = Cache("slru")
    protected = singles(*range(20))
    cache.serve(*protected)
    cache.use(*protected)
    assert cache.evict(1) == 1
    rank = cache.tree.internals.nodes.rank[0][cache.tree.internals.nodes.rows()]
    assert np.count_nonzero(rank >= HIGH) == 16, "of twenty"
    assert len(rank) == 19


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

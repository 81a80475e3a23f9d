"""S3-FIFO lets go of what was used once, and knows again what comes back too soon."""

import numpy as np

from stratakv.spec.retention import KeepWindow
from stratakv.tree.order import WARM
from stratakv.tree.s3_fifo import S3Fifo
from stratakv.tree.segmented_queue import HIGH, Segments
from tests.policy_cache import DEVICE, Cache, gone_in_order, singles


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


def s3_fifo(cache: Cache) -> S3Fifo:
    policy = cache.tree.internals.pins.policy
    assert isinstance(policy, S3Fifo)
    return policy


def test_s3_fifo_gives_a_newcomer_while_they_have_a_tenth() -> None:
    cache = Cache("s3-fifo")
    hot = singles(*range(9))
    cache.serve(*hot)
    cache.use(*hot, times=2)
    cache.serve((20,), (21,))
    cache.evict(1)  # all of the hot ones are in main by now
    assert cache.left((20,), (21,), *hot) == [(21,), *hot]
    cache.evict(1)  # one of ten
    assert cache.left((21,), *hot) == hot


def test_s3_fifo_takes_one_use_for_every_round() -> None:
    cache = Cache("s3-fifo")
    hot = singles(0, 1)
    cache.serve(*hot, *singles(*range(10, 50)))
    cache.use(*hot, times=2)
    cache.evict(1)
    policy, queue = s3_fifo(cache), cache.tree.internals.pins.queues[DEVICE][0]
    assert isinstance(queue, Segments)
    rows = np.array([cache.row(prompt) for prompt in hot])
    assert policy.uses[0][rows].tolist() == [0, 0], "a page comes to main with nothing"
    assert policy.main[0][rows].tolist() == [True, True]
    assert queue.high_pages == 2
    cache.evict(39)
    cache.use((0,), times=3)
    cache.evict(1)
    assert cache.left(*hot) == [(0,)]
    assert policy.uses[0].item(rows.item(0)) == 2


def test_s3_fifo_spares_pages_in_the_middle_of_a_batch() -> None:
    cache = Cache("s3-fifo", KeepWindow(3))
    cache.serve((0, 1, 2))
    policy, nodes = s3_fifo(cache), cache.tree.internals.nodes
    path = nodes.path(cache.row((0, 1, 2)))
    policy.uses[1][path[1]] = 2
    for left in ([True, True, False], [False, True, False]):
        assert cache.evict(1, group=1) == 1
        assert (nodes.page[DEVICE][1][path] >= 0).tolist() == left
    assert policy.main[1][path].tolist() == [False, True, False]


def test_s3_fifo_forgets_a_key_that_came_back_and_none_that_leaves_main_is_remembered() -> None:
    cache = Cache("s3-fifo")
    remembered: list[int] = []
    for _ in range(2):
        cache.serve((0,))
        remembered.append(s3_fifo(cache).remembered(0))
        cache.evict(1)
        remembered.append(s3_fifo(cache).remembered(0))
    assert remembered == [0, 1, 0, 0]


def test_s3_fifo_remembers_what_a_group_loses_with_its_node_or_without() -> None:
    cache = Cache("s3-fifo", KeepWindow(1))
    cache.serve((0,), (1, 2, 3))
    policy, nodes = s3_fifo(cache), cache.tree.internals.nodes
    assert cache.evict(2, group=1) == 2  # (1) and (1, 2), which no checkpoint needs
    assert policy.remembered(1) == 0
    assert cache.evict(1, group=1) == 1  # (0)
    assert (policy.remembered(0), policy.remembered(1)) == (0, 1)
    nodes.rank[1][nodes.path(cache.row((1, 2, 3)))[:2]] = WARM + 1  # of pages that are not there
    assert cache.evict(4) == 4
    assert (policy.remembered(0), policy.remembered(1)) == (4, 2)


def test_s3_fifo_knows_which_pages_of_a_path_with_gaps_it_remembers() -> None:
    cache = Cache("s3-fifo", KeepWindow(4))
    cache.serve((0, 1, 2, 3))
    assert cache.evict(4, group=1) == 4
    policy, stamp = s3_fifo(cache), WARM + 1001
    path = cache.tree.internals.nodes.path(cache.row((0, 1, 2, 3)))
    for rows, ranks in ((path[[1]], [HIGH + stamp]), (path[[1, 3]], [stamp, HIGH + stamp])):
        found = policy.enter(1, rows, stamp)
        assert isinstance(found, np.ndarray)
        assert found.tolist() == ranks
    assert policy.remembered(1) == 2


def test_s3_fifo_raises_what_lies_above_and_nothing_below() -> None:
    cache = Cache("s3-fifo")
    cache.serve((0, 1, 2))
    nodes = cache.tree.internals.nodes
    path = nodes.path(cache.row((0, 1, 2)))
    nodes.rank[0][path] = (WARM + 3, HIGH + 2, WARM + 1)
    found = s3_fifo(cache).touch(0, path, WARM + 99)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [HIGH + 2, HIGH + 2, WARM + 1]


def test_s3_fifo_has_a_page_that_is_used_on_the_host_in_main() -> None:
    cache = Cache("s3-fifo")
    cache.serve((0,))
    cache.save((0,))
    cache.evict(1)
    policy, rows = s3_fifo(cache), np.array([cache.row((0,))])
    found = policy.hit(0, rows, WARM + 99)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [HIGH + WARM + 99]
    assert policy.main[0][rows].tolist() == [True]

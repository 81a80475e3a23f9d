"""The plain queue: coldest first, of equal ranks the deepest, of equal depths the oldest."""

import numpy as np
import pytest

from stratakv.core.ids import NodeIds, PageKey
from stratakv.spec.retention import KeepWindow
from stratakv.testing.specs import small_spec
from stratakv.tree.check import check
from stratakv.tree.nodes import NodeTable, Tier
from stratakv.tree.order import COLD, LAST_USE, WARM, EvictionQueue, LeastRecentlyUsed
from stratakv.tree.prefix_tree import PrefixTree


def rows(*of: int) -> NodeIds:
    return np.array(of, np.intp)


@pytest.fixture
def queue() -> EvictionQueue:
    made = EvictionQueue()
    for key, depth, batch in (
        (7, 0, rows(1)), (5, 2, rows(2, 3)), (5, 9, rows(4)), (5, 9, rows(5, 6, 7)), (9, 9, rows()),
    ):  # fmt: skip
        made.push(key, depth, batch)
    return made


def test_batches_come_up_by_rank_then_depth_then_age(queue: EvictionQueue) -> None:
    firsts: list[int] = []
    found: list[tuple[int, list[int]]] = []
    while len(queue):
        firsts.append(queue.first)
        key, batch = queue.pop()
        found.append((key, batch.tolist()))
    assert firsts == [5, 5, 5, 7, 9]
    assert found == [(5, [4]), (5, [5, 6, 7]), (5, [2, 3]), (7, [1]), (9, [])]


def test_the_weight_is_rows_and_one_for_each_batch(queue: EvictionQueue) -> None:
    assert (len(queue), queue.weight) == (5, 7 + 5)
    queue.pop()
    queue.pop()
    assert (len(queue), queue.weight) == (3, 3 + 3)


def test_all_batches_are_shown_and_stay(queue: EvictionQueue) -> None:
    shown = sorted((key, batch.tolist()) for key, batch in queue.batches())
    assert shown == [(5, [2, 3]), (5, [4]), (5, [5, 6, 7]), (7, [1]), (9, [])]
    assert len(queue) == 5


def test_a_queue_that_was_cleared_is_empty(queue: EvictionQueue) -> None:
    queue.clear()
    assert (len(queue), queue.weight, queue.batches()) == (0, 0, [])
    queue.push(3, 0, rows(8))
    assert (queue.first, queue.weight) == (3, 2)


def test_least_recently_used_ranks_by_the_last_use_whatever_it_was() -> None:
    policy = LeastRecentlyUsed(NodeTable(small_spec([], page_tokens=1), 4))
    assert [use(0, rows(1), WARM + 3) for use in (policy.enter, policy.hit, policy.touch)] == [
        WARM + 3
    ] * 3
    assert isinstance(policy.queue(Tier.DEVICE, 0), EvictionQueue)


def test_between_the_cold_end_and_every_rank_there_is_room_for_each_last_use() -> None:
    for stamp in (WARM + 1, WARM + 12345, 2 * WARM - 1):
        assert COLD < stamp & LAST_USE < WARM
        assert ((7 << 44) + stamp) & LAST_USE == stamp - WARM


def test_of_batches_alike_the_newest_stays_and_the_order_is_kept() -> None:
    queue = EvictionQueue()
    queue.push(3, 2, rows(1, 2))
    for key in range(4, 40):
        queue.push(key, 6, rows(3, 6))
    assert len(queue) < 30
    assert queue.pop()[0] == 3
    found = [queue.pop() for _ in range(len(queue))]
    assert found[-1][0] == 39
    assert [key for key, _ in found] == sorted(key for key, _ in found)
    assert all(some.tolist() == [3, 6] for _, some in found)
    assert queue.weight == 0


def test_leases_of_one_path_make_no_queue_longer_and_what_may_leave_stays_in_it() -> None:
    spec = small_spec([KeepWindow(40)], page_tokens=4)
    tree = PrefixTree(spec, 64)
    keys = [PageKey(bytes([at]) * 32) for at in range(40)]
    tree.insert(keys, 0, [np.arange(40, dtype=np.int32)] * len(spec.groups))
    queues = tree.internals.pins.queues[Tier.DEVICE]
    weights: set[int] = set()
    for _ in range(1000):
        tree.leases.release(tree.leases.take(keys, len(keys)))
        weights.update(queue.weight for queue in queues)
    check(tree)
    assert max(weights) <= 4 * 41

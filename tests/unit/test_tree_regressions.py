"""Bugs that the tree machine found, minimised; each test names what was wrong."""

from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import KeepAll, KeepBoundary
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import DEVICE, HOST, Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_records import WalkRequest


def driver(spec: CacheSpec, *, device: int = 8, host: int = 8) -> TreeDriver:
    groups = len(spec.groups)
    return TreeDriver(spec, [device] * groups, [host] * groups)


def computed(it: TreeDriver, prompt: Prefix, *, generous: bool = True) -> WalkRequest:
    """A running request that has computed its whole prompt in one chunk."""
    request = it.arrive(prompt, len(prompt) - 1, load=False)
    assert it.extend(request, len(prompt), generous=generous)
    return request


def served(it: TreeDriver, prompt: Prefix, *, generous: bool = True) -> None:
    """As ``computed``, then finished with a checkpoint at its end."""
    request = computed(it, prompt, generous=generous)
    it.keep(request, len(prompt), request.continued)
    it.finish(request)


def saved(it: TreeDriver, tip: Prefix, group: int, count: int = 99) -> None:
    assert it.backup(tip, group, count)
    it.end_copy(it.copies[-1], ok=True)


def test_a_second_group_that_keeps_all_is_backed_up_like_the_anchor() -> None:
    """Backups came for the anchor alone, so such a group never reached the host."""
    it = driver(small_spec([KeepAll()], page_tokens=1))
    request = computed(it, (0, 1))  # the driver compares the Backup effects
    it.finish(request)
    it.verify()


def test_a_second_group_that_keeps_all_leaves_in_order_of_use() -> None:
    """It was treated like a window: every page went to the cold end with its last lease."""
    it = driver(small_spec([KeepAll()], page_tokens=1))
    for prompt in ((0,), (1,), (2,)):
        served(it, prompt)
    it.finish(it.arrive((0,), 1, load=False))
    assert it.evict(DEVICE, 1, 1) == 1
    assert it.match((0,), 1)[0] == 1
    assert it.match((1,), 1)[0] == 0
    it.verify()


def test_what_a_dropped_leaf_kept_alive_is_pruned_with_it() -> None:
    """Pruning followed evictions of the state only: evicting the byteless anchor's leaf left the
    nodes above, which nothing could ever use."""
    it = driver(small_spec([KeepBoundary()], page_tokens=1, anchor_bytes=False))
    served(it, (0, 0, 0), generous=False)
    it.evict(DEVICE, 0, 1)
    assert not len(it.tree)
    it.verify()


def test_a_second_copy_from_storage_does_not_warm_a_page() -> None:
    """A landed copy stamped the page: nobody had used it, and it outranked its own parent."""
    it = driver(small_spec([KeepBoundary()], page_tokens=1))
    served(it, (0, 0, 0), generous=False)
    served(it, (1,), generous=False)
    saved(it, (0,), 0)
    it.evict(DEVICE, 1, 1)  # the state of (0, 0, 0): its checkpoint was the earlier one
    assert it.fetch((0, 0, 0), generous=False)
    it.end_fetch(it.fetches[0], landed=True)
    it.evict(DEVICE, 0, 2)
    assert it.match((1,), 1) == (1, 1, 1)
    it.drain()


def test_a_copy_that_lands_beside_a_leased_page_does_not_cool_it() -> None:
    """The rank of both copies became cold though a request stood on one of them."""
    it = driver(small_spec([KeepBoundary()], page_tokens=1))
    assert it.fetch((0,), generous=True)
    served(it, (1,))
    saved(it, (1,), 1)
    running = computed(it, (0,))
    it.end_fetch(it.fetches[0], landed=True)
    it.evict(HOST, 1, 1)
    assert it.match((1,), 1) == (1, 1, 1)
    it.finish(running)
    it.drain()

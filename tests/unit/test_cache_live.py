"""Live pages: where the state of each request is read and written, and who has the page."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from stratakv.cache.records import CacheUse
from stratakv.core.ids import NONE, GroupId
from stratakv.spec.retention import KeepBoundary, KeepLive
from stratakv.testing.specs import small_spec
from stratakv.tree.nodes import Tier
from tests.small_cache import SmallCache

PAGE = 2
STATE = GroupId(1)
SPEC = small_spec([KeepBoundary()], page_tokens=PAGE)
SCRATCH = small_spec([KeepBoundary(), KeepLive()], page_tokens=PAGE)
A, B, C = [1] * 4, [2] * 4, [3] * 4


def state_of(cache: SmallCache, row: int) -> tuple[int, int]:
    """Read from, written to."""
    slots = cache.rows.slots
    return slots.source(STATE).item(row), slots.own(STATE).item(row)


def step(cache: SmallCache, row: int, tokens: list[int], start: int, end: int) -> tuple[int, int]:
    """Where the state of a forward over tokens [start, end) was read and written."""
    cache.extend(np.array([row]), np.array([start]), np.array([end]))
    read = state_of(cache, row)
    cache.commit(row, np.array(tokens[:end], np.int32))
    return read


def test_a_request_begins_with_zero_and_goes_on_from_its_own_page():
    cache = SmallCache(SPEC, 8)
    row = cache.enter([*A, 5], more=4).row
    read, own = step(cache, row, [*A, 5], 0, 1)
    assert (read, own != NONE) == (NONE, True), "a page that somebody freed is no state"
    assert step(cache, row, [*A, 5], 1, 2)[1] != NONE
    cache.check()


def test_a_snapshot_is_given_without_a_copy_and_read_once_more():
    cache = SmallCache(SPEC, 8)
    row = cache.enter([*A, 5], more=4).row
    _, own = step(cache, row, [*A, 5], 0, 4)  # a checkpoint is due at its end
    assert own in cache.tiers.tree.held(Tier.DEVICE, STATE).tolist(), "the tree has the page itself"
    assert cache.rows.slots.own(STATE).item(row) == NONE, "and nobody writes to it any more"
    read, fresh = step(cache, row, [*A, 5], 4, 5)
    assert (read, fresh == own) == (own, False), "read from the snapshot, written elsewhere"
    read, still = step(cache, row, [*A, 5, 6], 5, 6)
    assert (read, still) == (fresh, fresh)
    cache.check()


def test_who_starts_from_a_snapshot_reads_it_and_never_writes_to_it():
    cache = SmallCache(SPEC, 8)
    cache.serve([*A, 5])
    rows = [cache.enter([*A, 5], more=1).row for _ in range(2)]
    seen = [step(cache, row, [*A, 5], 4, 5) for row in rows]
    snapshots = cache.tiers.tree.held(Tier.DEVICE, STATE).tolist()
    assert {read for read, _ in seen} <= set(snapshots)
    assert len({read for read, _ in seen}) == 1
    assert len({own for _, own in seen} - set(snapshots)) == 2
    cache.check()


@contextmanager
def all_but_one_held(cache: SmallCache) -> Iterator[None]:
    """Of three state pages two hold what others stand on."""
    leases = [cache.tiers.tree.leases.take(cache.ask(tokens).prefix.keys, 2) for tokens in (B, C)]
    yield
    for lease in leases:
        cache.tiers.tree.leases.release(lease)


def crowded() -> SmallCache:
    cache = SmallCache(SPEC, (16, 3))
    for tokens in (B, C):
        cache.serve([*tokens, 5])
    return cache


def test_keeping_a_snapshot_may_fail_and_going_on_may_not():
    cache = crowded()
    skipped = cache.tiers.pools.counters.snapshots_skipped
    with all_but_one_held(cache):
        row = cache.enter([*A, 5], more=1).row
        _, own = step(cache, row, [*A, 5], 0, 4)
        assert cache.rows.slots.own(STATE).item(row) == own, "no page is left to go on with"
        assert cache.tiers.pools.counters.snapshots_skipped == skipped + 1
        assert step(cache, row, [*A, 5], 4, 5) == (own, own)
    cache.check()


def test_the_last_state_is_given_even_where_no_page_is_left():
    cache = crowded()
    skipped = cache.tiers.pools.counters.snapshots_skipped
    with all_but_one_held(cache):
        row = cache.enter([*A, 5], more=1).row
        _, own = step(cache, row, [*A, 5], 0, 4)
        assert cache.tiers.pools.counters.snapshots_skipped == skipped + 1
        cache.release(row, np.array(A, np.int32))
        assert own in cache.tiers.tree.held(Tier.DEVICE, STATE).tolist()
    cache.check()
    held = len(cache.tiers.tree.held(Tier.DEVICE, STATE))
    assert cache.free_pages()[STATE] == 3 - held, "a live page was left behind"


@pytest.mark.parametrize("computed", range(5))
def test_who_ends_leaves_no_live_page_behind(computed: int):
    cache = SmallCache(SCRATCH, 8)
    row = cache.enter([*A, 5], more=1).row
    if computed:
        step(cache, row, [*A, 5], 0, computed)
    cache.drop(row)
    cache.check()
    assert cache.progress.flush()
    assert cache.free_pages() == [8] * 3


def test_who_goes_on_from_a_snapshot_of_its_own_gives_the_next_one_in_its_place():
    """Two pages, both its own: the old snapshot is let go of as the new one is kept."""
    cache = SmallCache(SPEC, (16, 2))
    cache.serve([*A, 5])
    longer = [*A, 5, 6, 7, 8]
    row = cache.enter(longer, more=1).row
    skipped = cache.tiers.pools.counters.snapshots_skipped
    _, own = step(cache, row, longer, 4, 6)
    assert own in cache.tiers.tree.held(Tier.DEVICE, STATE).tolist()
    assert cache.tiers.pools.counters.snapshots_skipped == skipped
    cache.check()


def test_who_says_more_keeps_its_state_though_checkpoints_of_others_have_the_room():
    """Beyond its prompt too: it is no milestone."""
    cache = crowded()
    tokens = [*A, 5, 6, 7, 8]
    row = cache.enter(tokens[:5], more=4).row
    step(cache, row, tokens, 0, 4)
    step(cache, row, tokens, 4, 5)
    skipped = cache.tiers.pools.counters.snapshots_skipped
    _, own = step(cache, row, tokens, 5, 6)
    assert own in cache.tiers.tree.held(Tier.DEVICE, STATE).tolist()
    assert cache.tiers.pools.counters.snapshots_skipped == skipped
    cache.check()


@pytest.mark.parametrize(
    "use", [CacheUse.ALL, CacheUse.READ, CacheUse.STORE, CacheUse.NOTHING], ids=str
)
def test_whether_a_state_goes_to_the_tree_is_known_before(use: CacheUse):
    cache = SmallCache(SPEC, 20)
    tokens = [*A, 5, 6, 7, 8]
    row = cache.enter(tokens[:5], more=4, use=use).row
    given = 0
    for end in range(1, 9):
        gives = cache.hand_off.gives_state(np.array([row]), np.array([end], np.int32))
        assert gives.dtype == np.bool_
        step(cache, row, tokens, end - 1, end)
        assert gives.tolist() == [cache.rows.slots.own(STATE).item(row) == NONE]
        given += gives.sum()
    assert bool(given) == (use is CacheUse.ALL)


@pytest.mark.parametrize("use", [CacheUse.ALL, CacheUse.STORE])
def test_one_that_the_host_cannot_save_leaves_its_state_to_who_goes_on_there(use: CacheUse):
    cache = SmallCache(SPEC, 20)
    row = cache.enter([*A, 5], more=9, use=use).row
    cache.compute(row, [*A, 5, 6], 0)
    retracted = cache.retract(row, np.array([*A, 5, 6], np.int32))
    assert retracted not in cache.retraction
    assert cache.enter([*A, 5, 6, 7]).cached.total == 6
    cache.check()

"""What a running request hands to the tree, step by step: full pages, marks, and no page twice."""

import numpy as np
import pytest

from stratakv.cache.records import CacheUse
from stratakv.core.ids import NONE, GroupId
from stratakv.policy.checkpoints import worth_keeping
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.spec.retention import KeepBoundary, KeepChunk, KeepLive, KeepWindow, needed
from stratakv.testing.specs import small_spec
from stratakv.tree.nodes import Tier
from tests.small_cache import SmallCache

PAGE = 2
SPECS = {
    "anchor": small_spec([], page_tokens=PAGE),
    "window": small_spec([KeepWindow(3)], page_tokens=PAGE),
    "chunk": small_spec([KeepChunk(4)], page_tokens=PAGE),
    "state": small_spec([KeepBoundary()], page_tokens=PAGE),
}
A = [1] * 9


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request: pytest.FixtureRequest) -> CacheSpec:
    return request.param


def one_by_one(cache: SmallCache, row: int, tokens: list[int], start: int = 0):
    for end in range(start + 1, len(tokens) + 1):
        cache.compute(row, tokens, end - 1, end)
        cache.check()
        yield end


def test_a_page_enters_the_tree_when_it_is_full_and_the_lease_moves_on(spec: CacheSpec):
    cache = SmallCache(spec, 16)
    row = cache.enter(A).row
    for end in one_by_one(cache, row, A):
        (lease,) = cache.tiers.tree.leases
        assert len(cache.tiers.tree) == lease.end == end // PAGE


def test_a_request_reads_what_its_rules_need_and_its_table_names_no_more(spec: CacheSpec):
    cache = SmallCache(spec, 16)
    row = cache.enter(A).row
    for end in one_by_one(cache, row, A):
        for group in spec.groups:
            if group.stateful:
                continue
            table = cache.rows.pages(group.id)[row]
            there = set(np.flatnonzero(table != NONE).tolist())
            full = end // PAGE * PAGE  # behind the lease's end nothing leaves
            least = set(needed(group.retention, end, PAGE))
            most = set(needed(group.retention, full, PAGE)) | set(
                range(full // PAGE, -(-end // PAGE))
            )
            assert least <= there <= most | least


def test_who_computes_the_same_reads_the_pages_of_who_was_first(spec: CacheSpec):
    cache = SmallCache(spec, 16)
    rows = [cache.enter(A).row for _ in range(2)]
    for row in rows:
        cache.compute(row, A, 0)
        cache.check()
    first, second = (cache.rows.pages(ANCHOR)[row][:4].tolist() for row in rows)
    assert first == second, "the second's own are free"
    assert cache.tiers.pools.counters.duplicate_pages >= 4
    assert len(cache.tiers.tree) == 4


def test_who_is_apart_hands_over_nothing_until_its_end_and_holds_no_more_than_it_needs(
    spec: CacheSpec,
):
    for use in (CacheUse.NOTHING, CacheUse.STORE, CacheUse.READ):
        cache = SmallCache(spec, 16)
        row = cache.enter(A, use=use).row
        for _ in one_by_one(cache, row, A):
            assert not len(cache.tiers.tree)
        for group in spec.groups:
            held = 16 - cache.tiers.pools.tiers[Tier.DEVICE][group.id].available()
            assert held <= len(needed(group.retention, len(A), PAGE)) + 1
        cache.release(row, np.array(A, np.int32))
        cache.check()
        assert (len(cache.tiers.tree) > 0) == (CacheUse.STORE in use)


@pytest.mark.parametrize("end", range(10))
def test_wherever_a_request_ends_the_longest_prefix_is_found_again(spec: CacheSpec, end: int):
    """Of its full pages, at the checkpoints that it was asked to keep."""
    cache = SmallCache(spec, 16)
    row = cache.enter(A).row
    cache.compute(row, A, 0, end)
    cache.release(row, np.array(A[:end], np.int32))
    cache.check()
    found = cache.admission.match(cache.ask(A).prefix, len(A))
    assert found.anchor_end == end // PAGE
    if end % PAGE == 0 or not any(group.stateful for group in spec.groups):
        assert found.end == end // PAGE
    assert cache.progress.flush()
    assert cache.free_pages() == [16] * len(spec.groups)


def test_what_is_dropped_leaves_what_the_tree_has_already(spec: CacheSpec):
    cache = SmallCache(spec, 16)
    row = cache.enter(A).row
    cache.compute(row, A, 0, 5)
    cache.drop(row)
    cache.check()
    assert len(cache.tiers.tree) == 2


def test_a_chunk_is_cut_where_a_state_is_kept_and_nowhere_else(spec: CacheSpec):
    cache = SmallCache(spec, 16)
    row = cache.enter(A, more=4).row
    stateful = any(group.stateful for group in spec.groups)
    assert (cache.cut(row) is not None) == stateful
    if stateful:
        cuts = []
        while (cut := cache.cut(row)) is not None:
            cache.compute(row, A, cuts[-1] if cuts else 0, cut)
            cuts.append(cut)
        assert cuts[-1] == 8, "the last page that one token must follow"
        assert len(cache.tiers.tree.held(Tier.DEVICE, GroupId(1))) >= 1


def test_where_prompts_part_is_a_checkpoint_from_the_first_page_on():
    """The end of a longer prompt may be too late: the window there is nobody's by then."""
    cache = SmallCache(SPECS["window"], 16)
    row = cache.enter(A).row
    cache.compute(row, A, 0)
    nodes = cache.tiers.tree.internals.nodes
    (lease,) = cache.tiers.tree.leases
    tip = lease.path.item(2)
    other = [*A[:6], *[2] * 6]
    admission = cache.enter(other)
    assert admission.cached.total == 6
    assert not nodes.checkpoint.item(tip)
    cache.compute(admission.row, other, 6, 8)
    assert nodes.checkpoint.item(tip)
    again = cache.enter([*A[:6], *[3] * 6])
    cache.check()
    assert again.cached.total == 6


def test_scratch_alone_is_no_reason_to_cut_at_a_milestone():
    cache = SmallCache(small_spec([KeepWindow(3), KeepLive()], page_tokens=PAGE), 20)
    row = cache.enter([1] * 25).row
    assert cache.cut(row) == 24, "the end of the prompt alone"


@pytest.mark.parametrize("rules", [[KeepWindow(3)], [KeepBoundary()]])
@pytest.mark.parametrize("turns", [False, True], ids=["an answer", "turns"])
def test_as_a_prefix_grows_milestones_are_thinned(rules, *, turns: bool):
    """They double in distance: of 60 pages that were each an end a few stay, and nothing but them
    and the end itself is held for anybody's sake."""
    cache = SmallCache(small_spec(rules, page_tokens=PAGE), 130, pages=70)
    tokens = [1] * 121
    if turns:
        for end in range(3, 122, PAGE):
            cache.serve(tokens[:end])
    else:
        row = cache.enter(tokens[:1], more=120).row
        for end in range(1, 121):
            cache.compute(row, tokens, end - 1, end)
        cache.release(row, np.array(tokens[:120], np.int32))
    tree = cache.tiers.tree
    lease = tree.leases.take(cache.ask(tokens).prefix.keys, 60)
    milestones = tree.checkpoints.milestones(lease)
    assert milestones == worth_keeping(milestones, 60, 1)
    assert 4 <= len(milestones) <= 12
    assert tree.checkpoints.at(lease, 60)
    tree.leases.release(lease)
    cache.check()

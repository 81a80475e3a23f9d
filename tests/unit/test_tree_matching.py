"""What a match finds and what a lease holds. The driver compares every answer with the model."""

import numpy as np
import pytest

from stratakv.core.ids import GroupId, TokenIds
from stratakv.core.page_keys import Namespace, page_keys
from stratakv.spec.retention import (
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    Retention,
)
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import DEVICE, HOST, Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_records import WalkRequest
from stratakv.tree.check import check
from stratakv.tree.order import COLD, WARM
from stratakv.tree.prefix_tree import PrefixTree


def tree(*rules: Retention, page: int = 1, anchor_bytes: bool = True) -> TreeDriver:
    spec = small_spec(rules, page_tokens=page, anchor_bytes=anchor_bytes)
    return TreeDriver(spec, [16] * len(spec.groups), [16] * len(spec.groups))


def run(it: TreeDriver, prompt: Prefix, *, chunk: int = 99, generous: bool = True) -> WalkRequest:
    request = it.arrive(prompt, len(prompt), load=False)
    while request.lease.end < len(prompt):
        assert it.extend(request, chunk, generous=generous)
    it.verify()
    return request


def serve(it: TreeDriver, prompt: Prefix, *, chunk: int = 99, generous: bool = True) -> None:
    request = run(it, prompt, chunk=chunk, generous=generous)
    it.keep(request, len(prompt), request.continued)
    it.finish(request)
    it.verify()


def test_a_longer_prompt_continues_the_shorter_one() -> None:
    it = tree()
    serve(it, (0, 1))
    assert it.match((0, 1, 2, 3), 4) == (2, 2, 2)
    serve(it, (0, 1, 2, 3))
    assert it.match((0, 1, 2, 3), 4) == (4, 4, 4)


@pytest.mark.parametrize(
    ("prompt", "hit"),
    [((0, 1, 9), 2), ((0, 9), 1), ((9, 1, 2), 0), ((1, 2), 0), ((0, 1, 2), 3), ((), 0)],
)
def test_a_match_ends_where_prompts_diverge(prompt: Prefix, hit: int) -> None:
    it = tree()
    serve(it, (0, 1, 2))
    assert it.match(prompt, len(prompt)) == (hit, hit, hit)


def test_two_branches_share_their_base_and_a_third_stops_at_it() -> None:
    it = tree()
    serve(it, (0, 1, 2))
    serve(it, (0, 1, 3))
    assert len(it.tree) == 4
    for prompt, hit in (((0, 1, 2), 3), ((0, 1, 3), 3), ((0, 1, 4), 2)):
        assert it.match(prompt, 3)[0] == hit


def test_a_limit_cuts_a_match() -> None:
    it = tree(KeepBoundary())
    serve(it, (0, 1, 2))
    assert it.match((0, 1, 2), 2) == (2, 2, 2)
    assert it.match((0, 1, 2), 0) == (0, 0, 0)


def tokens_of(count: int) -> TokenIds:
    return np.arange(count, dtype=np.int32)


def test_tokens_after_the_last_full_page_have_no_key() -> None:
    space = Namespace(model=b"m", spec_digest=b"s")
    assert page_keys(tokens_of(11), space, 4) == page_keys(tokens_of(8), space, 4)
    assert not page_keys(tokens_of(3), space, 4)


def test_namespaces_never_meet() -> None:
    spec = small_spec([], page_tokens=4)
    cache = PrefixTree(spec, 8)
    spaces = [
        Namespace(model=b"m", spec_digest=b"s", adapter=adapter, salt=salt)
        for adapter, salt in ((b"bc", "a"), (b"c", "ab"), (b"", ""))
    ]
    keys = [page_keys(tokens_of(8), space, 4) for space in spaces]
    cache.insert(keys[0], 0, [np.arange(2, dtype=np.int32)])
    assert [cache.match(path, 2).end for path in keys] == [2, 0, 0]


# -- rules of the other groups -------------------------------------------------------------------


def hole(it: TreeDriver, group: int, prefix: Prefix) -> None:
    """Take one page of a group out, by name."""
    row = it.tree.internals.nodes.index[it.keys(prefix)[-1]]
    others = [r for r in it.tree.internals.nodes.rows().tolist() if r != row]
    rank = it.tree.internals.nodes.rank[group]
    rank[others] = WARM + (1 << 40)
    rank[row] = 0
    it.model.clock = 1 << 41
    for name, spots in it.model.nodes.items():
        spots[group].used = 0 if name == prefix else 1 << 40
    it.tree.internals.pins.rebuild(DEVICE, GroupId(group))
    it.evict(DEVICE, group, 1)
    rank[it.tree.internals.nodes.need[group] == 0] = COLD
    it.tree.internals.pins.rebuild(DEVICE, GroupId(group))
    it.verify()


def kept_everywhere(it: TreeDriver, prompt: Prefix) -> None:
    """Serve a prompt with a checkpoint at every page, so that nothing of it is cold."""
    request = it.arrive(prompt, 0, load=False)
    for end in range(1, len(prompt) + 1):
        it.extend(request, 1, generous=True)
        it.keep(request, end, 0)
    it.finish(request)


def test_after_a_gap_a_prefix_is_usable_once_a_whole_window_follows() -> None:
    it = tree(KeepWindow(3))
    kept_everywhere(it, tuple(range(8)))
    hole(it, 1, (0, 1, 2))
    usable = [it.match(tuple(range(end)), end)[0] == end for end in range(1, 9)]
    assert usable == [True, True, False, False, False, True, True, True]


def test_a_short_prefix_without_a_gap_is_usable() -> None:
    it = tree(KeepWindow(100))
    serve(it, (0, 1))
    assert it.match((0, 1), 2) == (2, 2, 2)


def test_an_unaligned_window_needs_the_page_it_begins_in() -> None:
    it = tree(KeepWindow(5), page=2)
    kept_everywhere(it, tuple(range(6)))
    hole(it, 1, (0, 1, 2))
    assert [it.match(tuple(range(end)), end)[0] for end in (4, 5, 6)] == [2, 2, 6]


def test_a_chunk_needs_nothing_at_its_own_boundary() -> None:
    it = tree(KeepChunk(3))
    kept_everywhere(it, tuple(range(7)))
    hole(it, 1, (0, 1, 2, 3))
    assert [it.match(tuple(range(end)), end)[0] for end in range(3, 8)] == [3, 3, 3, 6, 7]


def test_without_the_last_state_an_earlier_checkpoint_serves() -> None:
    it = tree(KeepBoundary())
    kept_everywhere(it, (0, 1, 2, 3))
    hole(it, 1, (0, 1, 2, 3))
    assert it.match((0, 1, 2, 3), 4) == (3, 3, 4)


def test_a_window_and_a_state_are_needed_at_the_same_end() -> None:
    it = tree(KeepWindow(2), KeepBoundary())
    kept_everywhere(it, (0, 1, 2, 3))
    hole(it, 1, (0, 1, 2, 3))
    hole(it, 2, (0, 1, 2))
    assert it.match((0, 1, 2, 3), 4) == (2, 2, 4)


def test_scratch_is_never_needed_at_a_page_boundary() -> None:
    it = tree(KeepLive())
    serve(it, (0, 1), generous=False)
    assert it.match((0, 1), 2) == (2, 2, 2)


def test_a_node_outside_the_window_is_made_with_its_anchor_alone() -> None:
    it = tree(KeepWindow(1))
    serve(it, (0, 1, 2), generous=False)
    assert it.pools[DEVICE][0].available() == 13
    assert it.pools[DEVICE][1].available() == 15


def test_the_anchor_reaches_past_the_usable_end_at_a_branching_point() -> None:
    it = tree(KeepBoundary())
    serve(it, (0, 1, 2), generous=False)
    assert it.match((0, 1, 3), 3) == (0, 0, 2)
    request = it.arrive((0, 1, 3), 2, load=False)
    it.extend(request, 2, generous=False)
    it.keep(request, 2, 0)
    it.extend(request, 1, generous=False)
    it.finish(request)
    assert it.match((0, 1, 4), 3) == (2, 2, 2)


# -- leases --------------------------------------------------------------------------------------


def test_a_lease_holds_exactly_what_its_end_needs() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0, 1, 2, 3))
    held = it.arrive((0, 1, 2, 3), 4, load=False)
    assert it.evict(DEVICE, 1, 99) == 2
    assert it.evict(DEVICE, 0, 99) == 0
    it.verify()
    it.finish(held)
    assert it.evict(DEVICE, 0, 99) == 4


def test_a_held_leaf_survives_when_everything_else_goes() -> None:
    it = tree(KeepWindow(2))
    held = run(it, (0, 1))
    for symbol in range(2, 6):
        serve(it, (0, symbol))
    it.evict(DEVICE, 0, 99)
    assert it.match((0, 1), 2)[0] == 2
    assert len(it.tree) == 2
    it.finish(held)
    it.drain()


def test_one_of_two_holders_lets_go() -> None:
    it = tree(KeepWindow(1))
    serve(it, (0, 1))
    first, second = (it.arrive((0, 1), 2, load=False) for _ in range(2))
    it.finish(first)
    assert it.evict(DEVICE, 0, 99) == 0
    it.finish(second)
    assert it.evict(DEVICE, 0, 99) == 2


def test_a_lease_moves_on_with_its_request_and_lets_the_window_go() -> None:
    it = tree(KeepWindow(2))
    request = it.arrive(tuple(range(6)), 0, load=False)
    for _ in range(6):
        it.extend(request, 1, generous=False)
        it.verify()
    assert it.evict(DEVICE, 1, 99) == 4
    it.finish(request)


def test_a_second_release_is_loud() -> None:
    it = tree()
    serve(it, (0,))
    lease = it.tree.leases.take(it.keys((0,)), 1)
    it.tree.leases.release(lease)
    with pytest.raises(AssertionError, match="released twice"):
        it.tree.leases.release(lease)


def test_a_leak_is_loud() -> None:
    it = tree()
    serve(it, (0,))
    it.tree.leases.take(it.keys((0,)), 1)
    it.tree.leases._open.clear()
    with pytest.raises(AssertionError, match="pins leak or lack"):
        it.verify()


def test_an_empty_lease_pins_nothing() -> None:
    it = tree(KeepWindow(2))
    request = it.arrive((0,), 0, load=True)
    assert not len(it.tree.leases.pages(request.lease, GroupId(0)))
    it.verify()
    it.finish(request)


# -- insert --------------------------------------------------------------------------------------


def test_a_duplicate_costs_nothing_but_what_is_new() -> None:
    it = tree(KeepWindow(2))
    early, late = (it.arrive((0, 1, 2), 0, load=False) for _ in range(2))
    it.extend(early, 2, generous=True)
    it.extend(late, 3, generous=True)
    assert it.did["duplicate"] == 1
    assert it.pools[DEVICE][0].available() == 13
    it.verify()
    it.finish(early)
    it.finish(late)
    it.drain()


def test_pages_that_the_tree_holds_already_by_the_same_id_are_no_duplicates() -> None:
    it = tree()
    request = run(it, (0, 1))
    mine = it.tree.leases.pages(request.lease, GroupId(0))
    remaps, effects = it.tree.insert(it.keys((0, 1)), 0, [mine])
    assert not remaps
    assert [type(effect).__name__ for effect in effects] == ["Backup"]
    it.verify()


def test_a_recomputed_page_joins_its_host_copy() -> None:
    it = tree()
    serve(it, (0, 1))
    assert it.backup((0, 1), 0, 2)
    it.end_copy(it.copies[0], ok=True)
    it.evict(DEVICE, 0, 2)
    request = it.arrive((0, 1), 2, load=False)
    assert request.lease.end == 0
    it.extend(request, 2, generous=True)
    it.verify()
    assert it.evict(HOST, 0, 9) == 2
    it.finish(request)
    it.drain()


def test_what_was_evicted_comes_back_as_it_was() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0, 1, 2))
    before = [pool.available() for pool in it.pools[DEVICE]]
    it.evict(DEVICE, 0, 99)
    serve(it, (0, 1, 2))
    assert [pool.available() for pool in it.pools[DEVICE]] == before
    assert it.match((0, 1, 2), 3)[0] == 3


def test_a_chain_grows_one_run_and_a_branch_opens_another() -> None:
    it = tree()
    serve(it, (0, 1, 2, 3), chunk=1)
    assert len(it.tree.internals.nodes._runs) == 1
    serve(it, (0, 1, 4, 5))
    assert len(it.tree.internals.nodes._runs) == 2
    it.evict(DEVICE, 0, 1)  # the older tail, in the run that the branch hangs on
    serve(it, (0, 1, 2, 6))
    assert len(it.tree) == 6
    it.drain()
    assert not it.tree.internals.nodes._runs


@pytest.mark.parametrize("pages", [63, 64, 65, 66])
def test_a_prompt_may_be_longer_than_any_before(pages: int) -> None:
    spec = small_spec([KeepWindow(2)], page_tokens=1)
    it, prompt = TreeDriver(spec, [80, 80], [1, 1]), tuple(range(pages))
    assert it.tree.starts(pages) == [0, pages - 2]
    serve(TreeDriver(spec, [80, 80], [1, 1]), prompt, chunk=pages)
    serve(it, prompt, chunk=pages)
    again = it.tree.beyond(it.keys(prompt), it.tree.match(it.keys(prompt), pages), pages)
    assert (again.whole, again.device, again.states_only) == (pages, pages, False)


@pytest.mark.parametrize("pages", range(2, 9))
def test_a_match_knows_how_far_the_device_goes_wherever_that_ends(pages: int) -> None:
    it = tree()
    prompt = tuple(range(pages))
    serve(it, prompt)
    assert it.backup(prompt, 0, pages)
    it.end_copy(it.copies[0], ok=True)
    for left in range(pages - 1, -1, -1):
        assert it.evict(DEVICE, 0, 1) == 1
        assert it.match(prompt, pages) == (left, pages, pages)


@pytest.mark.parametrize("pages", [64, 65, 66, 131])
def test_a_match_may_be_the_first_to_look_at_so_long_a_prompt(pages: int) -> None:
    spec = small_spec([KeepWindow(2)], page_tokens=1)
    cache = PrefixTree(spec, pages)
    keys = page_keys(tokens_of(pages), Namespace(model=b"m", spec_digest=b"s"), 1)
    cache.insert(keys, 0, [np.arange(pages, dtype=np.int32)] * 2)
    assert cache.match(keys, pages) == (pages, pages, pages)


def test_beyond_a_match_it_is_reported_whether_states_alone_are_missing() -> None:
    it = tree(KeepWindow(1), KeepBoundary())
    serve(it, (0, 1, 2), generous=False)
    keys = it.keys((0, 1, 2))
    for group, alone in ((2, True), (1, False)):
        it.evict(DEVICE, group, 1)
        found = it.tree.match(keys, 3)
        assert found == (0, 0, 3)
        beyond = it.tree.beyond(keys, found, 3)
        assert (beyond.whole, beyond.device) == (3, 3)
        assert beyond.states_only is alone


# -- where a lease begins ------------------------------------------------------------------------


def test_a_lease_of_a_request_that_brings_live_pages_begins_where_it_says() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0, 1, 2, 3))
    keys, leases, nodes = it.keys((0, 1, 2, 3)), it.tree.leases, it.tree.internals.nodes
    taken = leases.take(keys, 4, starts=[0, 4])
    moved = leases.take(keys, 1)
    leases.advance(moved, keys, 3, starts=[0, 3])
    assert (taken.starts, moved.starts) == ([0, 4], [0, 3])
    assert not nodes.pins[DEVICE][1].any()
    check(it.tree)
    for lease in (taken, moved):
        leases.release(lease)
    check(it.tree)


def test_a_lease_that_let_go_takes_nothing_back_at_its_own_end() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0, 1, 2, 3))
    keys, leases = it.keys((0, 1, 2, 3)), it.tree.leases
    lease = leases.take(keys, 4)
    leases.let_go(lease, it.tree.starts(5))
    assert lease.starts == [0, 3]
    leases.advance(lease, keys, 4)
    assert lease.starts == [0, 3]
    leases.release(lease)
    check(it.tree)


# -- marks ---------------------------------------------------------------------------------------


def test_a_request_that_continued_nothing_makes_no_branch() -> None:
    it = tree(KeepBoundary())
    lease = it.tree.leases.take([], 0)
    assert it.tree.checkpoints.branch(lease, 0) == []


def test_a_checkpoint_does_not_take_its_own_place() -> None:
    it = tree(KeepBoundary())
    request = run(it, (0, 1))
    for _ in range(2):
        it.tree.checkpoints.keep(request.lease, 2, 0, 2)
        assert it.tree.checkpoints.at(request.lease, 2)

"""Seeded bugs: each is put into the tree, one at a time, and the tree machine must fail.

A bug is a few characters of one function's source. "Walks" is the most that finding it may take.

| bug                                  | what goes wrong                                           |
|--------------------------------------|-----------------------------------------------------------|
| tip-only pins                        | a lease holds the last page of each group only            |
| cascade while a group is in flight   | an anchor leaves under a copy of another group            |
| anchor absent with children          | a device-only node goes, its host-only children stay      |
| missing I/O pin                      | a backup does not hold the device page it reads           |
| a lease forgets the other groups     | only the anchor is pinned                                 |
| a waiting page is never offered      | what a pin below kept is not offered when that pin goes   |
| remap forgotten                      | a duplicate is freed under the request that reads it      |
| duplicate not freed                  | a page leaks with every duplicate                         |
| failed backup keeps its host page    | a host page leaks                                         |
| loading page taken for a duplicate   | a request waits for a load it was never told of           |
| branch superseded                    | a checkpoint at a branch goes cold                        |
| stale recency                        | using a prefix does not make it warmer                    |
| evictable count                      | a second pin is counted again                             |
| match ignores a group                | a prefix is used without the last group's pages           |
| chunk taken for a window             | a chunked prefix needs the wrong pages                    |
| ticket forgotten                     | a request reads a page before its load has landed         |
| useless nodes stay                   | a byteless anchor's leaves outlive their last page        |
| warm for nobody                      | a page that no checkpoint needs comes with a warm rank    |
| a new rank on one tier only          | a page moved between segments is not queued on the other  |
| a page set aside is lost             | an eviction of saved pages forgets those it passed over   |
| a hold's end warms the device        | a leaf comes up too early for its new rank and is dropped |
| a hold pins the device               | a retracted request keeps what it was to give up          |
| a hold passes over what is saved now | a host page leaves when its copy ends, under a hold       |
| a hold's end unpins the device       | as if it had stood there                                  |
| a hold is for ever                   | its host pins stay                                        |
| an old state stays pinned            | a lease that moves on without a state keeps the last one  |
| an absent state is pinned            | and the pin is left behind                                |
| a state behind a live page           | the lease says it holds the page that is not there        |
| a resumed lease wants everything     | pages are needed for which live pages stand               |
| a branch is replaced                 | a rolling checkpoint unmarks one at which the tree parts  |
| every rolling checkpoint stays       | a page per checkpoint of a long answer is kept            |
| the price of everything              | a request that brings live pages pays for what it brings  |
| what others hold is mine             | pages are counted on that stay when a lease ends          |
| a milestone is a checkpoint          | what it needs stays as long                               |
| a milestone is for ever              | it cannot be cleared                                      |
| room for milestones is made of checkpoints | what one needs is taken for a milestone             |
| who parts from a milestone leaves it one | a branching point is no checkpoint                    |
| a host copy will do                  | a state is not given because the host has an older copy   |
| one apart holds on                   | what is behind a request that goes on alone stays pinned  |
| one apart lets go too early          | of pages that it still reads                              |

Some of them need more walks than that, so a directed machine of a few steps looks for them. Also
``floorP(n)`` checkpoints, which are a choice of the policy and not of the tree.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stratakv.policy import checkpoints as checkpoint_policy
from stratakv.spec.groups import Home
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepWindow, Retention
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import DEVICE, Prefix
from stratakv.testing.tree_campaign import campaign
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_retraction import RetractionDriver
from stratakv.testing.tree_spilling import SpillDriver
from stratakv.testing.tree_spilling_machine import SpillingMachine
from stratakv.tree import matching
from stratakv.tree.checkpoints import Checkpoints
from stratakv.tree.copies import Copies
from stratakv.tree.eviction import Evictor
from stratakv.tree.insertion import Insertion
from stratakv.tree.leases import Leases
from stratakv.tree.matching import Matcher
from stratakv.tree.pins import Pins
from stratakv.tree.prefix_tree import PrefixTree
from stratakv.tree.segmented_queue import Pair
from stratakv.tree.spilled import Spilled
from stratakv.tree.write_back import WriteBackEviction
from tests.seeded_bugs import seed_bug

WALKS = 300
SEED = 300
CAUGHT = (AssertionError, KeyError, IndexError, ValueError)

Edit = tuple[Any, str, str, str]  # owner, function, its text, the bug's text

TIP_ONLY = "rows = rows[-1:]; "
REPLACED = (
    "[self._pins.cool(group, rows) for tip in path[instead_of - 1 : instead_of].tolist()"
    " if self._nodes.checkpoint.item(tip)"
    " for group, rows in self._mark(tip, self._needed(tip), MILESTONE)]"
)
HELD = "lease.host[group]"
HOST_ENDS = f"self._pins.unpin(HOST, group, {HELD})"
BUGS: dict[str, tuple[Edit, ...]] = {
    "tip-only pins": (
        (Pins, "pin", "before = pins[rows]", TIP_ONLY + "before = pins[rows]"),
        (Pins, "unpin", "after = pins[rows] - 1", TIP_ONLY + "after = pins[rows] - 1"),
    ),
    "cascade while a group is in flight": (
        (Evictor, "pinned", "total + self._nodes", "total + 0 * self._nodes"),
        (Evictor, "_pinned_one", "return any(", "return False and any("),
    ),
    "anchor absent with children": ((Evictor, "_clear_below", "level = below[:]", "level = []"),),
    "missing I/O pin": (
        (Copies, "begin_backup", "self._pins.pin(DEVICE, group, rows)", "pass"),
    ),
    "a lease forgets the other groups": (
        (Leases, "take", "pins.lease(path, pinned, again=again)",
         "pins.lease(path, pinned[:1] + [end] * len(pinned[1:]), again=again)"),
    ),
    "a waiting page is never offered": (
        (Pins, "offer_above", "if on_device:", "if row < 0:"),
    ),
    "remap forgotten": (
        (Insertion, "_meet", "found.remaps.append(Remap(group, at, canonical))", "pass"),
    ),
    "duplicate not freed": (
        (Insertion, "_meet", "found.effects.append(FreeDevice(group, mine[spare]))", "pass"),
    ),
    "failed backup keeps its host page": (
        (Copies, "end_backup", "effects.append(FreeHost(", "(FreeHost("),
    ),
    "loading page taken for a duplicate": (
        (Insertion, "_meet", "(state != Residency.LOADING) & ", ""),
    ),
    "branch superseded": ((Checkpoints, "_supersede", "<= 1]", "<= 9]"),),
    "stale recency": (
        (Pins, "release", "path, starts, self._clock, hit=False", "path, starts, 1, hit=False"),
    ),
    "evictable count": (
        (Pins, "pin", "len(rows) - int(np.count_nonzero(before))", "len(rows)"),
    ),
    "match ignores a group": (
        (Matcher, "__init__", "in spec.groups[1:]]", "in spec.groups[1:-1]]"),
    ),
    "chunk taken for a window": (
        (matching, "needed_starts", "end * page_tokens // tokens * tokens // page_tokens",
         "np.maximum(0, end * page_tokens - tokens) // page_tokens"),
    ),
    "ticket forgotten": ((Leases, "take", "if self._copies.loads:", "if False:"),),
    "useless nodes stay": ((Evictor, "_prune", "while row != NONE", "while row == 1 << 30"),),
    "a hold's end warms the device": (
        (Leases, "release", HOST_ENDS, f"self._pins.stamp(group, {HELD}, self._pins.tick());"
         + HOST_ENDS),
    ),
    "a hold pins the device": (
        (Leases, "_hold", "self._pins.pin(HOST,", "self._pins.pin(DEVICE,"),
    ),
    "a hold passes over what is saved now": (
        (Leases, "_hold", "self._pins.pin(HOST, group, rows)",
         "self._pins.pin(HOST, group, rows[READABLE_ON_HOST[self._nodes.state[group][rows]]])"),
    ),
    "a hold's end unpins the device": (
        (Leases, "release", HOST_ENDS, f"{HOST_ENDS}; self._pins.unpin(DEVICE, group, {HELD})"),
    ),
    "a hold is for ever": (
        (Leases, "release", HOST_ENDS, "pass"),
    ),
    "an old state stays pinned": (
        (Leases, "advance", "new = starts[group] = end", "new, starts[group] = old, end"),
    ),
    "an absent state is pinned": ((Leases, "advance", "entering = path[:0]", "pass"),),
    "a state behind a live page": (
        (Leases, "advance", "new = starts[group] = end", "new = end"),
    ),
    "a resumed lease wants everything": (
        (Leases, "take", "if starts is None else list(starts)", "if not starts or True else []"),
        (Leases, "take_to_load", "if starts is None else starts",
         "if not starts or True else starts"),
    ),
    "a branch is replaced": (
        (Checkpoints, "keep", "self._supersede(path[instead_of - 1 : instead_of])", REPLACED),
    ),
    "every rolling checkpoint stays": (
        (Checkpoints, "keep", "if continued < instead_of < len(path):", "if len(path) < 0:"),
    ),
    "the price of everything": (
        (Leases, "price", "count = self._nodes, end - starts[group]",
         "count = self._nodes, end - self._matcher.starts(end)[group]"),
    ),
    "what others hold is mine": ((Leases, "sole", "[rows] == 1", "[rows] >= 1"),),
    "one apart holds on": (
        (Leases, "let_go", "self._pins.unpin(DEVICE, group, behind)", "pass"),
    ),
    "one apart lets go too early": (
        (Leases, "let_go", "min(start, lease.end)", "min(start + 1, lease.end)"),
    ),
    "a milestone is a checkpoint": ((Pins, "cool", "needs < CHECKPOINT", "needs < 0"),),
    "a milestone is for ever": ((Checkpoints, "clear", "(tip), 0)", "(tip), MILESTONE)"),),
    "room for milestones is made of checkpoints": (
        (Evictor, "evict", "queue.first < below", "queue.first < EVERY"),
    ),
    "who parts from a milestone leaves it one": ((Checkpoints, "branch", "> 1", "> 9"),),
    "a host copy will do": ((PrefixTree, "holds", "ON_DEVICE.item(", "bool("),),
}  # fmt: skip
POLICY_BUGS: dict[str, tuple[str, Edit]] = {
    "warm for nobody": (
        "lfu", (Pins, "enter", "needs >= CHECKPOINT, ranks", "needs >= 0, ranks"),
    ),
    "a new rank on one tier only": (
        "slru", (Pair, "rank_anew", "in self.tiers:", "in self.tiers[:1]:"),
    ),
    "a page set aside is lost": (
        "priority", (WriteBackEviction, "_evict_clean", "in aside:", "in aside[:0]:"),
    ),
}  # fmt: skip
"""By the policy under which the machine looks for it."""


def test_without_a_bug_the_same_walks_pass() -> None:
    campaign(SEED, WALKS, shrink=False)


def copy_of_a_window() -> None:
    """A window's page is being saved; its node's anchor page is asked for."""
    it = served(KeepWindow(1), (0,))
    it.backup((0,), 1, 1)
    it.evict(DEVICE, 0, 1)
    it.drain()


def host_below_device() -> None:
    """Storage landed a page below one that is on the device alone, and that one is asked for."""
    it = served(KeepWindow(1), (0,))
    it.fetch((0, 1), generous=True)
    it.end_fetch(it.fetches[0], landed=True)
    it.evict(DEVICE, 0, 1)
    it.verify()


def two_turns_from_one() -> None:
    """Two requests continue one checkpoint, which is warmer than the one of another prompt."""
    it = served(KeepBoundary(), (1,), (0,))
    both = [it.arrive((0, symbol), 1, load=False) for symbol in (0, 1)]
    for request in both:
        it.extend(request, 1, generous=False)
    for request in both:
        it.keep(request, 2, request.continued)
        it.finish(request)
    it.evict(DEVICE, 1, 1)


def copy_below() -> None:
    """A page on the device alone waits for a copy of a group below it, on the host, and is asked
    for again when that has ended."""
    it = served(KeepBoundary(), (0,))
    it.backup((0,), 1, 1)
    it.end_copy(it.copies[0], ok=True)
    it.fetch((0, 1, 1), generous=False)
    it.end_fetch(it.fetches[0], landed=True)
    request = it.arrive((0, 1), 1, load=False)
    it.extend(request, 1, generous=True)
    it.finish(request)
    assert it.evict(DEVICE, 0, 1) == 1
    assert it.backup((0, 1), 1, 1)
    assert it.evict(DEVICE, 0, 1) == 0
    it.end_copy(it.copies[0], ok=True)
    assert it.evict(DEVICE, 0, 1) == 1


def answer_past_a_branch() -> None:
    """Another request parts from an answer at its rolling checkpoint; the answer goes on."""
    it = served(KeepBoundary())
    request = it.arrive((0, 0), 0, load=False)
    it.extend(request, 1, generous=False)
    it.roll(request)
    other = it.arrive((0, 1), 1, load=False)
    it.extend(other, 1, generous=False)
    it.extend(request, 1, generous=False)
    it.roll(request)
    it.verify()


def room_where_there_is_none() -> None:
    """All that there is, a checkpoint needs."""
    it = served(KeepBoundary(), (0,))
    it.evict_spare(DEVICE, 1, 1)


def milestone_that_is_not_worth_it() -> None:
    """It is cleared while its request runs."""
    it = served(KeepBoundary())
    request = it.arrive((0, 0), 0, load=False)
    it.extend(request, 1, generous=False)
    it.pave(request, 1)
    it.verify()
    it.pave(request, 1, every=1)
    it.verify()


def turn_from_a_milestone() -> None:
    """Another prompt parts from the first one where that has left a milestone."""
    it = served(KeepBoundary())
    request = it.arrive((0, 0), 0, load=False)
    it.extend(request, 1, generous=False)
    it.pave(request, 1)
    it.extend(request, 1, generous=False)
    it.keep(request, 2, 0)
    it.finish(request)
    other = it.arrive((0, 1), 1, load=False)
    it.extend(other, 1, generous=False)
    it.keep(other, 2, other.continued)
    it.finish(other)
    it.verify()


def back_where_it_needs_less() -> None:
    """A request that was retracted inside a page needs nothing of its window any more."""
    it = TreeDriver(small_spec([KeepWindow(1)], page_tokens=2), [8, 8], [8, 8])
    retraction = RetractionDriver(it)
    request = it.arrive((0, 1), 0, load=False)
    it.extend(request, 2, generous=False)
    retraction.retract(request, 1)
    for copy in list(it.copies):
        it.end_copy(copy, ok=True)
    again = retraction.resume(retraction.retracted[0], decline=False)
    assert again is not None
    it.verify()
    assert again.lease.starts == [0, 2]


DIRECTED: dict[str, Callable[[], None]] = {
    "cascade while a group is in flight": copy_of_a_window,
    "anchor absent with children": host_below_device,
    "a waiting page is never offered": copy_below,
    "branch superseded": two_turns_from_one,
    "a branch is replaced": answer_past_a_branch,
    "room for milestones is made of checkpoints": room_where_there_is_none,
    "a milestone is for ever": milestone_that_is_not_worth_it,
    "who parts from a milestone leaves it one": turn_from_a_milestone,
    "a resumed lease wants everything": back_where_it_needs_less,
    "the price of everything": back_where_it_needs_less,
}
"""What walks may miss: what they draw depends on which modules are there, constants of theirs
being tried too."""


def served(rule: Retention, *prompts: Prefix) -> TreeDriver:
    """A tree that has served ``prompts``, each with a checkpoint at its end."""
    it = TreeDriver(small_spec([rule], page_tokens=1), [8, 8], [8, 8])
    for prompt in prompts:
        request = it.arrive(prompt, 0, load=False)
        it.extend(request, len(prompt), generous=False)
        it.keep(request, len(prompt), 0)
        it.finish(request)
    return it


@pytest.mark.parametrize("bug", DIRECTED)
def test_a_seeded_bug_is_caught_by_a_directed_machine(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    DIRECTED[bug]()
    for edit in BUGS[bug]:
        seed_bug(monkeypatch, *edit)
    with pytest.raises(CAUGHT):
        DIRECTED[bug]()


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug not in DIRECTED])
def test_a_seeded_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for edit in BUGS[bug]:
        seed_bug(monkeypatch, *edit)
    with pytest.raises(CAUGHT):
        campaign(SEED, WALKS, shrink=False)


@pytest.mark.parametrize("bug", POLICY_BUGS)
def test_a_seeded_bug_is_caught_under_its_policy(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, edit = POLICY_BUGS[bug]
    seed_bug(monkeypatch, *edit)
    with pytest.raises(CAUGHT):
        campaign(SEED, WALKS, policy=policy, shrink=False)


SPILL_BUGS: dict[str, Edit] = {
    "what is read on the host is not pinned there": (
        Spilled, "pin", "self._pins.pin(HOST, group, rows[there])", "pass",
    ),
    "what is settled keeps its device page": (
        Spilled, "settle", "self._pins.unpin(DEVICE, group, rows[both])", "pass",
    ),
    "a spilled lease leaves its pins on the host": (
        Spilled, "unpin", "self._pins.unpin(HOST, group, rows[~np.isin(rows, near[group])])",
        "pass",
    ),
    "what a spilled request computes is not near": (
        Leases, "advance", "np.concatenate((lease.near[id_], entering))", "lease.near[id_]",
    ),
    "what a spilled request receives stays on the device": (
        Leases, "advance", "if received and group in lease.near:", "if False:",
    ),
    "what others stand on would leave": (
        Spilled, "leavable", "[group][nodes] == 1", "[group][nodes] >= 1",
    ),
    "the price of a pin that is there": (
        Spilled, "price", "nodes.pins[HOST][group][away] == 0",
        "nodes.pins[HOST][group][away] >= 0",
    ),
}  # fmt: skip


def one_that_comes_while_a_page_is_saved() -> None:
    """What it reads of that page is on the device until the copy has ended."""
    spec = small_spec([KeepAll()], page_tokens=1)
    anchor, selected = spec.groups
    it = TreeDriver(
        replace(spec, groups=(anchor, replace(selected, home=Home.HOST))), [8, 8], [8, 8]
    )
    first = it.arrive((0, 0), 0, load=False)
    it.extend(first, 2, generous=False)
    assert it.backup((0, 0), 1, 2)
    other = it.arrive((0, 0), 2, load=False, spill=True)
    it.verify()
    it.end_copy(it.copies[0], ok=True)
    SpillDriver(it).settle(other)
    it.verify()


def test_a_page_that_is_being_saved_is_read_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    one_that_comes_while_a_page_is_saved()
    seed_bug(
        monkeypatch, Spilled, "pin", "READABLE_ON_HOST[self._nodes.state[group][rows]]",
        "self._nodes.page[HOST][group][rows] >= 0",
    )  # fmt: skip
    with pytest.raises(CAUGHT):
        one_that_comes_while_a_page_is_saved()


@pytest.mark.parametrize("bug", SPILL_BUGS)
def test_a_seeded_bug_of_spilled_leases_is_caught(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_bug(monkeypatch, *SPILL_BUGS[bug])
    with pytest.raises(CAUGHT):
        campaign(0, WALKS // 2, shrink=False, machine=SpillingMachine)


@pytest.mark.parametrize("rule", [KeepWindow(4), KeepBoundary()], ids=["window", "state"])
@pytest.mark.parametrize("bug", [False, True], ids=["as it is", "floorP(n)"])
def test_a_prompt_of_exactly_k_pages_hits_when_it_comes_again(
    rule: Retention,
    bug: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if bug:
        edit = (checkpoint_policy, "last_end", "max(0, tokens - 1)", "tokens")
        seed_bug(monkeypatch, *edit)
    page, prompt = 2, (0, 1, 0, 1)
    it = TreeDriver(small_spec([rule], page_tokens=page), [8, 8], [8, 8])
    tokens = page * len(prompt)
    request = it.arrive(prompt, 0, load=False)
    for end in (checkpoint_policy.last_end(tokens, page), len(prompt)):
        if end > request.lease.end:
            it.extend(request, end - request.lease.end, generous=False)
        if end == checkpoint_policy.last_end(tokens, page):
            it.keep(request, end, request.continued)
    it.finish(request)
    it.evict(DEVICE, 1, 1)  # what no checkpoint needs goes first
    hit = it.match(prompt, (tokens - 1) // page)[0]
    assert hit == (0 if bug else len(prompt) - 1)

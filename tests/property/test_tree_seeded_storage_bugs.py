"""Seeded bugs in what the tree knows and holds of a store: each is put in, one at a time, and a
directed machine of a few steps must fail.

| bug                                  | what goes wrong                                           |
|--------------------------------------|-----------------------------------------------------------|
| pins not taken                       | a page leaves the host while it is written                |
| a node without its anchor            | a window's page is held, its node's anchor page leaves    |
| unpin forgotten                      | an anchor page stays on the host for ever                 |
| another group's unpin forgotten      | a window's page does                                      |
| mark not cleared on failure          | what was not written is never written again               |
| no need is asked                     | pages that no checkpoint needs are written                |
| written under a hole                 | a prefix is stored that nobody can read from its root     |
| held under a hole                    | a device page cannot leave that admission counts on       |
| a hold takes what is being saved     | a request waits for bytes that never come                 |
| a path that is being saved           | the same for the anchor                                   |
| forget leaves marks                  | an emptied store is not filled again                      |
| fetched and not marked               | every fetched page is written once more                   |
| a computed page is marked            | and never written                                         |
| a row's former marks                 | storage hears of pages that it never had                  |
| an object without bytes              | the same                                                  |
| only what is stale is told           | a parent looks older than its child, and leaves first     |
| a write is not told                  | the same                                                  |
| a fetch is not told                  | the same                                                  |
| a hold is for ever                   | its host pins stay                                        |
"""

from collections.abc import Callable
from typing import Any

import pytest

from stratakv.spec.retention import KeepBoundary, KeepWindow, Retention
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import DEVICE, HOST, Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_records import WalkRequest
from stratakv.testing.tree_storing import StoringDriver
from stratakv.tree import leases
from stratakv.tree.leases import Leases
from stratakv.tree.stored import StorageMarks
from tests.seeded_bugs import seed_bug

CAUGHT = (AssertionError, KeyError, IndexError, ValueError)
Edit = tuple[Any, str, str, str]  # owner, function, its text, the bug's text


class Bench:
    """A tree over a store that has served ``prompts``, each with a checkpoint at its end."""

    def __init__(
        self, rule: Retention, *prompts: Prefix, anchor_bytes: bool = True, generous: bool = False
    ) -> None:
        spec = small_spec([rule], page_tokens=1, anchor_bytes=anchor_bytes)
        self.it = TreeDriver(spec, [8, 8], [8, 8])
        self.store = StoringDriver(self.it)
        self.store.start()
        for prompt in prompts:
            self.serve(prompt, generous=generous)

    def serve(self, prompt: Prefix, *, generous: bool = False) -> None:
        request = self.it.arrive(prompt, 0, load=False)
        self.it.extend(request, len(prompt), generous=generous)
        self.it.keep(request, len(prompt), 0)
        self.it.finish(request)

    def save(self, tip: Prefix, *groups: int) -> None:
        for group in groups or (0, 1):
            self.it.backup(tip, group, 9)
            self.it.end_copy(self.it.copies[-1], ok=True)

    def written(self) -> None:
        for write in list(self.store.writes):
            self.store.end_write(write, [True] * len(write.writing.rows))

    def request(self, prompt: Prefix) -> WalkRequest:
        return self.it.arrive(prompt, len(prompt), load=True)

    def use(self, request: WalkRequest) -> None:
        self.store.step = 0  # storage has heard of the path just now
        self.store.use(request)

    def end(self) -> None:
        self.it.verify()
        self.store.drain()
        self.it.drain()


def a_path_is_written() -> None:
    bench = Bench(KeepWindow(1), (0, 0))
    bench.save((0, 0))
    bench.it.verify()
    assert len(bench.store.writes) == 2, "both groups of it"
    for group in (1, 0):
        bench.it.evict(HOST, group, 9)
    bench.it.verify()
    assert bench.it.match((0, 0), 2)[1] == 2
    for write, kept in zip(list(bench.store.writes), ([True, False], [False]), strict=True):
        bench.store.end_write(write, kept)
        bench.it.verify()
    bench.end()


def a_window_page_is_written_alone() -> None:
    bench = Bench(KeepWindow(1), (0, 0))
    bench.save((0, 0))
    anchor, window = bench.store.writes
    bench.store.end_write(anchor, [True, True])
    bench.it.evict(HOST, 0, 9)
    bench.it.verify()
    bench.store.end_write(window, [True])
    bench.end()


def a_page_that_nobody_needs() -> None:
    bench = Bench(KeepWindow(1), (0, 0), generous=True)
    bench.save((0, 0))
    bench.end()


def a_window_page_without_its_path() -> None:
    bench = Bench(KeepWindow(1), (0, 0))
    bench.save((0, 0), 1)
    bench.end()


def a_hold_below_a_device_page() -> None:
    bench = Bench(KeepWindow(1), (0,))
    it = bench.it
    it.fetch((0, 1), generous=True)
    it.end_fetch(it.fetches[0], landed=True)
    bench.store.prefetch((0, 1, 1))
    bench.store.squeeze(0)
    bench.end()


def a_hold_while_a_window_page_is_saved() -> None:
    bench = Bench(KeepWindow(1), (0, 0))
    bench.save((0, 0), 0)
    bench.it.backup((0, 0), 1, 9)
    bench.store.prefetch((0, 0, 1))
    bench.it.verify()
    bench.it.end_copy(bench.it.copies[0], ok=False)
    bench.end()


def a_hold_while_its_path_is_saved() -> None:
    bench = Bench(KeepWindow(1), (0, 0))
    bench.it.backup((0, 0), 0, 9)
    bench.store.prefetch((0, 0, 1))
    bench.it.end_copy(bench.it.copies[0], ok=False)
    bench.end()


def a_store_is_emptied() -> None:
    bench = Bench(KeepWindow(1), (0, 0))
    bench.save((0, 0))
    bench.written()
    bench.store.forget()
    bench.end()


def a_fetch_lands() -> None:
    bench = Bench(KeepWindow(1))
    bench.store.prefetch((0, 1))
    bench.store.end_prefetch(bench.it.prefetches[0], 9)
    bench.it.verify()
    bench.store.let_go(bench.store.landed[0])
    bench.end()


def computed_again_after_a_fetch() -> None:
    """A window's page that storage has leaves; the node stays, and it is computed anew."""
    bench = Bench(KeepWindow(1), (0, 0))
    bench.save((0, 0))
    bench.written()
    for tier in (DEVICE, HOST):
        bench.it.evict(tier, 1, 9)
    bench.serve((0, 0))
    bench.save((0, 0), 1)
    bench.end()


def a_row_is_used_again() -> None:
    """By a node that has no page of the window."""
    bench = Bench(KeepWindow(1), (0,))
    bench.save((0,))
    bench.written()
    for tier in (DEVICE, HOST):
        bench.it.evict(tier, 0, 9)
    bench.serve((1, 1))
    bench.save((1, 1), 0)
    bench.use(bench.request((1, 1)))
    bench.end()


def an_anchor_without_bytes_lands() -> None:
    bench = Bench(KeepBoundary(), anchor_bytes=False)
    bench.store.prefetch((0,))
    bench.store.end_prefetch(bench.it.prefetches[0], 9)
    bench.use(bench.request((0,)))
    bench.end()


def a_path_grows_that_storage_has_in_part() -> None:
    bench = Bench(KeepWindow(1), (0,))
    bench.save((0,))
    bench.written()
    bench.use(bench.request((0,)))
    bench.serve((0, 0))
    bench.save((0, 0))
    bench.written()
    bench.use(bench.request((0, 0)))
    bench.end()


def a_page_is_written_late() -> None:
    bench = Bench(KeepWindow(1), (0, 0))
    bench.save((0, 0), 0)
    bench.written()
    request = bench.request((0, 0))
    bench.use(request)
    bench.save((0, 0), 1)
    bench.written()
    bench.use(request)
    bench.end()


def a_page_is_fetched_late() -> None:
    bench = Bench(KeepWindow(1), (0, 0))
    bench.save((0, 0), 0)
    bench.written()
    bench.use(bench.request((0, 0)))
    bench.it.finish(bench.it.requests[0])
    bench.it.evict(DEVICE, 1, 9)
    bench.store.prefetch((0, 0))
    bench.store.end_prefetch(bench.it.prefetches[0], 9)
    bench.use(bench.request((0, 0)))
    bench.end()


PIN_BOTH = "for held in {ANCHOR, group}:"
BUGS: dict[str, tuple[Callable[[], None], tuple[Edit, ...]]] = {
    "pins not taken": (
        a_path_is_written,
        ((StorageMarks, "begin", "self._pins.pin(Tier.HOST, held, rows)", "pass"),),
    ),
    "a node without its anchor": (
        a_window_page_is_written_alone,
        (
            (StorageMarks, "begin", PIN_BOTH, "for held in {group}:"),
            (StorageMarks, "end", "self._pins.unpin(Tier.HOST, ANCHOR,",
             "writing.group or self._pins.unpin(Tier.HOST, ANCHOR,"),
        ),
    ),
    "unpin forgotten": (
        a_path_is_written,
        ((StorageMarks, "end", "self._pins.unpin(Tier.HOST, ANCHOR, writing.rows)", "pass"),),
    ),
    "another group's unpin forgotten": (
        a_path_is_written,
        (
            (StorageMarks, "end",
             "self._pins.unpin(Tier.HOST, writing.group, writing.rows)", "pass"),
        ),
    ),
    "mark not cleared on failure": (
        a_path_is_written,
        ((StorageMarks, "end", "self._marks[writing.group][writing.rows[~kept]] = False", "pass"),),
    ),
    "no need is asked": (
        a_page_that_nobody_needs,
        ((StorageMarks, "wanted", "if not self._keeps_all[group]:", "if False:"),),
    ),
    "written under a hole": (
        a_window_page_without_its_path, ((StorageMarks, "wanted", "] < whole]", "] >= 0]"),),
    ),
    "held under a hole": (
        a_hold_below_a_device_page,
        ((Leases, "hold_present", "whole = host_prefix(nodes, path)", "whole = end"),),
    ),
    "a hold takes what is being saved": (
        a_hold_while_a_window_page_is_saved,
        ((Leases, "hold_present", "rows[READABLE_ON_HOST[nodes.state[group][rows]]]",
          "rows[nodes.page[Tier.HOST][group][rows] != NONE]"),),
    ),
    "a path that is being saved": (
        a_hold_while_its_path_is_saved,
        (
            (leases, "host_prefix", "~READABLE_ON_HOST[nodes.state[ANCHOR][path]]",
             "nodes.page[Tier.HOST][ANCHOR][path] < 0"),
        ),
    ),
    "forget leaves marks": (
        a_store_is_emptied, ((StorageMarks, "forget", "marks[:] = False", "pass"),),
    ),
    "fetched and not marked": (
        a_fetch_lands, ((StorageMarks, "entered", "= fetched and", "= False and"),),
    ),
    "a computed page is marked": (
        computed_again_after_a_fetch,
        ((StorageMarks, "entered", "if self.active:", "if self.active and fetched:"),),
    ),
    "a row's former marks": (
        a_row_is_used_again, ((StorageMarks, "grown", "marks[rows] = False", "pass"),),
    ),
    "an object without bytes": (
        an_anchor_without_bytes_lands,
        ((StorageMarks, "entered", "fetched and self._has_bytes[group]", "fetched"),),
    ),
    "only what is stale is told": (
        a_path_grows_that_storage_has_in_part,
        ((StorageMarks, "to_touch", "lease.path[: stale.item(-1) + 1]", "lease.path[stale]"),),
    ),
    "a write is not told": (
        a_page_is_written_late, ((StorageMarks, "begin", "self._touched[rows] = NEVER", "pass"),),
    ),
    "a fetch is not told": (
        a_page_is_fetched_late, ((StorageMarks, "entered", "self._touched[rows] = NEVER", "pass"),),
    ),
    "a hold is for ever": (
        a_fetch_lands,
        ((Leases, "release", "self._pins.unpin(HOST, group, lease.host[group])", "pass"),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walk, edits = BUGS[bug]
    walk()
    for edit in edits:
        seed_bug(monkeypatch, *edit)
    with pytest.raises(CAUGHT):
        walk()

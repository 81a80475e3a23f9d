"""Seeded bugs of requests that are spilled: each is put into the code, one at a time, and random
walks beside books (``tests/spilling_machine.py``) must fail. A bug is a few characters of one
function's source."""

from functools import partial

import pytest

from stratakv.cache.admit import Admitter
from stratakv.cache.commits import Committer
from stratakv.cache.kv_cache import KVCache
from stratakv.cache.prices import AdmissionLimits, Prices
from stratakv.cache.spilling import Spilling
from stratakv.memory.block_table import SpilledPages
from stratakv.policy.spilling import SpillRules
from tests.property.test_spilling_machine import SPECS, walk
from tests.seeded_bugs import seed_bug
from tests.unit import test_cache_spilled_receives as receives
from tests.unit import test_cache_spilled_resume as resume

WALKS, STEPS = 60, 70
CAUGHT = (AssertionError, IndexError, KeyError, ValueError)
BUGS = {
    "a page less is staged": (SpillRules, "staging", "+ FILLING_PAGES", "+ FILLING_PAGES - 1"),
    "a chunk of a prompt is booked as one token": (
        AdmissionLimits, "staged",
        "min(self.ahead_of(left), max(self.steps_at_once, left))", "self.steps_at_once",
    ),
    "a buffer is not freed": (
        Spilling, "close", ".free(spilled.buffer[row].copy())", ".available()",
    ),
    "host pages that were being received are not freed": (
        Spilling, "close", ".free(self._receiving(row, group))", ".available()",
    ),
    "what came to the host does not enter the tree": (
        Committer, "_hand_over", "received and self._tables.spilled", "False",
    ),
    "what a row read on the host stays in its table": (
        SpilledPages, "close_row", "self.host[row] = NONE", "pass",
    ),
}  # fmt: skip


def walk_on():
    for seed in range(WALKS):
        walk(SPECS["selected"], seed, STEPS)


RARE = {
    "what was asked for while the host was full is forgotten": (
        resume.test_what_the_host_had_no_room_for_is_asked_for_again_by_who_runs_alone,
        (KVCache, "fits", "self._spilling.save()", "pass"),
    ),
    "who comes back gives up what it comes back to": (
        resume.test_who_comes_back_keeps_what_it_has_and_another_one_that_waits_lets_go,
        (Admitter, "_with_room", "self.give_up(mine)", "self.give_up()"),
    ),
    "a chunk of a prompt is not booked by who is spilled": (
        resume.test_who_is_spilled_in_the_middle_of_its_prompt_books_a_chunk,
        (Spilling, "_spill", "self.rules.staging(sequence.at_once)", "self.rules.staging(1)"),
    ),
    "what was on the host before is read there only after the next copy": (
        partial(walk, SPECS["selected"], 226, 200),
        (KVCache, "fits", "self._spilling.settle()", "pass"),
    ),
    "what has come twice is read where the tree has it not": (
        partial(receives.what_is_being_saved_as_it_comes_is_read_on_the_device, ok=True),
        (Spilling, "received", "self._tables.pages(group)[row, : lease.end] = there", "pass"),
    ),
    "who comes first is waited for as if it stayed on the device": (
        receives.test_who_comes_first_leaves_room_where_it_may_come_in_spilled,
        (Prices, "_lacking", "use is CacheUse.ALL", "False"),
    ),
    "what is received on the host is booked as if it could be taken back": (
        partial(receives.who_runs_reaches_its_end_beside_all_that_may_receive, 33),
        (
            SpillRules,
            "spilled",
            "wanted.fixed[group], wanted.rest[group]",
            "0, wanted.fixed[group] + wanted.rest[group]",
        ),
    ),
}
"""What walks come by too seldom has a test of its own."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_caught(monkeypatch, bug):
    seed_bug(monkeypatch, *BUGS[bug])
    with pytest.raises(CAUGHT):
        walk_on()


@pytest.mark.parametrize("bug", RARE)
def test_a_seeded_bug_that_is_rare_is_caught(monkeypatch, bug):
    test, planted = RARE[bug]
    seed_bug(monkeypatch, *planted)
    with pytest.raises(CAUGHT):
        test()

"""Seeded bugs: each is put into the prefetch's decisions, one at a time, and the walks must fail.

| bug                              | what goes wrong                                               |
|----------------------------------|---------------------------------------------------------------|
| every page is asked for          | storage is asked for what no end needs                        |
| what the tree has is asked for   | and fetched a second time                                     |
| the last group is forgotten      | an end is used at which a group lacks pages                   |
| bytes that are not there         | a group without bytes is taken for missing                    |
| a byteless object                | storage is asked for a group without bytes                    |
| off by one                       | the first page that an end needs is not asked                 |
| the tree's own end               | a prefetch of nothing                                         |
| pages on the host are paid again | a fetch is cut short although it would fit                    |
| only the anchor must fit         | another group's space is overdrawn                            |
| the first group decides          | a group that does not shrink is forgotten                     |
| a wish evicts                    | good pages leave for a fetch that will be cut short anyway    |
| evict without need               | pages leave although there was room                           |
| too short is fetched             | the threshold is not asked                                    |
| shrunk below the threshold       | a shorter end is fetched that is not worth it                 |
| landed below the threshold       | as above, after the fetch                                     |
| the whole length in flight       | tokens in flight count what was not fetched                   |
| tokens stay in flight            | an exit does not give them back                               |
| a rank lands alone               | ranks' trees differ                                           |
| a partial window                 | an end is landed whose pages did not all arrive               |
| landed beyond the plan           | pages are taken for fetched that never were asked for         |
| everything is kept               | a shorter landing adopts what it does not need                |
| found is what can be used        | an incomplete window is not counted                           |
| a loss is counted twice          | reasons add up to more than was found                         |
| the wrong reason                 | a state that is missing is a window                           |
| the mildest reason               | a corrupt page is counted as not tried                        |
"""

import random

import pytest

from stratakv.policy import prefetch
from stratakv.policy.prefetch import PrefetchRules
from stratakv.policy.prefetch_ends import Ends
from stratakv.policy.prefetch_reasons import Tally
from tests.prefetch_model import Walk
from tests.seeded_bugs import seed_bug

WALKS = 1500
BUGS = {
    "every page is asked for": (Ends, "question", "np.cumsum(steps[:-1]) > 0", "steps[:-1] < 99"),
    "what the tree has is asked for": (Ends, "question", "~held.present[group]", "True"),
    "the last group is forgotten": (Ends, "usable", "in self._groups", "in self._groups[:-1]"),
    "bytes that are not there": (Ends, "_complete", "not self._with_bytes[group]", "False"),
    "a byteless object": (Ends, "plan", "pages & there", "pages"),
    "off by one": (Ends, "_complete", "complete_ends(starts, ", "complete_ends(starts + 1, "),
    "the tree's own end": (Ends, "usable", "held.base + 1", "held.base"),
    "pages on the host are paid again": (
        Ends,
        "costs",
        "~held.present[group]",
        "np.ones_like(held.present[group])",
    ),
    "only the anchor must fit": (
        prefetch,
        "_fits",
        "costs <= free[:, None]",
        "costs[:1] <= free[:1, None]",
    ),
    "the first group decides": (
        PrefetchRules,
        "answered",
        "costs[:, reach] <= free",
        "costs[:1, reach] <= free[:1]",
    ),
    "a wish evicts": (PrefetchRules, "answered", "free + np.array(", "free + 9 + np.array("),
    "evict without need": (PrefetchRules, "answered", "<= free).all()", "< free).all()"),
    "too short is fetched": (PrefetchRules, "answered", "gain < self", "gain < 0 * self"),
    "shrunk below the threshold": (
        PrefetchRules,
        "answered",
        "agreed & self._worthy(held)",
        "agreed",
    ),
    "landed below the threshold": (
        PrefetchRules,
        "arrived",
        "self._worthy(held)",
        "~agreed | agreed",
    ),
    "the whole length in flight": (
        PrefetchRules,
        "_fetch",
        "end - held.base",
        "held.limit - held.base",
    ),
    "tokens stay in flight": (PrefetchRules, "tokens", "else 0", "else 1"),
    "a rank lands alone": (
        PrefetchRules,
        "arrived",
        "last_of(agreed & worthy)",
        "last_of(self.landable(state, arrivals) & worthy)",
    ),
    "a partial window": (
        PrefetchRules,
        "landable",
        "arrivals == FetchOutcome.ARRIVED",
        "arrivals <= FetchOutcome.NOT_TRIED",
    ),
    "landed beyond the plan": (PrefetchRules, "landable", "ends[plan.end + 1 :] = False", "pass"),
    "everything is kept": (Ends, "kept", "& (pages < end)", ""),
    "found is what can be used": (Ends, "stored_end", "min(reach, last)", "held.base"),
    "a loss is counted twice": (Tally, "cut", "self.end - end))", "self.end - self.base))"),
    "the wrong reason": (PrefetchRules, "_tally_of", "all(group.stateful", "any(group.stateful"),
    "the mildest reason": (
        prefetch,
        "reason_of",
        "arrivals.max(",
        "(arrivals * (arrivals == 1)).max(",
    ),
}


def walk_on():
    for seed in range(WALKS):
        Walk(random.Random(seed)).run()


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_caught(monkeypatch, bug):
    seed_bug(monkeypatch, *BUGS[bug])
    with pytest.raises((AssertionError, IndexError, ValueError)):
        walk_on()


def test_without_a_bug_the_same_walks_pass():
    walk_on()

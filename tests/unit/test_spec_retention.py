"""What follows from ``needed`` beside the property tests: where a prefix is complete, which keys a
query sees, and what each rule is called outside.
"""

import numpy as np
import pytest

from stratakv.spec.event_kinds import event_kind
from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    complete_ends,
    first_key,
    needed,
    needed_starts,
)

PAGE, PAGES = 4, 12
RULES = [KeepAll(), KeepWindow(6), KeepWindow(40), KeepChunk(8), KeepBoundary(), KeepLive()]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_prefix_is_complete_where_nothing_that_it_needs_is_missing(rule):
    random = np.random.default_rng(0)
    starts = needed_starts(rule, PAGE, PAGES)
    for share in (0.0, 0.5, 0.9, 1.0):
        there = random.random(PAGES) < share
        found = complete_ends(starts, there)
        wanted = [all(there[p] for p in needed(rule, n * PAGE, PAGE)) for n in range(PAGES + 1)]
        assert found.tolist() == wanted
        assert found.dtype == np.bool_


@pytest.mark.parametrize(
    ("rule", "first"),
    [
        (KeepAll(), [0, 0, 0, 0]),
        (KeepWindow(3), [0, 0, 1, 7]),
        (KeepChunk(4), [0, 0, 0, 8]),
    ],
    ids=str,
)
def test_the_first_key_that_a_query_sees(rule, first):
    assert first_key(rule, np.array([0, 2, 3, 9])).tolist() == first


def test_rules_are_told_outside_in_the_words_of_kv_events():
    assert [event_kind(rule) for rule in RULES] == [
        ("full_attention", None),
        ("sliding_window", 6),
        ("sliding_window", 40),
        ("chunked_local_attention", None),
        ("mamba", None),
        ("unknown", None),
    ]

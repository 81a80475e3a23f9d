"""What follows from ``needed`` beside the property tests: where a prefix is complete, which keys a
query sees, and what each rule is called outside.
"""

import numpy as np
import pytest

from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    complete_ends,
    event_kind,
    first_key,
    needed,
    needed_starts,
    peak_pages,
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


@pytest.mark.parametrize("rule", [KeepBoundary(), KeepLive()], ids=str)
def test_a_state_has_no_keys_to_see(rule):
    with pytest.raises(AssertionError, match="holds states, not keys"):
        first_key(rule, np.array([0]))


@pytest.mark.parametrize(
    ("rule", "total", "chunk", "pages"),
    [
        (KeepAll(), 50, 8, 13), (KeepAll(), 48, 8, 12),
        # Behind, the window in started pages; ahead, a chunk that begins at a page's last token.
        (KeepWindow(6), 1000, 8, 2 + 3), (KeepWindow(8), 1000, 9, 2 + 3),
        (KeepWindow(6), 1000, 10, 2 + 4), (KeepWindow(6), 11, 8, 3), (KeepWindow(6), 1000, 1, 3),
        # Of a chunk of 7, at a page boundary, 6 tokens at most.
        (KeepChunk(7), 1000, 8, 2 + 3), (KeepChunk(8), 1000, 8, 1 + 3), (KeepChunk(4), 1000, 1, 1),
        (KeepBoundary(), 1000, 8, 2), (KeepBoundary(), 5, 8, 2), (KeepBoundary(), 4, 8, 1),
        (KeepLive(), 1000, 8, 1),
    ],
    ids=str,
)  # fmt: skip
def test_the_most_pages_that_a_request_holds(rule, total, chunk, pages):
    found = peak_pages(rule, total, chunk, PAGE)
    assert (found, type(found)) == (pages, int)


@pytest.mark.parametrize("rule", RULES[:4], ids=str)
@pytest.mark.parametrize("chunk", [1, 5, 8])
def test_no_step_holds_more_than_the_most_and_some_step_holds_it(rule, chunk):
    total = 120
    held = [
        -(-min(start + chunk, total) // PAGE) - needed(rule, start // PAGE * PAGE, PAGE).start
        for start in range(total)
    ]
    assert max(held) == peak_pages(rule, total, chunk, PAGE)


def test_rules_are_described_outside_in_the_words_of_kv_events():
    assert [event_kind(rule) for rule in RULES] == [
        ("full_attention", None),
        ("sliding_window", 6),
        ("sliding_window", 40),
        ("chunked_local_attention", None),
        ("mamba", None),
        ("unknown", None),
    ]

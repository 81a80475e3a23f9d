"""``needed`` against the table of the design, taken literally: sets of tokens, then their pages."""

from typing import assert_never

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    Retention,
    handed_over,
    needed,
    needed_starts,
    peak_pages,
)

SIZE = st.integers(1, 80)
RULES = st.one_of(
    st.just(KeepAll()), st.builds(KeepWindow, SIZE), st.builds(KeepChunk, SIZE),
    st.just(KeepBoundary()), st.just(KeepLive()),
)  # fmt: skip
PAGE = st.integers(1, 40)
END = st.integers(0, 300)


def by_definition(rule: Retention, end: int, page: int) -> set[int]:
    """Pages that hold the tokens which the design's table names, and the live page or slot."""
    snapshot: set[int] = set()
    match rule:
        case KeepAll():
            tokens = range(end)
        case KeepWindow(size):
            tokens = range(max(0, end - size), end)
        case KeepChunk(size):
            tokens = range(end // size * size, end)
        case KeepBoundary():
            tokens = range(0)
            # The snapshot taken at ``end`` is that of the page which ends there.
            snapshot = {p for p in range(end + 1) if (p + 1) * page == end}
        case KeepLive():
            tokens = range(0)
        case _:
            assert_never(rule)
    live = {end // page} if end % page else set[int]()
    return {token // page for token in tokens} | snapshot | live


@settings(deadline=None)
@given(RULES, END, PAGE)
@example(KeepWindow(100), 30, 16)  # larger than the prefix
@example(KeepWindow(16), 64, 16)  # a multiple of the page
@example(KeepWindow(17), 64, 16)  # one more than a multiple
@example(KeepWindow(1), 64, 16)
@example(KeepWindow(8), 8, 1)  # one token per page
@example(KeepChunk(8), 40, 16)  # a chunk begins inside the live page
@example(KeepChunk(16), 64, 16)  # nothing of a chunk that begins at the end
@example(KeepChunk(24), 48, 16)
@example(KeepBoundary(), 64, 16)
@example(KeepBoundary(), 65, 16)
@example(KeepBoundary(), 0, 16)
@example(KeepLive(), 64, 16)
@example(KeepLive(), 70, 16)
def test_needed_is_the_designs_table(rule: Retention, end: int, page: int) -> None:
    assert set(needed(rule, end, page)) == by_definition(rule, end, page)


@settings(deadline=None)
@given(RULES, END, PAGE)
@example(KeepWindow(16), 64, 16)
@example(KeepWindow(17), 64, 16)
@example(KeepChunk(24), 48, 16)
@example(KeepBoundary(), 64, 16)
def test_handed_over_is_what_is_needed_and_what_the_same_prompt_can_hit(
    rule: Retention, end: int, page: int
) -> None:
    taken, span = handed_over(rule, end, page), needed(rule, end, page)
    hit = max(0, end - 1) // page * page
    state = isinstance(rule, KeepBoundary | KeepLive)
    assert taken.stop == span.stop
    assert taken.start == (span.start if state else min(span.start, needed(rule, hit, page).start))
    if end:
        assert len(taken) <= peak_pages(rule, end, 1, page), "it is booked"


@settings(deadline=None)
@given(RULES, PAGE, st.integers(0, 20))
def test_one_table_of_starts_says_what_needed_says(rule: Retention, page: int, ends: int) -> None:
    starts = needed_starts(rule, page, ends).tolist()
    assert starts == [needed(rule, end * page, page).start for end in range(ends + 1)]


@settings(deadline=None)
@given(RULES, st.integers(0, 30), PAGE)
def test_at_a_page_boundary_only_pages_of_the_prefix_are_needed(
    rule: Retention, pages: int, page: int
) -> None:
    assert set(needed(rule, pages * page, page)) <= set(range(pages))


@settings(deadline=None)
@given(RULES, END, PAGE)
def test_what_is_needed_next_was_needed_or_is_new(rule: Retention, end: int, page: int) -> None:
    """A request that moves on by a token never needs a page again that it could have let go."""
    now, then = set(needed(rule, end, page)), set(needed(rule, end + 1, page))
    assert then <= now | {end // page}


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 8), END)
@example(4, 4, 19)  # three tokens of the next block are on a page of their own
def test_a_window_of_one_block_keeps_where_the_last_closed_block_ends(
    block: int, blocks: int, end: int
) -> None:
    """DeepSeek-V4 keeps there what the next block takes from it."""
    page = block * blocks
    if end >= block:
        last = end // block * block - 1
        assert last // page in needed(KeepWindow(block), end, page)


@settings(deadline=None)
@given(SIZE, END, PAGE)
def test_a_window_as_large_as_the_prefix_is_full_attention(size: int, end: int, page: int) -> None:
    assert needed(KeepWindow(end + size), end, page) == needed(KeepAll(), end, page)


@pytest.mark.parametrize("rule", [KeepWindow, KeepChunk])
@pytest.mark.parametrize("tokens", [0, -1])
def test_an_empty_window_is_refused(rule: type[KeepWindow | KeepChunk], tokens: int) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        rule(tokens)


@pytest.mark.parametrize(("end", "page"), [(-1, 16), (0, 0), (5, -2)])
def test_impossible_geometry_is_refused(end: int, page: int) -> None:
    with pytest.raises(ValueError, match="page_tokens"):
        needed(KeepAll(), end, page)

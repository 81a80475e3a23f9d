"""Pages that another engine fills, and what they leave in the cache when their request ends."""

from dataclasses import replace

import numpy as np
import pytest

from stratakv.cache.records import CacheUse
from stratakv.core.ids import NONE, GroupId, RequestId
from stratakv.spec.retention import KeepBoundary, KeepChunk, KeepWindow, handed_over
from stratakv.testing.specs import small_spec
from stratakv.tree.nodes import Tier
from tests.engines import expected_tokens, greedy, tokens_of
from tests.pairs import token_pair
from tests.small_cache import SmallCache

PROMPT = [n * 7 % 97 for n in range(60)]
RULES = {
    "window": [KeepWindow(10)],
    "chunk": [KeepChunk(11)],
    "all": [KeepBoundary(), KeepWindow(6)],
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("count", [1, 6])
def test_one_that_does_not_read_leaves_what_came_whatever_its_length(rules, count):
    """A window's pages come as they are needed at the end of the prompt. Where that is inside a
    page, the page before, which would be needed at the page's beginning, has never come."""
    with token_pair(*rules, device=60, host=0) as pair:
        for length in range(37, 45):
            prompt = [length, *PROMPT[:length]]
            asked = replace(greedy(f"r{length}", prompt, count), use=CacheUse.STORE)
            assert pair.run(asked) == [expected_tokens(prompt, count)]
        pair.assert_nothing_left()


@pytest.mark.parametrize("end", ["abort", "retract"])
def test_one_that_does_not_read_may_leave_at_any_moment(end):
    with token_pair(KeepWindow(10), device=60, host=0) as pair:
        asked = replace(greedy("r", PROMPT[:43], 9), use=CacheUse.STORE)
        pair.submit(asked)
        while len(pair.outputs("r")) < 2:
            pair.step()
        getattr(pair.decode.engine, end)(RequestId("r"))
        pair.drain()
        generated = tokens_of(pair.outputs("r"))
        expected = expected_tokens(PROMPT[:43], 9)
        assert generated == (expected if end == "retract" else expected[: len(generated)])
        pair.assert_nothing_left()


@pytest.mark.parametrize("rules", [[], [KeepWindow(3)], [KeepBoundary()]])
def test_pages_are_named_once_the_loads_of_the_same_have_ended(rules):
    """It was admitted before anybody had computed its prompt, and computes it while another one
    loads it: its own pages go when the load has ended."""
    spec, tokens = small_spec(rules, page_tokens=2), [1] * 9
    cache = SmallCache(spec, 16, 16)
    row = cache.enter(tokens).row
    cache.serve(tokens)
    cache.progress.push_out(Tier.DEVICE)
    assert cache.enter(tokens).cached.host == 8
    cache.compute(row, tokens, 0)
    cache.check()
    before = cache.rows.pages(GroupId(0))[row, :4].tolist()
    assert cache.hand_off.is_loading(row)
    with pytest.raises(AssertionError, match="about to go"):
        cache.hand_off.part(row, 8, 9)
    pages = cache.hand_off.pages(row, 9).groups[0].pages.tolist()
    assert not cache.hand_off.is_loading(row)
    assert not set(pages[:4]) & set(before)
    cache.progress.settle()
    assert cache.hand_off.pages(row, 9).groups[0].pages.tolist() == pages
    part = cache.hand_off.part(row, 8, 9)
    assert part.groups[0].pages.tolist() == pages[:4]
    for group, mine in zip(spec.groups[1:], part.groups[1:], strict=True):
        span = handed_over(group.retention, 9, 2)
        if group.stateful:
            assert (mine.first, len(mine.pages)) == (NONE, 0), "a state is never sent in part"
        else:
            assert (mine.first, len(mine.pages)) == (span.start, 4 - span.start)
    assert cache.tiers.pools.counters.duplicate_pages >= 4
    cache.check()
    cache.release(row, np.array(tokens, np.int32))
    cache.check()


def test_what_was_never_computed_cannot_be_sent():
    spec = small_spec([KeepBoundary()], page_tokens=2)
    cache, tokens = SmallCache(spec, 16), [1] * 9
    row = cache.enter(tokens).row
    with pytest.raises(AssertionError, match="group g0 lacks a page"):
        cache.hand_off.pages(row, 9)
    cache.rows.remap(row, GroupId(0), 0, np.arange(5, dtype=np.int32))  # all but the state
    with pytest.raises(AssertionError, match="group g1 lacks a page"):
        cache.hand_off.pages(row, 9)

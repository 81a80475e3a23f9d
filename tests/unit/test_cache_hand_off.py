"""Pages that another engine fills, and what they leave in the cache when their request ends."""

from dataclasses import replace

import pytest

from stratakv.cache.records import CacheUse
from stratakv.core.ids import RequestId
from stratakv.spec.retention import KeepBoundary, KeepChunk, KeepWindow
from tests.engines import expected_tokens, greedy, tokens_of
from tests.pairs import token_pair

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
        while len(pair.said("r")) < 2:
            pair.step()
        getattr(pair.decode.engine, end)(RequestId("r"))
        pair.drain()
        said = tokens_of(pair.said("r"))
        expected = expected_tokens(PROMPT[:43], 9)
        assert said == (expected if end == "retract" else expected[: len(said)])
        pair.assert_nothing_left()

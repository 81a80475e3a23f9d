"""What an engine that decodes takes of its pools while others compute: by group, in pages, at every
place of a page and a window, and what a request that comes back is counted for.
"""

from random import Random

import pytest

from stratakv.core.ids import GroupId, RequestId
from stratakv.engine.request import Phase
from stratakv.spec.retention import KeepWindow, handed_over, needed
from stratakv.testing.hand_off import HandOffSide
from stratakv.tree.nodes import Tier
from tests.engines import allocator, expected_tokens, greedy, tokens_of
from tests.pairs import PROMPT, RULES, every_rule, token_pair

LINE = [n * 11 % 89 for n in range(100)]
WINDOW = GroupId(1)


def held(pair, group) -> int:
    space = allocator(pair.decode, Tier.DEVICE, group)
    return space.capacity - space.available()


@pytest.mark.parametrize(("window", "page"), [(2, 4), (4, 4), (10, 4), (1, 1), (7, 1)])
def test_requests_at_the_same_place_of_a_page_all_get_their_next_one(window, page):
    """Each holds the fewest pages there, and next needs one more before the first is behind: that
    is booked, in pages, so that nobody is retracted for it and no more are let in."""
    most = -(-window // page) + 1
    with token_pair(
        KeepWindow(window), page=page, device=(400, 4 * most - 1), snapshot_tokens=page
    ) as pair:
        pair.link.stop()
        count = (window // page + 2) * page  # a page ends there
        for n in range(4):
            pair.submit(greedy(f"{n}", [n, *LINE[: count - 1]], 3 * page))
        pair.decode.engine.step()
        assert pair.decode.engine.stats().running == 3
        assert pair.phase(HandOffSide.DECODE, "3") is Phase.WAITING
        assert held(pair, WINDOW) == 3 * len(handed_over(KeepWindow(window), count, page))
        pair.link.go()
        pair.drain()
        for n in range(4):
            wanted = expected_tokens([n, *LINE[: count - 1]], 3 * page)
            assert tokens_of(pair.outputs(f"{n}")) == wanted
        assert pair.decode.cache.tiers.pools.counters.retracted == 0
        pair.assert_nothing_left()


@every_rule
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("generated", [1, 2, 5])
def test_who_comes_back_is_as_long_as_its_prompt_and_all_but_its_last_token(rules, page, generated):
    """The last one has no KV yet: what is saved and booked is ``needed`` without it."""
    with token_pair(*rules, page=page, device=90) as pair:
        pair.submit(greedy("r", PROMPT[:24], 12))
        while len(pair.outputs("r")) < generated:
            pair.step()
        pair.decode.engine.retract(RequestId("r"))
        (status,) = pair.decode.engine.statuses()
        fill = 24 + len(pair.outputs("r")) - 1
        assert status.retracted.tokens == fill
        for group in pair.decode.spec.groups:
            span = needed(group.retention, fill, page)
            live = [one.index for one in status.retracted.live if one.group == group.id]
            start, end = status.retracted.starts[group.id], status.retracted.end
            if group.stateful:
                assert len(span) == (end - start) + len(live)
            else:
                assert [*range(start, end), *live] == list(span)
        pair.drain()
        assert tokens_of(pair.outputs("r")) == expected_tokens(PROMPT[:24], 12)
        assert pair.decode.cache.tiers.pools.counters.retracted_unsaved == 0
        pair.assert_nothing_left()


@pytest.mark.parametrize("rules", [RULES["window"], RULES["short window"], RULES["chunk"]])
@pytest.mark.parametrize("matched", [8, 20])
def test_with_a_prefix_hit_the_window_below_it_is_kept_as_far_as_it_is_needed(rules, matched):
    """Wherever the prompt ends: pages of the prefix that lie in the window at its end are pinned
    while the rest is on its way, whatever others need meanwhile, and none of them is taken anew."""
    page, (rule,) = 4, rules
    for more in (1, 3, 4, 5, 9, 13):
        with token_pair(*rules, device=60, host=0, snapshot_tokens=page) as pair:
            pair.run(greedy("first", PROMPT[:matched], 1), greedy("longer", PROMPT[:matched], 2))
            pair.run(greedy("on", PROMPT[: matched + 1], 3))
            before = dict(pair.link.moved)
            pair.link.stop()
            asked = [*PROMPT[:matched], *LINE[:more]]
            pair.submit(greedy("r", asked, 6))
            pair.decode.engine.step()
            pair.decode.cache.progress.push_out(Tier.DEVICE)  # all that nobody pins
            pair.decode.engine.check()
            span = handed_over(rule, len(asked), page)
            assert held(pair, WINDOW) == len(span)
            pair.link.go()
            pair.drain()
            assert tokens_of(pair.outputs("r")) == expected_tokens(asked, 6)
            assert pair.outputs("r")[0].cached.total == matched
            fresh = span.stop - max(span.start, matched // page)
            assert pair.link.moved[WINDOW] - before[WINDOW] == fresh
            pair.assert_nothing_left()


@pytest.mark.parametrize("page", [1, 4])
def test_where_no_group_has_a_window_as_many_are_let_in_as_before(page):
    """By prompt and output alone, on an engine that decodes as on one that does both."""
    pages, rng = 64, Random(page)
    prompts = [[n, *LINE[: rng.randrange(8, 40)]] for n in range(12)]
    tokens, admitted = 0, 0
    for prompt in prompts:
        tokens += -(-(len(prompt) + 4) // page)
        if tokens > pages:
            break
        admitted += 1
    with token_pair(page=page, device=pages, max_running=12) as pair:
        pair.link.stop()
        for n, prompt in enumerate(prompts):
            pair.submit(greedy(f"{n}", prompt, 4))
        pair.decode.engine.step()
        assert pair.decode.engine.stats().running == min(admitted, 12) > 0
        pair.link.go()
        pair.drain()
        for n, prompt in enumerate(prompts):
            assert tokens_of(pair.outputs(f"{n}")) == expected_tokens(prompt, 4)
        pair.assert_nothing_left()


@pytest.mark.parametrize(("tokens", "found"), [(21, 20), (22, 20), (24, 20), (25, 24)])
def test_the_same_prompt_again_is_found_wherever_it_ends(tokens, found):
    """Decode takes the window below its last full page too, on which a later hit stands."""
    with token_pair(KeepWindow(10)) as pair:
        wanted = expected_tokens(PROMPT[:tokens], 3)
        assert pair.run(greedy("first", PROMPT[:tokens], 1)) == [wanted[:1]]
        assert pair.run(greedy("again", PROMPT[:tokens], 3)) == [wanted]
        assert pair.outputs("again")[0].cached.total == found
        pair.assert_nothing_left()

"""Sides of several ranks join when a request needs it, and part when none does: all ranks at once,
as rank 0 says."""

import pytest

from stratakv.disagg.link_uses import IDLE_S
from stratakv.testing.hand_off import HandOffSide
from stratakv.tiers import progress
from tests.engines import expected_tokens, greedy
from tests.pairs import PROMPT
from tests.ranked_acts import HARD, knows, play_of, untidy
from tests.ranked_pairs import DECODE, P, on_threads

BOTH = None
sides = pytest.mark.parametrize(
    "alone", [BOTH, *HandOffSide], ids=lambda side: "both" if side is BOTH else f"{side.name} alone"
)


@pytest.fixture(autouse=True)
def short_naps(monkeypatch):
    monkeypatch.setattr(progress, "POLL_S", 0.0005)


def played(alone, act, **more):
    return on_threads(play_of(*HARD, asks=True, alone=alone, opens=untidy(3), **more), act)


@sides
def test_idle_links_end_on_all_ranks_and_the_next_request_joins_again(alone):
    def act(pair):
        for at in range(3):
            asked = [at, *PROMPT[:30]]
            assert pair.run(greedy(f"r{at}", asked, 4)) == [expected_tokens(asked, 4)]
            for _ in range(5):
                pair.step()
            assert knows(pair) == (True, True)
            pair.clock.advance(IDLE_S)
            pair.until(lambda: knows(pair) == (False, False), "the end of its links")
        pair.settle()

    played(alone, act)


def test_a_link_that_one_rank_uses_ends_on_none():
    """Rank 0 has no session of it any more, another one has: a page of it may still be written."""

    def hold(pair):
        if pair.rank:
            pair.peers[DECODE][0].uses.use(P)

    def let_go(pair):
        if pair.rank:
            pair.peers[DECODE][0].uses.leave(P)

    def act(pair):
        assert pair.run(greedy("a", PROMPT[:30], 4)) == [expected_tokens(PROMPT[:30], 4)]
        pair.do("hold")
        pair.clock.advance(IDLE_S)
        for _ in range(10):
            pair.step()
        assert knows(pair) == (True, True)
        pair.do("let go")
        pair.clock.advance(IDLE_S)
        pair.until(lambda: knows(pair) == (False, False), "the end of its links")
        pair.settle()

    played(BOTH, act, acts={"hold": hold, "let go": let_go})

"""A request that decode alone gets holds the pages of its prompt no longer than its client may
still be on the way to prefill; under a name that is used up, not at all."""

from dataclasses import replace

import pytest

from stratakv.disagg.prefill_role import PrefillRole
from stratakv.engine.request import Failure, TransferSession
from stratakv.testing.hand_off import HandOffSide
from tests.engines import ended, expected_tokens, greedy, tokens_of
from tests.pairs import PROMPT
from tests.transport_pairs import LIMITS, Link, settle, tokens_over, until

PREFILL, DECODE = HandOffSide
HASTY = replace(LIMITS, claim_s=5)


def hasty():
    link = Link()
    link.roles[PREFILL] = PrefillRole(link.peers[PREFILL], HASTY, link.clock)
    return link


def to(pair, side, name, session):
    asked = replace(greedy(name, PROMPT[:30], 4), session=TransferSession(session))
    pair.out[side][name] = []
    pair.sides[side].engine.submit(asked)


def has_ended(pair, name, side=DECODE):
    found = pair.outputs(name, side)
    return bool(found) and ended(found) is not None


def failure(pair, name, side=DECODE):
    until(pair, lambda: has_ended(pair, name, side), f"the end of {name}")
    last = pair.outputs(name, side)[-1]
    assert last.failure is Failure.TRANSFER
    return last.reason


def leased(link):
    return sum(link.roles[DECODE].lease_counts().leased.values())


def asks(pair, link):
    until(pair, lambda: leased(link) and len(link.roles[PREFILL]), "decode's words")


def test_a_session_that_was_handed_over_is_not_waited_for_again():
    """No time passes."""
    link = Link()
    with tokens_over(link) as pair:
        for side in HandOffSide:
            to(pair, side, "first", "room")
        pair.drain()
        assert tokens_of(pair.outputs("first")) == expected_tokens(PROMPT[:30], 4)
        for again in range(3):
            to(pair, DECODE, f"again{again}", "room")
            assert "was handed over before" in failure(pair, f"again{again}")
        to(pair, PREFILL, "late", "room")
        assert "was handed over before" in failure(pair, "late", PREFILL)
        settle(pair)
        link.clock.advance(11)
        for side in HandOffSide:
            to(pair, side, "other", "room")
        pair.drain()
        assert tokens_of(pair.outputs("other")) == expected_tokens(PROMPT[:30], 4)
        settle(pair)


def test_a_request_that_nobody_brings_to_prefill_gives_its_pages_back_soon():
    link = hasty()
    with tokens_over(link) as pair:
        to(pair, DECODE, "r", "stale")
        asks(pair, link)
        link.clock.advance(HASTY.claim_s - 0.1)
        for _ in range(5):
            pair.step()
        assert not has_ended(pair, "r")
        link.clock.advance(0.1)
        assert "nobody has brought its request" in failure(pair, "r")
        assert not leased(link)
        to(pair, PREFILL, "late", "stale")
        assert "nobody has brought its request" in failure(pair, "late", PREFILL)
        settle(pair)


def test_what_came_during_a_step_that_takes_minutes_is_in_time():
    """It waits in a queue of prefill's, which is looked at between two steps."""
    link = hasty()
    with tokens_over(link) as pair:
        to(pair, DECODE, "r", "room")
        asks(pair, link)
        link.clock.advance(HASTY.claim_s + 1)
        pair.step()
        to(pair, PREFILL, "r", "room")
        pair.drain()
        assert tokens_of(pair.outputs("r")) == expected_tokens(PROMPT[:30], 4)
        settle(pair)


@pytest.mark.parametrize("first", HandOffSide)
def test_once_both_have_come_a_session_has_all_its_time(first):
    link = hasty()
    with tokens_over(link) as pair:
        if first is DECODE:
            to(pair, DECODE, "r", "room")
            asks(pair, link)
            link.clock.advance(HASTY.claim_s - 0.1)
            to(pair, PREFILL, "r", "room")
        else:
            to(pair, PREFILL, "r", "room")
            link.clock.advance(HASTY.claim_s + 1)
            pair.step()
            to(pair, DECODE, "r", "room")
        pair.step()
        link.clock.advance(HASTY.claim_s + 1)
        pair.drain()
        assert tokens_of(pair.outputs("r")) == expected_tokens(PROMPT[:30], 4)
        settle(pair)

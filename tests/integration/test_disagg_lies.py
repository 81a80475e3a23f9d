"""A prefill side that says what cannot be fails that session, on all ranks, and no other."""

from dataclasses import replace

import pytest

from stratakv.cache.records import TierTokens
from stratakv.disagg.decode_role import DecodeRole
from stratakv.disagg.messages import Arrival
from stratakv.engine.request import Failure, TokenLogprob
from stratakv.testing.hand_off import HandOffSide
from tests.engines import VOCABULARY, expected_tokens, greedy
from tests.pairs import PROMPT
from tests.ranked_acts import has_failed, play_of
from tests.ranked_pairs import on_threads
from tests.transport_pairs import LIMITS, Link, P, settle, tokens_over

PREFILL, DECODE = HandOffSide
BEYOND = TokenLogprob(chosen=-0.1, top=((VOCABULARY, -0.1),))
LIES = {
    "cached": (
        lambda found: replace(found, cached=TierTokens(20, 5, 6)),
        "of a prompt of 30 tokens",
    ),
    "first token": (
        lambda found: replace(found, first=replace(found.first, token=VOCABULARY)),
        f"names token {VOCABULARY}",
    ),
    "likely token": (
        lambda found: replace(found, first=replace(found.first, logprob=BEYOND)),
        f"names token {VOCABULARY}",
    ),
}


def lie_of(peers, name, lie):
    """What ``peers`` send of the session ``name`` is ``lie``."""
    send = peers.send

    def sent(peer, message, *writes):
        if isinstance(message, Arrival) and message.attempt.session == name:
            message = lie(message)
        return send(peer, message, *writes)

    peers.send = sent


def asked_of(name):
    asked = greedy(name, PROMPT[:30], 4)
    return replace(asked, sampling=replace(asked.sampling, logprobs=1))


@pytest.mark.parametrize(("lie", "reason"), LIES.values(), ids=LIES)
def test_a_session_whose_arrival_cannot_be_fails_with_its_figures(lie, reason):
    link = Link()
    link.roles[DECODE] = DecodeRole(
        link.peers[DECODE], lambda _: P, LIMITS, link.clock, vocab_size=VOCABULARY
    )
    lie_of(link.peers[PREFILL], "r", lie)
    with tokens_over(link) as pair:
        pair.run(asked_of("r"), asked_of("s"))
        last = pair.outputs("r")[-1]
        assert last.failure is Failure.TRANSFER
        assert reason in last.reason
        (first, *_) = pair.outputs("s")
        assert [token for token, _ in first.logprob.top] == expected_tokens(PROMPT[:30], 1)
        settle(pair)


@pytest.mark.parametrize("rank", range(2))
def test_it_fails_on_all_ranks_where_one_is_lied_to(rank):
    def lie(pair):
        if pair.rank == rank:
            lie_of(pair.peers[PREFILL][0], "r", LIES["cached"][0])

    def act(pair):
        pair.do("lie")
        pair.submit(greedy("r", PROMPT[:30], 4))
        pair.drain()
        assert has_failed(pair, "r")
        assert pair.run(greedy("s", PROMPT[:30], 4)) == [expected_tokens(PROMPT[:30], 4)]
        pair.settle()

    on_threads(play_of(acts={"lie": lie}), act)

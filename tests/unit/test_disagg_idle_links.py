"""A link without sessions ends, after a while or where its place is needed, and no request is lost
by it."""

from concurrent.futures import Future
from contextlib import ExitStack

import pytest

from stratakv.core.clock import ManualClock
from stratakv.core.errors import TransportError
from stratakv.disagg.joining import Again, Joined, PeerJoiner, join
from stratakv.disagg.link_uses import IDLE_S, MAKES_ROOM_S, SETTLED_S, LinkUses
from stratakv.disagg.messages import Leave, decode, encode
from stratakv.disagg.peers import Peers, StillEndingError
from stratakv.disagg.rests import Rests
from stratakv.disagg.statistics import LinkState
from stratakv.disagg.transport import PeerId
from stratakv.engine.request import Failure
from stratakv.memory.device_pools import DevicePools
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.patience import wait_until
from tests.engines import expected_tokens, greedy, token_spec
from tests.fixtures.transports import open_loopback
from tests.pairs import PROMPT
from tests.transport_pairs import (
    LIMITS,
    D,
    Link,
    P,
    apart,
    mooncake,
    settle,
    tcp,
    tokens_over,
    until,
)

PREFILL, DECODE = HandOffSide
SPEC = token_spec(4)
A, B, C = map(PeerId, "abc")


# -- which one is to go --------------------------------------------------------------------------


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def uses(clock):
    """Three links, which were joined a second after each other."""
    found = LinkUses(clock)
    for peer in (A, B, C):
        found.joined(peer)
        clock.advance(1)
    return found


def test_a_link_is_to_end_when_it_had_no_session_for_a_while(uses, clock):
    uses.use(B)
    clock.advance(IDLE_S - 3)
    assert uses.overdue() == [A]
    clock.advance(10)
    assert uses.overdue() == [A, C]
    assert uses.idle == 2
    uses.leave(B)
    assert uses.overdue() == [A, C]
    clock.advance(IDLE_S)
    assert uses.overdue() == [A, C, B]


def test_a_link_with_one_session_of_two_is_in_use(uses, clock):
    uses.use(A)
    uses.use(A)
    uses.leave(A)
    clock.advance(IDLE_S)
    assert uses.in_use(A)
    assert A not in uses.overdue()
    uses.leave(A)
    assert not uses.in_use(A)


def test_who_needs_a_place_gets_that_of_the_oldest_once_it_has_settled(uses, clock):
    uses.use(A)
    assert uses.makes_room()
    assert not uses.overdue()
    clock.advance(SETTLED_S)
    assert uses.overdue() == [B]
    assert uses.makes_room(), "the same one"
    assert uses.overdue() == [B]
    uses.ends(B)
    assert uses.makes_room(), "its fence comes"
    assert not uses.overdue()
    uses.ended(B)
    assert uses.makes_room()
    assert uses.overdue() == [C]


def test_one_that_is_used_again_keeps_its_place(uses, clock):
    assert uses.makes_room()
    uses.use(A)
    clock.advance(SETTLED_S)
    assert not uses.overdue()
    assert uses.makes_room()
    assert uses.overdue() == [B]


def test_where_one_does_not_end_another_is_chosen_and_the_first_again_after_the_last(uses, clock):
    """Whoever has the choice carried out may have had a session then."""
    for peer in (A, B, C, A, B):
        assert uses.makes_room()
        assert uses.makes_room(), "the same one"
        clock.advance(MAKES_ROOM_S)
        assert uses.overdue()[-1] == peer
    uses.use(C)
    assert uses.makes_room()
    assert uses.overdue() == [B, A], "which is the next of those that are idle"


def test_where_all_have_sessions_there_is_no_room(uses):
    for peer in (A, B, C):
        uses.use(peer)
    assert not uses.makes_room()


def test_a_session_before_its_link_counts_and_so_does_one_behind_it(clock):
    uses = LinkUses(clock)
    uses.use(A)
    uses.joined(A)
    assert not uses.idle
    uses.ends(A)
    uses.leave(A)
    assert not uses.idle
    assert not uses.makes_room()
    uses.joined(A)
    assert uses.idle == 1


def test_who_is_asked_to_leave_does_when_it_has_no_session(uses, clock):
    clock.advance(SETTLED_S)
    uses.use(A)
    uses.choose(A)
    uses.choose(B)
    assert uses.overdue() == [B]
    uses.kept(B)
    assert not uses.overdue(), "another rank has a session of it"


def test_the_word_for_it_has_no_session():
    assert decode(encode(Leave())) == Leave()


# -- over a transport ----------------------------------------------------------------------------


def peers_of(link):
    return link.peers[PREFILL], link.peers[DECODE]


def states(peers):
    return {state.value: count for state, count in peers.counts().items() if count}


def idle_and_again(link):
    """Requests of a pair whose link ends between them."""
    with tokens_over(link) as pair:
        for n in range(3):
            asked = greedy(f"r{n}", PROMPT[n : 30 + n], 4)
            assert pair.run(asked) == [expected_tokens(PROMPT[n : 30 + n], 4)]
            assert link.asked == n + 1
            for _ in range(5):
                pair.step()
            assert [states(each) for each in peers_of(link)] == [{"idle": 1}] * 2
            link.clock.advance(IDLE_S)
            wait_until(lambda: apart(pair), "both ends of it")
            until(pair, lambda: not any(map(states, peers_of(link))), "both fences")
        settle(pair)


def test_an_idle_link_ends_on_both_sides_and_the_next_request_joins_again():
    idle_and_again(Link(asks=True))


@pytest.mark.parametrize("opens", [tcp, mooncake], ids=["nixl", "mooncake"])
def test_so_it_does_where_a_library_s_agents_end(opens):
    idle_and_again(Link(opens, opens, asks=True))


def test_a_request_that_comes_while_its_link_ends_is_served():
    link = Link(asks=True)
    with tokens_over(link) as pair:
        assert pair.run(greedy("a", PROMPT[:30], 4)) == [expected_tokens(PROMPT[:30], 4)]
        link.clock.advance(IDLE_S)
        until(pair, lambda: not link.peers[DECODE].knows(P), "its end here")
        assert pair.run(greedy("b", PROMPT[1:30], 4)) == [expected_tokens(PROMPT[1:30], 4)]
        assert link.asked >= 2
        settle(pair)


def test_a_link_with_a_session_does_not_end():
    link = Link(asks=True)
    with tokens_over(link) as pair:
        pair.decode.engine.submit(greedy("r", PROMPT[:30], 4))
        pair.out[DECODE]["r"] = []
        until(pair, lambda: link.peers[DECODE].knows(P), "its peer")
        assert states(link.peers[DECODE]) == {"in_use": 1}
        link.clock.advance(SETTLED_S + 1)
        link.peers[DECODE].uses.choose(P)
        for _ in range(20):
            pair.step()
        assert link.peers[DECODE].knows(P)
        pair.out[PREFILL]["r"] = []
        pair.sides[PREFILL].engine.submit(greedy("r", PROMPT[:30], 4))
        pair.drain()
        assert pair.outputs("r")[-1].finish is not None
        settle(pair)


# -- a table that is full ------------------------------------------------------------------------


@pytest.fixture
def crowded(monkeypatch, clock):
    """A side where three may be, and makes others that it can meet."""
    monkeypatch.setattr("stratakv.disagg.peers.MOST_PEERS", 3)
    with ExitStack() as undo:

        def made():
            peers = Peers(clock)
            peers.open(SPEC, DevicePools(SPEC, (8,)), b"model", open_loopback)
            undo.callback(peers.close)
            return peers

        yield made(), made


def meet(one, there, name):
    """``there``, under ``name``, is met."""
    ours, theirs = one.introduce(name), there.introduce(P)
    there.meet(P, ours)
    one.meet(name, theirs)


def test_a_full_table_takes_one_more_in_the_place_of_the_oldest_idle_link(crowded, clock):
    decode_, made = crowded
    for peer in (A, B, C):
        meet(decode_, made(), peer)
        clock.advance(1)
    decode_.uses.use(A)
    joiner = PeerJoiner(decode_, lambda *_: Future(), Rests(clock))

    def asked():
        joiner.ask(PeerId("d"))
        assert not joiner.refused()
        for peer in decode_.uses.overdue():
            joiner.part(peer)
        decode_.poll()

    for _ in range(5):
        asked()
    assert states(decode_) == {"in_use": 1, "idle": 2}, "none has settled"
    clock.advance(SETTLED_S)

    def joins():
        asked()
        return decode_.counts()[LinkState.JOINING]

    wait_until(joins, "a place")
    assert states(decode_) == {"in_use": 1, "idle": 1, "joining": 1}
    assert decode_.knows(A)
    assert not decode_.knows(B)
    assert decode_.knows(C)


def test_a_full_table_of_links_with_sessions_refuses_at_once(crowded, clock):
    decode_, made = crowded
    for peer in (A, B, C):
        meet(decode_, made(), peer)
        decode_.uses.use(peer)
    joiner = PeerJoiner(decode_, lambda *_: Future(), Rests(clock))
    joiner.ask(PeerId("d"))
    reason = "3 peers are joined already, none idle; no more fit"
    assert joiner.refused() == [(PeerId("d"), reason)]


def test_a_side_that_computes_prompts_asks_others_to_leave(crowded, clock):
    """It does not know whether a session is about to begin; who decodes does."""
    prefill, made = crowded
    theirs = {peer: made() for peer in (A, B, C)}
    for peer, there in theirs.items():
        meet(prefill, there, peer)
        clock.advance(1)
    prefill.uses.use(A)
    newcomer = made()
    introduction = newcomer.introduce(P)
    clock.advance(SETTLED_S)
    assert join(prefill, PeerId("d"), (introduction,)).result(timeout=0) == Again()
    received = []
    wait_until(lambda: received.extend(theirs[B].poll()) or received, "the word")
    assert [event.message for event in received] == [Leave()]
    assert not theirs[C].poll()
    assert prefill.knows(B)
    theirs[B].disconnect(P)

    def answered():
        for one in (prefill, *theirs.values()):
            one.poll()
        answer = join(prefill, PeerId("d"), (introduction,))
        wait_until(lambda: prefill.poll() or answer.done(), "an answer")
        return isinstance(answer.result(), Joined)

    wait_until(answered, "a place")
    assert not prefill.knows(B)
    assert prefill.knows(A)
    assert prefill.knows(C)


def test_a_request_that_gets_no_place_in_time_says_so(monkeypatch):
    """A link that is introduced by hand never leaves."""
    monkeypatch.setattr("stratakv.disagg.peers.MOST_PEERS", 1)
    link = Link(asks=True)
    with tokens_over(link) as pair, ExitStack() as undo:
        other = Peers(link.clock)
        other.open(SPEC, DevicePools(SPEC, (8,)), b"model", open_loopback)
        undo.callback(other.close)
        meet(link.peers[PREFILL], other, A)
        pair.decode.engine.submit(greedy("r", PROMPT[:30], 4))
        pair.out[DECODE]["r"] = []
        until(pair, lambda: link.asked >= 2, "the second call")
        link.clock.advance(LIMITS.sessions.bootstrap_s)
        until(pair, lambda: pair.outputs("r"), "its end")
        (last,) = pair.outputs("r")
        assert last.failure is Failure.TRANSFER
        assert last.reason == (
            "waiting for the other side took too long: prefill is not joined, its last link is "
            "being torn down, or it has no free place"
        )
        assert link.peers[PREFILL].knows(A)
        wait_until(lambda: pair.step() or not any(map(states, [link.peers[DECODE]])), "its fence")


def test_decode_leaves_when_its_peer_asks_and_serves_on():
    link = Link(asks=True)
    with tokens_over(link) as pair:
        assert pair.run(greedy("a", PROMPT[:30], 4)) == [expected_tokens(PROMPT[:30], 4)]
        assert link.peers[PREFILL].send(D, Leave()) is not None
        for _ in range(20):
            pair.step()
        assert link.peers[DECODE].knows(P), "it has not settled"
        link.clock.advance(SETTLED_S)
        until(pair, lambda: not link.peers[DECODE].knows(P), "its end")
        assert pair.run(greedy("b", PROMPT[1:30], 4)) == [expected_tokens(PROMPT[1:30], 4)]
        settle(pair)


def test_who_decodes_may_not_say_so():
    link = Link()
    with tokens_over(link) as pair:
        assert link.peers[DECODE].send(P, Leave()) is not None
        wait_until(lambda: apart(pair), "the end of its link")


def test_places_that_are_ending_are_counted_until_their_fence(crowded, clock):
    one, made = crowded
    meet(one, made(), A)
    one.introduce(B)
    assert states(one) == {"idle": 1, "joining": 1}
    one.disconnect(A)
    assert states(one) == {"joining": 1, "ending": 1}
    with pytest.raises(StillEndingError):
        one.introduce(A)
    wait_until(lambda: one.poll() and not one.counts()[LinkState.ENDING], "its fence")
    assert states(one) == {"joining": 1}
    for peer in (A, C):
        one.introduce(peer)
    with pytest.raises(TransportError, match="no more fit"):
        one.introduce(PeerId("d"))

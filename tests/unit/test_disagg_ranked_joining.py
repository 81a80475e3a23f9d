"""Sides of several ranks introduce themselves as one, and are refused as one."""

from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from stratakv.agreement.ballot import SLOTS, Ballot, SlotKind
from stratakv.core.clock import ManualClock
from stratakv.disagg.handshake import SideRank
from stratakv.disagg.joining import Again, Joined, JoinRefused, join, one_of
from stratakv.disagg.peers import Peers
from stratakv.disagg.ranked_joining import RankedHost, RankedJoiner
from stratakv.disagg.ranked_peers import Describing, RankedPeers, together
from stratakv.disagg.rests import AGAIN_S, NOT_YET, REST_S, Rests
from stratakv.disagg.transport import PeerId
from stratakv.engine.ranks.peer_calls import NoPeers, PeerCall, PeerVerb
from stratakv.memory.device_pools import DevicePools
from stratakv.testing.patience import wait_until
from tests.engines import token_spec
from tests.fixtures.transports import Slow, open_loopback

D, P = PeerId("decode"), PeerId("prefill")
SPEC = token_spec(4)


class Side:
    """Peers of every rank, and rank 0's end of what all of them do."""

    def __init__(self, peers, made):
        self.peers, self.sent = peers, deque()
        self.ends = [made([one], rank, self.sent.append) for rank, one in enumerate(peers)]
        self.parts = [end.links for end in self.ends]

    def step(self):
        """What was sent is done by all ranks, and then they look at their transports."""
        for _ in range(len(self.sent)):
            asked = self.sent.popleft()
            reports = [part.call(asked) for part in self.parts]
            for part in self.parts:
                part.answered(asked, reports)
        for one in self.peers:
            one.poll()

    def join(self, peer, introductions):
        answer = self.ends[0].join(peer, introductions)
        wait_until(lambda: self.step() or answer.done(), "an answer")
        return answer.result()


@contextmanager
def side(ranks, whole=b"whole", opens=open_loopback, made=RankedHost):
    with ExitStack() as undo:
        peers = [Peers() for _ in range(ranks)]
        for rank, one in enumerate(peers):
            share = SideRank(rank, ranks, whole)
            one.open(SPEC, DevicePools(SPEC, (8,)), b"model", opens, share)
            undo.callback(one.close)
        yield Side(peers, made)


def introduced(side, name):
    return tuple(one.introduce(name) for one in side.peers)


def test_rank_by_rank_two_sides_know_each_other():
    with side(2) as prefill, side(2) as decode:
        answer = prefill.join(D, introduced(decode, P))
        assert isinstance(answer, Joined)
        for one, introduction in zip(decode.peers, answer.introductions, strict=True):
            one.meet(P, introduction)
        assert all(one.knows(D) for one in prefill.peers)
        assert all(one.knows(P) for one in decode.peers)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_another_number_of_ranks_is_refused_with_both_values(ours, theirs):
    with side(ours) as prefill, side(theirs) as decode:
        introductions = introduced(decode, P)
        if ours == 1:
            answer = join(prefill.peers[0], D, introductions).result()
        else:
            answer = prefill.join(D, introductions)
        assert isinstance(answer, JoinRefused)
        assert f"ranks is {ours} here and {theirs} there" in answer.reason
        assert "spec" not in answer.reason, "the cache of all ranks is the same"
        assert not any(one.knows(D) for one in prefill.peers)


def test_the_wrong_rank_is_refused():
    with side(2) as prefill, side(2) as decode:
        answer = prefill.join(D, introduced(decode, P)[::-1])
        assert isinstance(answer, JoinRefused)
        assert "rank is 0 here and 1 there" in answer.reason


def test_where_one_rank_is_still_ending_all_are_asked_again_and_none_begins():
    """What one began would have to be undone, and be in the way of the next attempt."""
    with side(2) as prefill, side(2) as decode:
        prefill.peers[1].introduce(D)  # of a link that nobody has met
        introductions = introduced(decode, P)
        assert prefill.join(D, introductions) == Again()
        assert not sum(prefill.peers[0].counts().values())
        wait_until(
            lambda: isinstance(prefill.join(D, introductions), Joined), "the end of what was begun"
        )


def test_a_peer_that_one_rank_has_lost_is_lost_on_all():
    with side(2) as prefill, side(2) as decode:
        assert isinstance(prefill.join(D, introduced(decode, P)), Joined)
        parts, peers = prefill.parts, prefill.peers

        def ballot():
            ballots = [Ballot() for _ in parts]
            for part, one in zip(parts, ballots, strict=True):
                part.vote(one)
            least = np.minimum.reduce([one.lanes for one in ballots])
            for part, one in zip(parts, ballots, strict=True):
                part.agreed(one.result(least))
            assert parts[0].figures() == parts[1].figures()

        ballot()
        assert all(one.knows(D) for one in peers)
        peers[0].disconnect(D)
        assert peers[1].knows(D)
        ballot()
        assert not any(one.knows(D) for one in peers)
        assert parts[0].figures() == {"links": 0}


def test_so_many_peers_and_no_more():
    class Some:
        def meet(self, peer, introduction):
            pass

        def disconnect(self, peer, reason=""):
            pass

    links = RankedPeers([Some()], 0)
    for at in range(SLOTS[SlotKind.LINK] + 1):
        asked = PeerCall(PeerVerb.MEET, f"{at}", (b"",))
        report = links.call(asked)
        links.answered(asked, [report])
    assert together([report]) == JoinRefused("256 peers are joined already")


def test_a_refusal_of_one_rank_is_that_of_all():
    with side(1) as one:
        (part,) = one.parts
        again, refused = (
            part.call(PeerCall(PeerVerb.LEAVE, D, reason=reason)) for reason in ("", "no")
        )
        asked = PeerCall(PeerVerb.INTRODUCE, D)
        describing = part.call(asked)
        part.answered(asked, [describing])
        wait_until(lambda: one.step() or part.is_described(D), "its description")
        introduced_ = part.call(asked)
    assert together([introduced_, again, describing, refused]) == JoinRefused("no")
    assert together([introduced_, describing, again]) == Again()
    assert together([introduced_, describing, introduced_]) == Describing()
    assert isinstance(together([introduced_, introduced_]), Joined)
    assert len(together([introduced_, introduced_]).introductions) == 2


def test_a_side_without_ranks_is_refused():
    with side(2) as one:
        answer = one.join(D, ())
    assert answer == JoinRefused("the peer introduces none of its ranks")
    assert one_of((b"a", b"b"), 1) == b"b"


# -- beside the steps ----------------------------------------------------------------------------


@contextmanager
def slow_side(ranks, made=RankedHost):
    """Each rank's agents take as long as a test likes."""
    opened = []

    def opens(memories):
        opened.append(Slow(memories))
        return opened[-1]

    with side(ranks, opens=opens, made=made) as one:
        try:
            yield one, opened
        finally:
            for transport in opened:
                transport.may.set()


@pytest.mark.parametrize("late", range(2))
def test_no_step_waits_for_the_agents_of_a_peer_that_introduces_itself(late):
    with slow_side(2) as (prefill, transports), side(2) as decode:
        answer = prefill.ends[0].join(D, introduced(decode, P))
        for _ in range(50):
            prefill.step()
        transports[1 - late].may.set()
        wait_until(lambda: prefill.step() or prefill.parts[1 - late].is_described(D), "one of them")
        for _ in range(50):
            prefill.step()
        assert not answer.done()
        assert prefill.ends[0].join(D, introduced(decode, PeerId("x"))).result(0) == Again()
        transports[late].may.set()
        wait_until(lambda: prefill.step() or answer.done(), "an answer")
        assert isinstance(answer.result(), Joined)
        assert all(len(one.described) == 1 for one in transports)


@pytest.mark.parametrize("late", range(2))
def test_no_step_waits_for_the_agents_of_a_peer_that_a_request_names(late):
    carried = []

    def carry(peer, introductions):
        carried.append(introductions)
        return Future()

    def made(peers, rank, send):
        return RankedJoiner(peers, rank, send, None if rank else carry, Rests(ManualClock()))

    with slow_side(2, made) as (decode, transports):
        for _ in range(50):
            for end in decode.ends:
                end.ask(P)
                assert not end.refused()
            decode.step()
        transports[1 - late].may.set()
        wait_until(lambda: decode.step() or decode.parts[1 - late].is_described(P), "one of them")
        for _ in range(50):
            decode.step()
        assert not carried
        transports[late].may.set()
        wait_until(lambda: decode.step() or carried, "what it is brought")
        assert [len(one) for one in carried] == [2]
        assert all(len(one.described) == 1 for one in transports)


def test_an_agent_that_one_rank_cannot_make_is_a_refusal_of_all():
    with slow_side(2) as (prefill, transports), side(2) as decode:
        transports[1].fails = True
        for transport in transports:
            transport.may.set()
        assert prefill.join(D, introduced(decode, P)) == JoinRefused("no agent")
        wait_until(
            lambda: prefill.step() or not any(any(one.counts().values()) for one in prefill.peers),
            "the end of the other one",
        )
        transports[1].fails = False
        assert isinstance(prefill.join(D, introduced(decode, PeerId("p"))), Joined)


# -- who was refused -----------------------------------------------------------------------------


def test_who_was_refused_is_not_asked_again_for_some_seconds_by_any_rank():
    """Rank 0 says so: all refuse in the same step, and none makes an agent meanwhile."""
    clock, asked = ManualClock(), []

    def carry(peer, introductions):
        asked.append(peer)
        answer = Future()
        answer.set_result(JoinRefused(f"no {len(asked)}"))
        return answer

    def made(peers, rank, send):
        return RankedJoiner(peers, rank, send, None if rank else carry, Rests(clock))

    with side(2, made=made) as decode:

        def refused(peer):
            found = [[] for _ in decode.ends]

            def all_have():
                for end, mine in zip(decode.ends, found, strict=True):
                    mine.extend(end.refused())
                    if not mine:
                        end.ask(peer)
                decode.step()
                assert len({len(mine) for mine in found}) == 1, "in the same step"
                return all(found)

            wait_until(all_have, "a refusal")
            assert found[0] == found[1]
            ((name, reason),) = found[0]
            assert name == peer
            return reason

        assert [refused(P) for _ in range(3)] == ["no 1"] * 3
        assert refused(D) == "no 2"
        clock.advance(REST_S / 2)
        assert refused(P) == "no 1"
        clock.advance(REST_S / 2)
        assert refused(P) == "no 3"
        assert refused(P) == "no 3"
        assert asked == [P, D, P]


def test_who_is_to_be_asked_again_is_after_a_moment_by_rank_0_s_clock_and_all_ranks_know_why():
    clock, asked = ManualClock(), []

    def carry(peer, introductions):
        asked.append(peer)
        answer = Future()
        answer.set_result(Again() if len(asked) < 3 else JoinRefused("no"))
        return answer

    def made(peers, rank, send):
        rests = Rests(ManualClock() if rank else clock)
        return RankedJoiner(peers, rank, send, None if rank else carry, rests)

    with side(2, made=made) as decode:
        found = [[] for _ in decode.ends]

        def step():
            for end, mine in zip(decode.ends, found, strict=True):
                mine.extend(end.refused())
                end.ask(P)
            decode.step()
            assert len({len(mine) for mine in found}) == 1, "in the same step"

        def words():
            return {end.waits_for(P) for end in decode.ends}

        def paused():
            step()
            return words() == {NOT_YET} and not any(map(links, decode.peers))

        assert words() == {""}
        for count in (1, 2):
            wait_until(paused, "its answer, and its fence")
            clock.advance(AGAIN_S - 0.01)
            for _ in range(20):
                step()
            assert len(asked) == count
            assert not any(map(links, decode.peers)), "nor is it described to anybody"
            clock.advance(0.01)
            wait_until(lambda count=count: step() or len(asked) > count, "the next call")
        wait_until(lambda: step() or all(found), "a refusal")
        assert found == [[(P, "no")]] * 2
        assert words() == {""}


def links(peers):
    return sum(peers.counts().values())


def test_an_engine_that_works_alone_has_no_peers():
    asked = PeerCall(PeerVerb.INTRODUCE, D)
    with pytest.raises(AssertionError, match="works alone"):
        NoPeers().call(asked)
    with pytest.raises(AssertionError, match="works alone"):
        NoPeers().answered(asked, [""])

"""Sides of several ranks introduce themselves as one, and are refused as one."""

from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from stratakv.agreement.ballot import SLOTS, Ballot, SlotKind
from stratakv.disagg.handshake import SideRank
from stratakv.disagg.joining import Again, Joined, JoinRefused, join, one_of
from stratakv.disagg.peers import Peers
from stratakv.disagg.ranked_joining import RankedPeers, join_ranks, together
from stratakv.disagg.transport import PeerId
from stratakv.engine.peer_calls import NoPeers, PeerCall, PeerVerb
from stratakv.memory.device_pools import DevicePools
from stratakv.testing.patience import wait_until
from tests.engines import token_spec
from tests.fixtures.transports import open_loopback

D, P = PeerId("decode"), PeerId("prefill")
SPEC = token_spec(4)


@contextmanager
def side(ranks, whole=b"whole"):
    """Peers of every rank, and what carries out a call on all of them."""
    with ExitStack() as undo:
        peers = [Peers() for _ in range(ranks)]
        for rank, one in enumerate(peers):
            share = SideRank(rank, ranks, whole)
            one.open(SPEC, DevicePools(SPEC, (8,)), b"model", open_loopback, share)
            undo.callback(one.close)
        parts = [RankedPeers([one], rank) for rank, one in enumerate(peers)]

        def call(asked):
            reports = [part.call(asked) for part in parts]
            for part in parts:
                part.answered(asked, reports)
            return reports

        yield peers, parts, call


def introduced(peers, name):
    return tuple(one.introduce(name) for one in peers)


def test_rank_by_rank_two_sides_know_each_other():
    with side(2) as (prefill, _, call), side(2) as (decode, _, _):
        answer = join_ranks(call, D, introduced(decode, P))
        assert isinstance(answer, Joined)
        for one, introduction in zip(decode, answer.introductions, strict=True):
            one.meet(P, introduction)
        assert all(one.knows(D) for one in prefill)
        assert all(one.knows(P) for one in decode)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_another_number_of_ranks_is_refused_with_both_values(ours, theirs):
    with side(ours) as (prefill, _, call), side(theirs) as (decode, _, _):
        introductions = introduced(decode, P)
        if ours == 1:
            answer = join(prefill[0], D, introductions).result()
        else:
            answer = join_ranks(call, D, introductions)
        assert isinstance(answer, JoinRefused)
        assert f"ranks is {ours} here and {theirs} there" in answer.reason
        assert "spec" not in answer.reason, "the cache of all ranks is the same"
        assert not any(one.knows(D) for one in prefill)


def test_the_wrong_rank_is_refused():
    with side(2) as (_, _, call), side(2) as (decode, _, _):
        answer = join_ranks(call, D, introduced(decode, P)[::-1])
        assert isinstance(answer, JoinRefused)
        assert "rank is 0 here and 1 there" in answer.reason


def test_where_one_rank_is_still_ending_all_are_asked_again():
    with side(2) as (prefill, _, call), side(2) as (decode, _, _):
        prefill[1].introduce(D)  # of a link that nobody has met
        introductions = introduced(decode, P)
        assert join_ranks(call, D, introductions) == Again()

        def joined():
            for one in prefill:
                one.poll()
            return isinstance(join_ranks(call, D, introductions), Joined)

        wait_until(joined, "the end of what was begun")


def test_a_peer_that_one_rank_has_lost_is_lost_on_all():
    with side(2) as (prefill, parts, call), side(2) as (decode, _, _):
        assert isinstance(join_ranks(call, D, introduced(decode, P)), Joined)

        def ballot():
            ballots = [Ballot() for _ in parts]
            for part, one in zip(parts, ballots, strict=True):
                part.vote(one)
            least = np.minimum.reduce([one.lanes for one in ballots])
            for part, one in zip(parts, ballots, strict=True):
                part.agreed(one.result(least))
            assert parts[0].figures() == parts[1].figures()

        ballot()
        assert all(one.knows(D) for one in prefill)
        prefill[0].disconnect(D)
        assert prefill[1].knows(D)
        ballot()
        assert not any(one.knows(D) for one in prefill)
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
    reports = []
    with side(1) as (_, (part,), _):
        for verb, reason in (
            (PeerVerb.LEAVE, ""),
            (PeerVerb.LEAVE, "no"),
            (PeerVerb.INTRODUCE, ""),
        ):
            reports.append(part.call(PeerCall(verb, D, reason=reason)))
    again, refused, introduced_ = reports
    assert together([introduced_, again, refused]) == JoinRefused("no")
    assert together([introduced_, again]) == Again()
    assert isinstance(together([introduced_, introduced_]), Joined)
    assert len(together([introduced_, introduced_]).introductions) == 2


def test_a_side_without_ranks_is_refused():
    with side(2) as (_, _, call):
        answer = join_ranks(call, D, ())
    assert answer == JoinRefused("the peer introduces none of its ranks")
    assert one_of((b"a", b"b"), 1) == b"b"


def test_an_engine_that_works_alone_has_no_peers():
    asked = PeerCall(PeerVerb.INTRODUCE, D)
    with pytest.raises(AssertionError, match="works alone"):
        NoPeers().call(asked)
    with pytest.raises(AssertionError, match="works alone"):
        NoPeers().answered(asked, [""])

"""A peer that does not fit costs no agent, and one that is made holds up nobody."""

import errno
import json
import threading
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from stratakv.core.clock import ManualClock
from stratakv.core.errors import TransportError
from stratakv.disagg.joining import (
    Again,
    Joined,
    JoinRefused,
    PeerJoiner,
    decode_answer,
    decode_call,
    join,
)
from stratakv.disagg.link import DEFAULT_LINK
from stratakv.disagg.loopback import LoopbackWire
from stratakv.disagg.peer_limits import REASON_CHARS
from stratakv.disagg.peers import Peers
from stratakv.disagg.ranked_joining import RankedHost
from stratakv.disagg.ranked_peers import RankedPeers, together
from stratakv.disagg.rests import AGAIN_S, NOT_YET, REST_S, Rests
from stratakv.disagg.statistics import LinkState
from stratakv.disagg.transport import Disconnected, PeerId
from stratakv.disagg.wire_transport import WiredTransport
from stratakv.engine.ranks.peer_calls import PeerCall, PeerVerb
from stratakv.memory.device_pools import DevicePools
from stratakv.testing.patience import wait_until
from tests.engines import token_spec
from tests.fixtures.transports import Slow
from tests.transport_pairs import D, Link, P, tokens_over

SPEC = token_spec(4)


@contextmanager
def side(model=b"model"):
    """Peers, and their transport."""
    peers, opened = Peers(), []
    peers.open(SPEC, DevicePools(SPEC, (8,)), model, lambda memories: _open(opened, memories))
    try:
        yield peers, opened[0]
    finally:
        opened[0].may.set()
        peers.close()


def _open(opened, memories):
    opened.append(Slow(memories))
    return opened[0]


def stepped(peers, answer):
    """An answer that a step of the engine's brings."""
    wait_until(lambda: peers.poll() or answer.done(), "an answer")
    return answer.result()


@pytest.mark.parametrize("wrong", ["another model", "nonsense", "none"])
def test_who_does_not_fit_is_refused_and_costs_no_agent(wrong):
    with side() as (prefill, transport), side(b"another") as (decode, its):
        its.may.set()
        called = {"another model": (decode.introduce(P),), "nonsense": (b"{",), "none": ()}[wrong]
        answer = join(prefill, D, called).result(timeout=0)
        assert isinstance(answer, JoinRefused)
        calls = []
        ranked = RankedHost([prefill], 0, calls.append)
        answer = ranked.join(D, called)
        for call in calls:
            ranked.links.answered(call, [ranked.links.call(call)])
        assert isinstance(answer.result(timeout=0), JoinRefused)
        assert not transport.described
        assert not prefill.poll()


def test_an_agent_is_made_beside_the_steps_of_the_engine():
    with side() as (prefill, transport), side() as (decode, its):
        its.may.set()
        answer = join(prefill, D, (decode.introduce(P),))
        for _ in range(100):  # steps that do not wait for it
            prefill.poll()
        assert not answer.done()
        assert isinstance(join(prefill, D, (b"{",)).result(), JoinRefused)
        transport.may.set()
        found = stepped(prefill, answer)
        assert isinstance(found, Joined)
        decode.meet(P, found.introductions[0])
        assert prefill.knows(D)
        assert transport.described != [threading.current_thread()]


def test_a_step_of_decode_does_not_wait_for_the_agent_of_a_peer_that_a_request_names():
    """Others are decoded meanwhile."""
    opened = []
    link = Link(decode=lambda memories: _open(opened, memories), joins=False)
    with tokens_over(link) as pair:
        (transport,) = opened
        decode = next(peers for side, peers in link.peers.items() if side.name == "DECODE")
        joiner = PeerJoiner(
            decode, lambda *_: pytest.fail("nobody is asked yet"), Rests(ManualClock())
        )
        joiner.ask(P)
        joiner.ask(P)
        for _ in range(50):
            pair.step()
            assert not joiner.refused()
        assert len(transport.described) == 1
        transport.fails = True
        transport.may.set()
        refused = []
        wait_until(lambda: pair.step() or refused.extend(joiner.refused()) or refused, "its end")
        assert refused == [(P, "no agent")]
        assert not decode.knows(P)


def test_who_is_given_up_while_it_is_described_is_fenced_when_it_is():
    with side() as (prefill, transport), side() as (decode, its):
        its.may.set()
        called = (decode.introduce(P),)
        answer = join(prefill, D, called)
        assert join(prefill, D, called).result(timeout=0) == Again()
        assert not answer.done()
        transport.may.set()
        events = []
        wait_until(lambda: events.extend(prefill.poll()) or Disconnected(D) in events, "the fence")
        assert isinstance(answer.result(timeout=0), JoinRefused)
        assert isinstance(stepped(prefill, join(prefill, D, called)), Joined)


def test_who_waits_for_an_agent_when_its_side_ends_is_refused():
    with side() as (prefill, transport), side() as (decode, its):
        its.may.set()
        answer = join(prefill, D, (decode.introduce(P),))
        answer.cancel()  # who asked has left; the engine goes on
        transport.may.set()
        prefill.close()
        assert "this side ends" in answer.result(timeout=0).reason


PEER = PeerId("somebody")


def test_an_agent_that_cannot_be_made_is_a_refusal():
    with side() as (prefill, transport), side() as (decode, its):
        its.may.set()
        transport.fails = True
        transport.may.set()
        refused = stepped(prefill, join(prefill, PEER, (decode.introduce(P),)))
        assert refused == JoinRefused("no agent")
        transport.fails = False
        assert isinstance(stepped(prefill, join(prefill, D, (decode.introduce(PEER),))), Joined)


class Asking:
    """A side that joins one that answers with the next of ``answers``."""

    def __init__(self, peers, clock, answers=()):
        self.peers, self.answers, self.asked = peers, list(answers), []
        self.joiner = PeerJoiner(peers, self._carry, Rests(clock))
        self._refused = []

    def _carry(self, peer, introductions):
        self.asked.append(peer)
        answer = Future()
        answer.set_result(self.answers.pop(0))
        return answer

    def step(self):
        self.peers.poll()
        self._refused += self.joiner.refused()

    def refused(self, peer):
        """What whoever needs ``peer`` is answered."""
        self.joiner.ask(peer)
        wait_until(lambda: self.step() or self._refused, "a refusal")
        (found,), self._refused = self._refused, []
        return found

    def ends(self):
        """When all links are behind their fences."""
        wait_until(lambda: self.step() or not any(self.peers.counts().values()), "the fences")


def test_who_introduces_nobody_takes_no_place():
    with side() as (decode, transport):
        transport.may.set()
        asking = Asking(decode, ManualClock(), [Joined(())])
        assert asking.refused(PEER) == (PEER, "the peer introduces none of its ranks")
        assert not decode.counts()[LinkState.JOINING]
        asking.ends()


def test_who_was_refused_is_not_asked_again_for_some_seconds():
    clock = ManualClock()
    with side() as (decode, transport):
        transport.may.set()
        asking = Asking(decode, clock, [JoinRefused("no 1"), JoinRefused(""), JoinRefused("no 3")])
        assert [asking.refused(PEER) for _ in range(3)] == [(PEER, "no 1")] * 3
        assert asking.refused(D) == (D, "it refuses")
        assert not asking.joiner.refused()
        clock.advance(REST_S / 2)
        assert asking.refused(PEER) == (PEER, "no 1")
        asking.ends()
        clock.advance(REST_S / 2)
        assert asking.refused(PEER) == (PEER, "no 3")
        assert asking.asked == [PEER, D, PEER]


def test_who_is_to_be_asked_again_is_after_a_moment_and_costs_no_agent_before():
    clock = ManualClock()
    with side() as (decode, transport):
        transport.may.set()
        asking = Asking(decode, clock, [Again(), Again(), JoinRefused("no")])
        for count in (1, 2):
            assert bool(asking.joiner.waits_for(PEER)) == (count > 1)
            asking.joiner.ask(PEER)
            wait_until(lambda: asking.step() or decode.counts()[LinkState.ENDING], "its answer")
            asking.ends()
            clock.advance(AGAIN_S - 0.01)
            asking.joiner.ask(PEER)
            assert not any(decode.counts().values())
            assert len(transport.described) == len(asking.asked) == count
            assert asking.joiner.waits_for(PEER) == NOT_YET
            clock.advance(0.01)
        assert asking.refused(PEER) == (PEER, "no")
        assert not asking.joiner.waits_for(PEER)
        assert asking.asked == [PEER] * 3


def test_who_has_been_joined_after_all_waits_for_nothing():
    clock = ManualClock()
    with side() as (decode, transport), side() as (prefill, its):
        transport.may.set()
        its.may.set()
        asking = Asking(decode, clock, [Again(), Joined((prefill.introduce(D),))])
        asking.joiner.ask(PEER)
        wait_until(lambda: asking.step() or asking.joiner.waits_for(PEER), "its answer")
        asking.ends()
        clock.advance(AGAIN_S)
        asking.joiner.ask(PEER)
        wait_until(lambda: asking.step() or decode.knows(PEER), "its link")
        assert not asking.joiner.waits_for(PEER)


@pytest.mark.parametrize("ranked", [False, True], ids=["one rank", "ranks"])
def test_a_reason_is_no_longer_than_a_peer_s_words_may_be(ranked):
    """Of an introduction, which may have millions of them."""
    sizes = list(range(1, 5000))
    with side() as (decode, transport), side() as (prefill, its):
        transport.may.set()
        its.may.set()
        fields = json.loads(prefill.introduce(D))
        places = {name: [column[0]] * len(sizes) for name, column in fields["places"].items()}
        fields["places"] = places | {"size": sizes}
        answer = Joined((json.dumps(fields).encode(),))
        if ranked:
            asked = PeerCall(PeerVerb.INTRODUCE, PEER, answer.introductions)
            refused = together([RankedPeers([decode], 0).call(asked)]).reason
            assert join(decode, PEER, answer.introductions).result(timeout=0).reason == refused
        else:
            _, refused = Asking(decode, ManualClock(), [answer]).refused(PEER)
    assert "bytes of a page's parts, by group, are" in refused
    assert len(refused) == REASON_CHARS


def test_what_a_call_is_refused_for_does_not_repeat_all_of_it():
    with pytest.raises(TransportError, match="cannot be read") as refused:
        decode_call(b"\xff" * (1 << 20))
    assert len(str(refused.value)) < REASON_CHARS


@pytest.mark.parametrize("nobody", [[], "", {}])
def test_an_answer_that_introduces_nobody_is_none(nobody):
    with pytest.raises(TransportError, match="none of its ranks"):
        decode_answer(json.dumps({"introductions": nobody}).encode())


def test_what_is_no_text_is_a_refusal():
    with side() as (peers, _):
        words = json.dumps({"handshake": "\ud800", "places": {}, "transport": ""}).encode()
        answer = join(peers, PeerId("liar"), (words,)).result(timeout=0)
    assert isinstance(answer, JoinRefused)
    assert "cannot be read" in answer.reason


def test_an_agent_for_which_the_system_has_no_files_left_is_a_refusal():
    def none_left(_memories):
        raise OSError(errno.EMFILE, "Too many open files")

    transport = WiredTransport("loopback", [], none_left, DEFAULT_LINK)
    with pytest.raises(TransportError, match=r"no link for p: OSError.*Too many open files"):
        transport.describe(PeerId("p"))
    transport.close()


def test_an_agent_for_which_the_system_has_no_thread_left_is_a_refusal_and_leaves_nothing(
    monkeypatch,
):
    start, severed, lacking = threading.Thread.start, [], True

    def started(thread):
        if lacking and thread.name.startswith(("transport", "stratakv-describe")):
            raise RuntimeError("can't start new thread")
        start(thread)

    class Counted(LoopbackWire):
        def sever(self):
            severed.append(self)
            return super().sever()

    def opens(memories):
        return WiredTransport("loopback", memories, Counted, DEFAULT_LINK)

    peers, words = Peers(), []
    peers.open(SPEC, DevicePools(SPEC, (8,)), b"model", opens)
    monkeypatch.setattr(threading.Thread, "start", started)
    for _ in range(2):
        peers.introduce_then(D, words.append)
        wait_until(lambda: peers.poll() or words, "its end")
        assert 'no link for decode: RuntimeError("can\'t start new thread")' in str(words.pop())
        assert len(severed) == 1
        severed.clear()
    lacking = False
    peers.introduce_then(D, words.append)
    wait_until(lambda: peers.poll() or words, "its end")
    assert isinstance(words.pop(), bytes)
    peers.close()

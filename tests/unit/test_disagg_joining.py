"""A peer that does not fit costs no agent, and one that is made holds up nobody."""

import errno
import json
import threading
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from stratakv.core.errors import TransportError
from stratakv.disagg.joining import (
    Again,
    Joined,
    JoinRefused,
    PeerJoiner,
    decode_answer,
    join,
)
from stratakv.disagg.link import DEFAULT_LINK
from stratakv.disagg.loopback import LoopbackWire
from stratakv.disagg.peers import Peers
from stratakv.disagg.ranked_joining import RankedHost
from stratakv.disagg.statistics import LinkState
from stratakv.disagg.transport import Disconnected, PeerId
from stratakv.disagg.wire_transport import WiredTransport
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
        joiner = PeerJoiner(decode, lambda *_: pytest.fail("nobody is asked yet"))
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


def test_who_introduces_nobody_takes_no_place():
    answer = Future()
    answer.set_result(Joined(()))
    with side() as (decode, transport):
        transport.may.set()
        joiner = PeerJoiner(decode, lambda *_: answer)
        joiner.ask(PEER)
        refused = []

        def polled():
            decode.poll()
            refused.extend(joiner.refused())
            return refused

        wait_until(polled, "a refusal")
        assert refused == [(PEER, "the peer introduces none of its ranks")]
        assert not decode.counts()[LinkState.JOINING]

        def gone():
            decode.poll()
            return not any(decode.counts().values())

        wait_until(gone, "its fence")


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

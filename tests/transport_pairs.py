"""Both roles over real transports, for tests: two sides that meet, part and meet again."""

from contextlib import contextmanager, suppress
from dataclasses import replace
from random import Random

from stratakv.core.clock import ManualClock, MonotonicClock
from stratakv.disagg.deadlines import HandOffLimits
from stratakv.disagg.decode_role import DecodeRole
from stratakv.disagg.joining import PeerJoiner, join
from stratakv.disagg.peers import Peers, StillEndingError
from stratakv.disagg.prefill_role import PrefillRole
from stratakv.disagg.rests import Rests
from stratakv.disagg.session import SessionLimits
from stratakv.disagg.transport import PeerId
from stratakv.spec.groups import Home
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.patience import wait_until
from stratakv.testing.transport_faults import FaultyTransport, TransportFaults
from tests.fixtures.transports import (
    mooncake_is_here,
    nixl_is_here,
    open_loopback,
    open_mooncake,
    open_nixl,
)
from tests.pairs import model_pair, token_pair

P, D = PeerId("prefill"), PeerId("decode")
UNTIDY = TransportFaults(late=3, delay=2, parts=5)
STUCK = TransportFaults(late=1 << 30)
LIMITS = HandOffLimits(sessions=SessionLimits(bootstrap_s=10, waiting_s=20, transfer_s=40))


def untidy(seed, faults=UNTIDY):
    return lambda memories: FaultyTransport(open_loopback(memories), Random(seed), faults)


def tcp(memories):
    nixl_is_here()
    return open_nixl("tcp", memories)


def mooncake(memories):
    mooncake_is_here()
    return open_mooncake(memories)


def on_device(spec):
    """The same cache where nothing is at home on the host."""
    return replace(spec, groups=tuple(replace(group, home=Home.DEVICE) for group in spec.groups))


class Link:
    """Both roles, and the transports between them. ``joins``: the sides are introduced by hand.
    ``asks``: the one that decodes joins the other when a request needs it, and parts when idle."""

    def __init__(self, prefill=open_loopback, decode=open_loopback, joins=True, asks=False):
        self.clock = ManualClock()
        self.peers = {side: Peers(self.clock) for side in HandOffSide}
        self.asked = 0
        rests = Rests(MonotonicClock())  # what must pass before a peer is asked again does
        joiner = PeerJoiner(self.peers[HandOffSide.DECODE], self._carry, rests) if asks else None
        self.opens = {HandOffSide.PREFILL: prefill, HandOffSide.DECODE: decode}
        self.roles = {
            HandOffSide.PREFILL: PrefillRole(self.peers[HandOffSide.PREFILL], LIMITS, self.clock),
            HandOffSide.DECODE: DecodeRole(
                self.peers[HandOffSide.DECODE], lambda _: P, LIMITS, self.clock, joiner
            ),
        }
        self.joins = joins and not asks
        self._returned = []
        self.roles[HandOffSide.PREFILL].submit_to(self._returned.append)
        self.models = {HandOffSide.PREFILL: b"model", HandOffSide.DECODE: b"model"}

    def connect(self, spec, prefill, decode, arenas=()):
        """``spec``: of the side that decodes, whose host pages ``arenas`` has."""
        for side, pools in ((HandOffSide.PREFILL, prefill), (HandOffSide.DECODE, decode)):
            there = spec if side is HandOffSide.DECODE else on_device(spec)
            opens = self.opens[side]
            self.peers[side].open(there, pools, self.models[side], opens, arenas=arenas)
        if self.joins:
            self.join()

    def join(self):
        prefill, decode = self.peers[HandOffSide.PREFILL], self.peers[HandOffSide.DECODE]
        introduction, answer = prefill.introduce(D), decode.introduce(P)
        decode.meet(P, introduction)
        prefill.meet(D, answer)

    def _carry(self, peer, introductions):
        assert peer == P
        self.asked += 1
        return join(self.peers[HandOffSide.PREFILL], D, introductions)

    def returned(self):
        found = self._returned[:]
        self._returned.clear()
        return found

    def __len__(self):
        return sum(map(len, self.roles.values()))

    def close(self):
        for peers in self.peers.values():
            peers.close()


@contextmanager
def tokens_over(link, *rules, **settings):
    with token_pair(*rules, link=link, **settings) as pair:
        try:
            yield pair
        finally:
            link.close()


@contextmanager
def models_over(link, family, **settings):
    with model_pair(family, link=link, **settings) as pair:
        try:
            yield pair
        finally:
            link.close()


def settle(pair):
    """Until both sides have heard everything."""

    def over():
        pair.step()
        return not len(pair.link)

    pair.drain()
    wait_until(over, "the end of every session")
    assert not pair.link.roles[HandOffSide.DECODE].lease_counts().leased
    pair.assert_nothing_left()


def until(pair, condition, what):
    def looked():
        pair.step()
        return condition()

    wait_until(looked, what)


def apart(pair):
    """Whether neither side can speak to the other."""
    pair.step()
    prefill, decode = (pair.link.peers[side] for side in HandOffSide)
    return not prefill.knows(D) and not decode.knows(P)


def join_again(pair):
    """When both are behind their fences, to which they are brought."""

    def joined():
        pair.step()
        with suppress(StillEndingError):
            pair.link.join()
            return True
        return False

    wait_until(joined, "the fences")

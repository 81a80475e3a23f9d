"""Aborts, lost peers and late bytes in the middle of hand-offs, drawn from a seed.

Owns the walk: a request is followed to a moment on one side, given up there, or on both, and others
take its pages at once. What is looked at: each answer, each byte that is written or read
(``watched_transport``, ``HeldTokens``), and at the end every page of both sides. The link has no
threads: without a host tier a seed is a run.
"""

from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from random import Random

import numpy as np

from stratakv.core.ids import RequestId
from stratakv.disagg.peers import StillEndingError
from stratakv.engine.request import Failure, FinishReason, Phase, TransferSession
from stratakv.testing.fleet.network import NetworkPace, SimNetwork
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.transport_faults import FaultyTransport, TransportFaults
from stratakv.tree.nodes import Tier
from tests.engines import VOCABULARY, allocator, ended, expected_tokens, greedy, tokens_of
from tests.transport_pairs import D, Link, P, tokens_over
from tests.watched_transport import Watched, assert_poisoned

PREFILL, DECODE = HandOffSide
HANG = 4000
"""Steps that a few requests take at most, with all that they wait for; the clock is put forward
every ``NAP`` of them."""
NAP = 120
CHECK_EVERY = 8
LOOK_EVERY = 4


class Moment(Enum):
    """Side and phase, and whether a chunk is being written."""

    PREFILL_WAITING = PREFILL, Phase.WAITING, False
    PREFILL_COMPUTING = PREFILL, Phase.PREFILLING, False
    PREFILL_CHUNK_IN_FLIGHT = PREFILL, Phase.PREFILLING, True
    PREFILL_TRANSFERRING = PREFILL, Phase.TRANSFERRING, True
    DECODE_WAITING = DECODE, Phase.WAITING, False
    DECODE_TRANSFERRING = DECODE, Phase.TRANSFERRING, False
    DECODE_DECODING = DECODE, Phase.DECODING, False


class SimLink(Link):
    """Both ends of one seed: slow, untidy, and with ``lost`` some ends that are never reported."""

    def __init__(self, seed: int, faults: TransportFaults, joins: bool = True) -> None:
        self.watched = {}
        network = SimNetwork(Random(seed), NetworkPace(), assert_poisoned)

        def opens(side):
            def opened(memories):
                random = Random(f"{seed} {side.name}")
                faulty = FaultyTransport(network.open(memories), random, faults)
                self.watched[side] = Watched(faulty, memories)
                return self.watched[side]

            return opened

        super().__init__(opens(PREFILL), opens(DECODE), joins)


def faults_of(rng: Random) -> TransportFaults:
    return TransportFaults(
        late=rng.choice((0, 3, 12)),
        delay=rng.choice((0, 2, 6)),
        parts=rng.choice((1, 4)),
        lost=rng.choice((0.0, 0.0, 0.1)),
    )


class Walk:
    """``hit``: how often a request was given up at each moment. ``doomed``: requests that may fail,
    because of what was done to their session or to the link."""

    def __init__(self, pair, rng: Random) -> None:
        self.pair, self.rng, self.link = pair, rng, pair.link
        self.hit: Counter[Moment] = Counter()
        self.right = self.failed = 0
        self._may_fail: set[str] = set()
        self._asked = {}
        self._count = self._idle = 0

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> None:
        self.pair.step()
        self._meet()
        self._idle += 1
        if self._idle % LOOK_EVERY == 0:
            self.look()
        assert self._idle < HANG, "nothing comes to its end"
        if self._idle % NAP == 0:  # something was lost, and time is all that ends it
            self._all_may_fail()
            self.link.clock.advance(5)

    def _meet(self) -> None:
        prefill, decode = (self.link.peers[side] for side in (PREFILL, DECODE))
        if prefill.knows(D) or decode.knows(P):
            return
        self._all_may_fail()
        with suppress(StillEndingError):  # then at a later step
            self.link.join()

    def _all_may_fail(self) -> None:
        self._may_fail.update(self._asked)

    def until(self, condition) -> None:
        self._idle = 0
        while not condition():
            self.step()

    # -- requests --------------------------------------------------------------------------------

    def submit(self, session: str | None = None) -> str:
        """A prompt like no other from its first token on, or one whose beginning was asked
        before."""
        name, rng = f"r{self._count}", self.rng
        self._count += 1
        first = self._count if rng.random() < 0.8 else rng.randrange(self._count)
        tokens = [(first * 31 + n * 7) % VOCABULARY for n in range(rng.randrange(20, 60))]
        asked = greedy(name, [first % VOCABULARY, *tokens], rng.randrange(1, 8))
        if session is not None:
            asked = replace(asked, session=TransferSession(session))
            self._may_fail.add(name)  # it may meet what is left of another one
        self._asked[name] = asked
        self.pair.submit(asked)
        return name

    def over(self, name: str) -> bool:
        """Both sides have reported its end."""
        outs = (self.pair.outputs(name, side) for side in HandOffSide)
        return all(out and out[-1].finish is not None for out in outs)

    def judge(self, name: str) -> None:
        """Right, or failed with a reason where it may."""
        asked = self._asked.pop(name)
        out = self.pair.outputs(name)
        generated, right = tokens_of(out), expected_tokens(asked.tokens, asked.sampling.max_tokens)
        assert generated == right[: len(generated)], f"{name}: a wrong token"
        if generated == right and ended(out) is FinishReason.LENGTH:
            self.right += 1
            return
        assert name in self._may_fail, f"{name} has failed: {out[-1]}"
        last = out[-1]
        assert last.finish is FinishReason.ABORT or last.failure is Failure.TRANSFER, last
        assert last.finish is FinishReason.ABORT or last.reason, "nobody is told why"
        self.failed += 1

    # -- one of many -----------------------------------------------------------------------------

    def abort_at(self, moment: Moment) -> None:
        name = self.submit(None if self.rng.random() < 0.7 else f"s{self._count % 5}")
        self.until(lambda: self._is_at(moment, name) or self.over(name))
        for _ in range(self.rng.choice((0, 1, 4, 12, 25))):
            if self._is_at(moment, name):
                self.step()
        self._give_up(moment, name)
        for parts in self.pair.sides.values():
            if self.rng.random() < 0.4:  # what it leaves to the cache is free as well
                parts.cache.progress.push_out(Tier.DEVICE)
        self.submit()
        if (session := self._asked[name].session) is not None:
            self.submit(session.name)  # the same again, while words are under way
        if self.rng.random() < 0.1:
            side = self.rng.choice(list(HandOffSide))
            self.link.peers[side].disconnect(D if side is PREFILL else P)
            self._all_may_fail()
        if self.rng.random() < 0.7:  # otherwise beside the next ones
            self.until(lambda: all(map(self.over, self._asked)))
        for each in [one for one in self._asked if self.over(one)]:
            self.judge(each)

    def _is_at(self, moment: Moment, name: str) -> bool:
        side, phase, reads = moment.value
        if self.pair.phase(side, name) is not phase:
            return False
        return not reads or (self.link.watched[side].reading and self._alone(name))

    def _alone(self, name: str) -> bool:
        busy = (Phase.PREFILLING, Phase.TRANSFERRING)
        others = (each for each in self._asked if each != name)
        return all(self.pair.phase(PREFILL, each) not in busy for each in others)

    def _give_up(self, moment: Moment, name: str) -> None:
        side = moment.value[0]
        self._may_fail.add(name)
        self.hit[moment] += self._is_at(moment, name)
        self.pair.sides[side].engine.abort(RequestId(name))
        if self.rng.random() < 0.4:
            for _ in range(self.rng.choice((0, 0, 1, 4))):
                self.step()
            across = self.pair.sides[DECODE if side is PREFILL else PREFILL]
            across.engine.abort(RequestId(name))

    def end(self) -> None:
        """Nothing is left of any request."""
        self.until(lambda: all(map(self.over, self._asked)))
        for name in list(self._asked):
            self.judge(name)
        self._idle = 0
        self.until(lambda: not len(self.link))
        assert not self.link.roles[DECODE].lease_counts().leased
        self.pair.assert_nothing_left()
        self.look()

    def look(self) -> None:
        """Nobody has written to a page that is nobody's."""
        for parts in self.pair.sides.values():
            for group in parts.spec.groups:
                pool = allocator(parts, Tier.DEVICE, group.id)
                free = pool.next(pool.available())
                for buffer in group.buffers:
                    for layer in buffer.layers:
                        rows = parts.pools.layer(group.id, buffer.name, layer).numpy()
                        assert np.isnan(rows[free]).all(), "a page that nobody owns was written"


@contextmanager
def walking(rules, seed: int, link: SimLink | None = None):
    rng = Random(seed)
    link = SimLink(seed, faults_of(rng)) if link is None else link
    device = rng.choice((20, 30, 45))
    pages = {"device": device, "prefill": rng.choice((20, 30, 45)), "host": rng.choice((0, 100))}
    chunk = rng.choice((3, 9))
    with tokens_over(link, *rules, **pages, chunk_tokens=chunk, reserve_tokens=1) as pair:
        pair.check_every = CHECK_EVERY
        yield Walk(pair, rng)


def campaign(rules, seed: int, aborts: int, link: SimLink | None = None) -> Walk:
    """``aborts`` of them, of every moment in turn."""
    with walking(rules, seed, link) as walk:
        moments = list(Moment)
        for at in range(aborts):
            if at % len(moments) == 0:
                walk.rng.shuffle(moments)
            walk.abort_at(moments[at % len(moments)])
        walk.end()
        return walk

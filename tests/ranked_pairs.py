"""Pairs of engines on several ranks, one that computes prompts and one that decodes: each rank has
its part of both, and they step together, so that threads of one process do, or processes. One of
the two may have one rank alone, in the process of the other's first.

Owns the order of steps: rank 0 says whose is next, the others do the same. ``Play`` is what a test
brings: how each rank's ends are opened, and what rank 0 does.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from stratakv.agreement.ranks import Ranks, SingleRank
from stratakv.assembly.build import Sockets
from stratakv.assembly.rank_context import RankContext
from stratakv.assembly.roles import agreeing
from stratakv.core.clock import ManualClock, MonotonicClock
from stratakv.core.ids import RequestId
from stratakv.disagg.deadlines import HandOffLimits
from stratakv.disagg.decode_role import DecodeRole
from stratakv.disagg.joining import JoinAnswer
from stratakv.disagg.lanes import shares
from stratakv.disagg.peers import Peers
from stratakv.disagg.prefill_role import PrefillRole
from stratakv.disagg.ranked_joining import RankedHost, RankedJoiner
from stratakv.disagg.rests import Rests
from stratakv.disagg.session import SessionLimits
from stratakv.disagg.transport import PeerId
from stratakv.engine.request import Output, Prompt
from stratakv.spec.sharding import Sharding
from stratakv.testing.fleet.thread_ranks import Rendezvous, ThreadRanks
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.engines import all_free, tokens_of
from tests.fixtures.transports import open_loopback

PREFILL, DECODE = HandOffSide
P, D = PeerId("prefill"), PeerId("decode")
LIMITS = HandOffLimits(sessions=SessionLimits(bootstrap_s=10, waiting_s=20, transfer_s=40))


@dataclass
class Play:
    """``engine``: a rank's engine of one side, with these sockets: a context manager. ``opens``:
    how a rank opens its end of a side. ``acts``: what rank 0 may have every rank do by name.
    ``asks``: the side that decodes joins the other when a request needs it; otherwise they are
    introduced by hand. ``models``: of those ranks that have another one. ``alone``: the side of one
    rank, which asks. ``sharding``: a side's, of so many ranks."""

    engine: Callable[[HandOffSide, Sockets], object]
    opens: Callable[[HandOffSide, int], Callable] = lambda side, rank: open_loopback
    acts: dict[str, Callable[["RankedPair"], None]] = field(default_factory=dict)
    asks: bool = False
    models: dict[tuple[HandOffSide, int], bytes] = field(default_factory=dict)
    alone: HandOffSide | None = None
    sharding: Callable[[Sharding, int], Sharding] = lambda own, ranks: replace(own, ranks=ranks)


class RankedPair:
    """One rank of both engines."""

    def __init__(self, play: Play, ranks: Ranks, undo: ExitStack) -> None:
        self.play, self.ranks, self.rank = play, ranks, ranks.rank
        self.clock = ManualClock()
        self.calls: list[tuple[tuple[bytes, ...], Future[JoinAnswer]]] = []
        self.peers: dict[HandOffSide, list[Peers]] = {}
        self.inner, self.sides, self.roles, self.hosts = {}, {}, {}, {}
        self.out: dict[HandOffSide, dict[str, list[Output]]] = {side: {} for side in HandOffSide}
        for side in HandOffSide:
            if side is not play.alone or not self.rank:
                self._open(side, undo)
        for lanes in self.peers.values():  # before the engines
            for peers in lanes:
                undo.callback(peers.close)
        if not play.asks:
            self.join()

    def _open(self, side: HandOffSide, undo: ExitStack) -> None:
        play, alone = self.play, side is self.play.alone
        context = RankContext.of(SingleRank() if alone else self.ranks, self.clock)
        count = self.ranks.size if alone else 1
        clock = context.clock
        lanes = [Peers(clock) for _ in range(count)]
        joiner, send = None, context.sync.outbox.append
        if side is DECODE and play.asks:
            carry = None if self.rank else self._carry
            rests = Rests(MonotonicClock())  # what must pass before a peer is asked again does
            joiner = RankedJoiner(lanes, self.rank, send, carry, rests)
        own = [
            PrefillRole(peers, LIMITS, clock)
            if side is PREFILL
            else DecodeRole(peers, lambda _: P, LIMITS, clock, joiner if not at else None)
            for at, peers in enumerate(lanes)
        ]
        host = self.hosts[side] = RankedHost(lanes, self.rank, send)
        links = host.links if joiner is None else joiner.links
        self.peers[side], self.inner[side] = lanes, own
        self.roles[side] = agreeing(own, links, context)
        sockets = Sockets(role=lambda: self.roles[side], ranks=context)
        parts = self.sides[side] = undo.enter_context(play.engine(side, sockets))
        sharding = parts.plan.sizes.sharding
        mine = replace(sharding, ranks=1 if alone else self.ranks.size)
        every = play.sharding(sharding, self.ranks.size)
        found = shares(mine, every, self.rank, receives=side is DECODE)
        model = play.models.get((side, self.rank), b"model")
        for peers, share in zip(lanes, found, strict=True):
            peers.open(parts.spec, parts.pools, model, play.opens(side, self.rank), share)
        if side is PREFILL and not self.rank:
            own[0].submit_to(parts.port.submit)

    def join(self) -> None:
        (prefill,), (decode,) = self.peers[PREFILL], self.peers[DECODE]
        ours, theirs = prefill.introduce(D), decode.introduce(P)
        decode.meet(P, ours)
        prefill.meet(D, theirs)

    # -- every rank ------------------------------------------------------------------------------

    def follow(self) -> None:
        while (word := self.ranks.gather("")[0]) != "end":
            self._do(word)

    def _do(self, word: str) -> list[Output]:
        if word in self.play.acts:
            self.play.acts[word](self)
            return []
        match word:
            case "join":
                self.join()
            case "check":
                for parts in self.sides.values():
                    parts.engine.check()
            case "nothing is left":
                self._assert_nothing_left()
            case _:
                parts = self.sides.get(HandOffSide[word])
                return [] if parts is None else parts.port.step()
        return []

    def _assert_nothing_left(self) -> None:
        assert not any(own.lease_counts().leased for own in self.inner.get(DECODE, ()))
        for side, parts in self.sides.items():
            assert not any(map(len, self.inner[side]))
            assert not len(self.roles[side])
            stats = parts.engine.stats()
            assert (stats.waiting, stats.running) == (0, 0)
            assert parts.engine.flush()
            parts.engine.check()
            assert all_free(parts)

    # -- rank 0 ----------------------------------------------------------------------------------

    def do(self, word: str) -> list[Output]:
        """On every rank."""
        self.ranks.gather(word)
        return self._do(word)

    def submit(self, asked: Prompt) -> None:
        for side, parts in self.sides.items():
            self.out[side][asked.id] = []
            parts.port.submit(asked)

    def abort(self, side: HandOffSide, name: str) -> None:
        self.sides[side].port.abort(RequestId(name))

    def _carry(self, peer: PeerId, introductions: Sequence[bytes]) -> "Future[JoinAnswer]":
        assert peer == P
        self.calls.append((tuple(introductions), Future()))
        return self.calls[-1][1]

    def step(self) -> None:
        calls, self.calls = self.calls, []
        for introductions, answer in calls:
            joined = self.hosts[PREFILL].join(D, introductions)
            joined.add_done_callback(lambda one, answer=answer: answer.set_result(one.result()))
        for side in HandOffSide:
            for output in self.do(side.name):
                self.out[side].setdefault(output.request, []).append(output)

    def busy(self) -> bool:
        return any(parts.port.has_work() for parts in self.sides.values())

    def drain(self) -> None:
        while self.busy():
            self.step()
        self.do("check")

    def run(self, *asked: Prompt) -> list[list[int]]:
        for one in asked:
            self.submit(one)
        self.drain()
        return [tokens_of(self.out[DECODE][one.id]) for one in asked]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def looked() -> bool:
            self.step()
            return condition()

        wait_until(looked, what)

    def settle(self) -> None:
        """Until both sides know of every end; nothing is left on any rank."""
        self.drain()
        every = [own for side in self.inner.values() for own in side]
        self.until(lambda: not any(map(len, every)), "the end of every session")
        for _ in range(3):  # the other ranks may be a step behind
            self.step()
        self.do("nothing is left")


def perform(play: Play, ranks: Ranks, act: Callable[[RankedPair], object]) -> object:
    """What one rank does; what ``act`` returns on rank 0."""
    with ExitStack() as undo:
        pair = RankedPair(play, ranks, undo)
        if ranks.rank:
            pair.follow()
            return None
        try:
            return act(pair)
        finally:
            ranks.gather("end")


def on_threads(
    play: Play, act: Callable[[RankedPair], object], ranks: int = 2, seed: int = 0
) -> object:
    """All ranks in this process; what the first one that failed has raised is raised here."""
    rendezvous = Rendezvous(ranks, seed)
    faults: dict[int, BaseException] = {}
    found: list[object] = []

    def live(rank: int) -> None:
        why = "has ended"
        rendezvous.begin(rank)
        try:
            found.append(perform(play, ThreadRanks(rank, rendezvous), act))
        except BaseException as fault:  # noqa: BLE001 - raised by whoever waits
            faults[rank] = fault
            why = f"has failed: {fault!r}"
        finally:
            rendezvous.leave(rank, why)

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    rendezvous.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive() or faults, rendezvous.waiting()
    for fault in faults.values():
        raise fault
    return next(one for one in found if one is not None) if any(found) else None

"""The composition root of simulated pairs: an engine that computes prompts and one that decodes, in
one process, over a network, devices and stores of their own, and clocks that nobody waits for.

Owns the order of a run, and what must be true at its end. One seed gives one run, to the last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from typing import Final

from stratakv.core.errors import TransportError
from stratakv.disagg.peers import Peers, StillEndingError
from stratakv.disagg.prefill_role import PrefillRole
from stratakv.disagg.transport import Memory, PeerId, Transport
from stratakv.engine.request import Output
from stratakv.testing.fleet.member import Member
from stratakv.testing.fleet.network import SimNetwork, SimTransport
from stratakv.testing.fleet.pair_client import PairClient
from stratakv.testing.fleet.pair_plan import (
    ADDRESS,
    DECODE,
    PREFILL,
    BreakLink,
    PairEvent,
    PairPlan,
    pair_plan_of,
)
from stratakv.testing.fleet.stores import Stores
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.transport_faults import FaultyTransport

P: Final = PeerId(ADDRESS)
D: Final = PeerId("decode")
MOST_TURNS: Final = 6000
QUIET_TURNS: Final = 40
"""After so many without an output clients give up whoever may fail, and where only those are left
time leaps."""


@dataclass(slots=True)
class PairTotals:
    """What a run came to. ``turns``: steps of both sides. ``digest``: of all outputs, in order."""

    turns: int = 0
    leaps: int = 0
    joins: int = 0
    digest: str = ""


@dataclass(slots=True, eq=False)
class _Link:
    """Between one rank of both sides. ``waits``: turns until they introduce themselves; ``asked``
    and ``answer``: introductions that are on their way. ``down``: they have to meet; ``broken``:
    since a break, until they have met behind it. ``doomed``: what they meet with is broken
    already."""

    prefill: Peers
    decode: Peers
    waits: int
    asked: bytes | None = None
    answer: bytes | None = None
    down: bool = True
    broken: bool = False
    doomed: bool = False

    def go_on(self) -> bool:
        """Introduce both to each other, if they are not; whether they have met now."""
        if not self.down and self.prefill.knows(D) and self.decode.knows(P):
            return False
        self.down = True
        self.waits -= 1
        if self.waits >= 0:
            return False
        try:
            if self.asked is None:
                self.asked = self.decode.introduce(P)
            if self.answer is None:
                self.answer = self.prefill.introduce(D)
        except StillEndingError:
            return False
        asked, answer, self.asked, self.answer = self.asked, self.answer, None, None
        try:
            self.prefill.meet(D, asked)
            self.decode.meet(P, answer)
        except TransportError:  # one has ended meanwhile
            self.doomed = False
            return False
        self.down, self.broken, self.doomed = False, self.doomed, False
        return True

    def break_for(self, turns: int) -> None:
        self.down = self.broken = True
        self.doomed = self.asked is not None
        self.waits = turns


@dataclass(slots=True, eq=False)
class _Opener:
    """How one side's ranks open their ends, in order. ``ends``: beneath any faults."""

    network: SimNetwork
    plan: PairPlan
    side: HandOffSide
    ends: list[SimTransport] = field(default_factory=list[SimTransport])

    def open(self, memories: Sequence[Memory]) -> Transport:
        end = self.network.open(memories)
        self.ends.append(end)
        if self.plan.untidy is None:
            return end
        random = Random(f"{self.plan.seed} {self.side.name} {len(self.ends)}")
        return FaultyTransport(end, random, self.plan.untidy)


class SimPair:
    """``members`` may be looked at, and made worse, before ``run``."""

    def __init__(self, plan: PairPlan) -> None:
        self.plan = plan
        self.totals = PairTotals()
        self.network = SimNetwork(Random(f"{plan.seed} network"), plan.network)
        self._random = Random(f"{plan.seed} turns")
        shared = Stores(plan.sides[PREFILL])
        self.stores = {
            side: shared if plan.one_store or side is PREFILL else Stores(each)
            for side, each in plan.sides.items()
        }
        openers = {side: _Opener(self.network, plan, side) for side in HandOffSide}
        self.members = {
            side: Member(side, each, plan.limits, self.stores[side], openers[side].open)
            for side, each in plan.sides.items()
        }
        prefill = self.members[PREFILL]
        own = prefill.roles[0]
        assert isinstance(own, PrefillRole)
        own.submit_to(prefill.engine.submit)
        self._ends = openers[DECODE].ends
        self.links = [
            _Link(prefill, decode, plan.meets_at)
            for prefill, decode in zip(
                self.members[PREFILL].peers, self.members[DECODE].peers, strict=True
            )
        ]
        self.client = PairClient(self.members, patient=plan.patient)
        self._digest = sha256()
        self._quiet = 0

    def run(self) -> PairTotals:
        """AssertionError, or what else a side raises, with a note that names the seed."""
        members = self.members.values()
        for member in members:
            member.start()
        try:
            self._play()
            self._verify_end()
            for member in members:
                member.close()
            for side, plan in self.plan.sides.items():
                self.stores[side].check(plan)
        except BaseException as fault:
            fault.add_note(f"seed {self.plan.seed} of pairs, turn {self.totals.turns}")
            for member in members:
                member.leave()
            raise
        self.totals.digest = self._digest.hexdigest()
        return self.totals

    def _play(self) -> None:
        for some in self.plan.rounds:
            start, left = self.totals.turns, list(some)
            while left or self.client.open:
                while left and self.totals.turns - start >= left[0].at:
                    self._do(left.pop(0))
                if not left:
                    self.client.lonely()
                self._turn()
        while any(member.busy for member in self.members.values()):
            self._turn()

    def _do(self, event: PairEvent) -> None:
        match event.command:
            case BreakLink(rank, joins_in):
                self.client.excuse_open()
                self.links[rank].break_for(joins_in)
                self._ends[rank].lose(P)
            case _:
                self.client.see_links(down=any(link.broken for link in self.links))
                self.client.do(event)

    def _turn(self) -> None:
        """A step of either side, and what happens between two."""
        self.totals.turns += 1
        assert self.totals.turns < MOST_TURNS, f"no end after {MOST_TURNS} turns"
        for link in self.links:
            self.totals.joins += link.go_on()
        side = PREFILL if self._random.random() < self.plan.share else DECODE
        self._quiet += 1
        for output in self.members[side].step():
            self._quiet = 0
            self._note(side, output)
            if output.request in self.client.sides[side].prompts:  # others were sent back
                self.client.sides[side].on_output(output)
        self.client.sides[side].go_on()
        if self._quiet > QUIET_TURNS:
            self._quiet = 0
            self.client.give_up()
            if not self.client.waits:
                self._leap()

    def _leap(self) -> None:
        """All deadlines pass."""
        self.totals.leaps += 1
        limits = self.plan.limits
        sessions = limits.sessions
        longest = max(sessions.bootstrap_s, sessions.waiting_s, sessions.transfer_s)
        for member in self.members.values():
            member.advance(longest + limits.answer_s + 1.0)

    def _note(self, side: HandOffSide, output: Output) -> None:
        what = (self.totals.turns, side.name, output.request, output.token, output.finish)
        self._digest.update(repr(what).encode())

    def _verify_end(self) -> None:
        for side, member in self.members.items():
            client = self.client.sides[side]
            assert client.ended.keys() == client.prompts.keys(), "requests were lost"
            member.verify_end()


def run_pair(seed: int) -> PairTotals:
    """All of one seed."""
    return SimPair(pair_plan_of(seed)).run()

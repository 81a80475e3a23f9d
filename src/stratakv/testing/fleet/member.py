"""One side of a simulated pair: an engine on one rank or several, and its role.

Owns the threads of all ranks but the first, whose thread is the caller's, and what must be true of
the side after each step and at its end. Only one thread of a pair runs at a time. Must not know
requests.
"""

from functools import partial
from threading import Thread

from stratakv.assembly.rank_context import RankContext
from stratakv.disagg.agreeing_role import AgreeingRole, Lane
from stratakv.disagg.deadlines import HandOffLimits
from stratakv.disagg.decode_role import DecodeRole
from stratakv.disagg.peers import OpenTransport, Peers
from stratakv.disagg.prefill_role import PrefillRole
from stratakv.disagg.transport import PeerId
from stratakv.engine.ranks.ranked import RankedEngine
from stratakv.engine.request import Output, Request
from stratakv.engine.roles import Role
from stratakv.testing.fleet.rank import SimRank
from stratakv.testing.fleet.scenario import Plan
from stratakv.testing.fleet.stores import MODEL, Stores
from stratakv.testing.fleet.thread_ranks import Rendezvous
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.patience import PATIENCE_S


def prefill_of(request: Request) -> PeerId | None:
    """Who computes a request's prompt, as a server finds it; None: whoever decodes."""
    session = request.prompt.session
    return None if session is None else PeerId(session.prefill)


class Member:
    """``peers`` and ``roles`` are each rank's own."""

    def __init__(
        self,
        side: HandOffSide,
        plan: Plan,
        limits: HandOffLimits,
        stores: Stores,
        open_transport: OpenTransport,
    ) -> None:
        self.side, self.plan = side, plan
        self._limits = limits
        self._rendezvous = Rendezvous(plan.ranks, plan.seed)
        self.peers = [Peers() for _ in range(plan.ranks)]
        self.roles: list[PrefillRole | DecodeRole] = []
        self.ranks = [
            SimRank(plan, rank, self._rendezvous, stores, partial(self._role, rank))
            for rank in range(plan.ranks)
        ]
        for peers, rank in zip(self.peers, self.ranks, strict=True):
            memory = rank.memory
            spec = plan.rank_spec
            peers.open(spec, memory.pools, MODEL, open_transport, arenas=memory.home)
        self._faults: list[BaseException] = []
        self._threads = [
            Thread(target=self._follow, args=(rank,), name=f"{side.name}-{rank.rank}", daemon=True)
            for rank in self.ranks[1:]
        ]

    @property
    def engine(self) -> RankedEngine:
        return self.ranks[0].engine

    def _role(self, rank: int, context: RankContext) -> Role:
        own = (
            PrefillRole(self.peers[rank], self._limits, context.clock)
            if self.side is HandOffSide.PREFILL
            else DecodeRole(self.peers[rank], prefill_of, self._limits, context.clock)
        )
        self.roles.append(own)
        if self.plan.ranks == 1:
            return own
        role = AgreeingRole([Lane(own, own)])
        context.agreement.include(role)
        context.agreement.watch("sessions", role.figures)
        return role

    # -- a run -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Let the other ranks come to where they wait for the first."""
        for thread in self._threads:
            thread.start()
        self._rendezvous.start()
        self._rendezvous.begin(0)

    def step(self) -> list[Output]:
        """A step of all ranks. What fails on another one is raised here."""
        try:
            outputs = self.engine.step()
        except BaseException as fault:  # noqa: BLE001 - the first one is raised
            raise (self._faults or [fault])[0] from None
        if self.plan.steps_at_once == 1:
            self.assert_poisoned()
        return outputs

    def assert_poisoned(self) -> None:
        for rank in self.ranks:
            rank.memory.assert_poisoned()

    def advance(self, by_s: float) -> None:
        for rank in self.ranks:
            rank.clock.advance(by_s)

    @property
    def busy(self) -> bool:
        """Whether anybody still has something to do or to receive."""
        return self.engine.has_work() or any(map(len, self.roles))

    def verify_end(self) -> None:
        """AssertionError where anything is leased, open or lost. All requests have ended."""
        assert self.engine.flush(), "something stands on pages that nobody asks for"
        for rank, role in zip(self.ranks, self.roles, strict=True):
            leases = role.stats().leases
            assert leases is None or not any(leases.leased.values()), f"still leased: {leases}"
            rank.inner.check()
            lost = [pool for pool in rank.cache.tiers.pools.stats() if pool.free != pool.total]
            assert not lost, f"{self.side.name} has lost pages: {lost}"

    def close(self) -> None:
        """End all ranks as a server does, and their links."""
        self.engine.close()
        self.leave()
        for rank in self.ranks:
            rank.inner.check()
        if self._faults:
            raise self._faults[0]

    def leave(self) -> None:
        """End all ranks, whatever has happened; nothing of them is left running."""
        self._rendezvous.leave(0, "has ended")
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"ranks stand still: {self._rendezvous.waiting()}"
        for peers in self.peers:
            peers.close()

    def _follow(self, this: SimRank) -> None:
        why = "has ended"
        self._rendezvous.begin(this.rank)
        try:
            this.engine.follow()
            this.inner.check()
        except BaseException as fault:  # noqa: BLE001 - kept for whoever runs the pair
            self._faults.append(fault)
            why = f"has failed ({type(fault).__name__}: {fault})"
        finally:
            self._rendezvous.leave(this.rank, why)

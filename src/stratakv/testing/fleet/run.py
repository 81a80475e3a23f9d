"""The composition root of simulated fleets: N ranks of the production engine in one process, over
fake devices, their stores and a clock that nobody waits for; and another fleet after the first.

Owns the order of a run, and what must be true at its end. One seed gives one run, to the last bit.
"""

from threading import Thread

from stratakv.core.errors import RankLostError
from stratakv.testing.fleet.client import FleetClient, RunTotals
from stratakv.testing.fleet.rank import SimRank
from stratakv.testing.fleet.scenario import Plan
from stratakv.testing.fleet.stores import Stores
from stratakv.testing.fleet.thread_ranks import Rendezvous
from stratakv.testing.fleet.variety import plan_of
from stratakv.testing.patience import PATIENCE_S


class Fleet:
    """``ranks`` may be looked at, and made worse, before ``run``. ``stores``: what an earlier fleet
    has left."""

    def __init__(self, plan: Plan, stores: Stores | None = None) -> None:
        self.plan = plan
        self.stores = stores or Stores(plan)
        self.rendezvous = Rendezvous(plan.ranks, plan.seed)
        self.ranks = [
            SimRank(plan, rank, self.rendezvous, self.stores) for rank in range(plan.ranks)
        ]
        self.client = FleetClient(plan, self.ranks[0].engine)
        self._faults: dict[int, BaseException] = {}  # the first one first

    @property
    def lost(self) -> SimRank | None:
        """The rank that has died."""
        return next((rank for rank in self.ranks if rank.fate.dead), None)

    def run(self) -> RunTotals:
        """AssertionError, DivergenceError or RankLostError as the first rank that fails raises it,
        with a note that names the seed. Where a rank was to die and did, all others must have been
        lost for it, or have been asked to stop in that very step, and that is no error."""
        threads = [
            Thread(target=self._live, args=(rank,), name=f"rank-{rank.rank}", daemon=True)
            for rank in self.ranks
        ]
        for thread in threads:
            thread.start()
        self.rendezvous.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            if thread.is_alive() and not self._faults:
                raise AssertionError(
                    f"seed {self.plan.seed}: ranks stand still: {self.rendezvous.waiting()}"
                )
        try:
            self._check(self.lost)
        except BaseException as fault:
            fault.add_note(f"seed {self.plan.seed}, {self.plan.ranks} ranks: {[*self._faults]}")
            raise
        return self.client.trace

    def _live(self, this: SimRank) -> None:
        why = "has ended"
        self.rendezvous.begin(this.rank)
        try:
            self._serve(this)
            this.inner.check()
        except BaseException as fault:  # noqa: BLE001 - kept for whoever runs the fleet
            self._faults[this.rank] = fault
            why = f"has failed ({type(fault).__name__}: {fault})"
        finally:
            self.rendezvous.leave(this.rank, why)

    def _serve(self, this: SimRank) -> None:
        try:
            if this.rank == 0:
                self.client.run()
            else:
                this.engine.follow()
        except RankLostError:
            if this.rank == 0:
                this.engine.close()
            this.inner.check()
            raise

    def _check(self, dead: SimRank | None) -> None:
        for rank, fault in self._faults.items():
            left = dead is not None and (rank == dead.rank or isinstance(fault, RankLostError))
            if not left:
                raise fault
        if dead is not None:
            for rank in self.ranks:
                on = self._goes_on(rank, dead)
                assert not on, f"rank {rank.rank} has gone on without rank {dead.rank}"
        self.stores.check(self.plan)

    def _goes_on(self, rank: SimRank, dead: SimRank) -> bool:
        """Who has the result of a ballot does all of its step, and is lost at the next rendezvous.
        If the step's message is the last, there is none, and it ends as it should."""
        most = dead.steps + dead.fate.reaches(rank.rank)
        return rank.steps > most or not (rank.rank in self._faults or rank.fate.over)


def run_plan(plan: Plan) -> list[RunTotals]:
    """A fleet, and those that come after it on the same stores."""
    stores, traces = Stores(plan), list[RunTotals]()
    now: Plan | None = plan
    while now is not None:
        traces.append(Fleet(now, stores).run())
        now = now.then
    known = stores.check(plan)
    assert stores.empty() == known, "a store has objects of pages that nobody asked for"
    return traces


def run(seed: int) -> list[RunTotals]:
    """All of one seed."""
    return run_plan(plan_of(seed))

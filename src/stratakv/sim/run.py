"""The composition root of a simulated fleet: N ranks of the production engine in one process, over
fake devices, stores of their own and a clock that nobody waits for.

Owns the order of a run and the checks after every step. One seed gives one run, to the last bit.
"""

from threading import Thread
from typing import Final

from stratakv.agreement.agreement import Agreement
from stratakv.cache.admit import Booking
from stratakv.cache.kv_cache import CacheOptions, KVCache
from stratakv.core.clock import ManualClock, ToldClock
from stratakv.core.page_keys import Namespace
from stratakv.engine.loop import Engine, EngineLimits
from stratakv.engine.namespaces import Namespaces
from stratakv.engine.ranked import Command, Desk, Flush, RankedEngine, Stop
from stratakv.engine.request import Output
from stratakv.engine.roles import UnifiedRole
from stratakv.engine.scheduler import StepLimits
from stratakv.memory.block_table import BlockTable
from stratakv.policy.load_back import LoadBackPolicy
from stratakv.sim.adversary import Adversary
from stratakv.sim.client import Client, Trace
from stratakv.sim.device import PageBytes, PoisoningAllocator, SimTransfer
from stratakv.sim.picture import columns, first_difference, picture
from stratakv.sim.plan import LONGEST, Plan, plan_of
from stratakv.sim.runner import TokenRunner
from stratakv.sim.store import SteppedHand, UnkindStore
from stratakv.sim.thread_ranks import Rendezvous, ThreadRanks
from stratakv.storage.backend import StoreFormat
from stratakv.storage.io_lane import Lane
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.memory import MemoryBackend
from stratakv.tree.policies import EVICTION_POLICIES

PATIENCE_S: Final = 60.0
"""A rank that has not come to a collective after so much real time never will."""
CHECK_STEPS: Final = 16
PICTURE_STEPS: Final = 4
"""Ranks compare their arrays after every step, and everything else that they have this often."""
LOST_SHARE: Final = 0.2


class SimRank:
    """One rank, complete."""

    def __init__(self, plan: Plan, rank: int, meeting: Rendezvous) -> None:
        self._plan, self.rank, self._meeting = plan, rank, meeting
        spec = plan.spec
        self.adversary = Adversary(plan.seed * 64 + rank, plan.hazards[rank])
        self.clock = ManualClock(1000.0 * rank)
        self.agreement = Agreement(ThreadRanks(rank, meeting))
        device, host = (
            [PageBytes(group, pages) for group, pages in zip(spec.groups, counts, strict=True)]
            for counts in (plan.device, plan.host)
        )
        tables = BlockTable(len(spec.groups), plan.max_running, -(-LONGEST // spec.page_tokens))
        told = ToldClock()
        self.cache = KVCache(
            spec,
            ([PoisoningAllocator(of) for of in device], [PoisoningAllocator(of) for of in host]),
            tables,
            SimTransfer(spec, device, host, self.adversary),
            self._options(told),
            host,
        )
        self.desk = Desk(self.agreement, self.clock, told)
        self.runner = TokenRunner(spec, device, tables)
        self.inner = Engine(
            self.cache,
            self.runner,
            UnifiedRole(),
            Namespaces(Namespace(model=b"tokens", spec_digest=spec.digest), {}),
            EngineLimits(
                max_model_len=LONGEST,
                max_running=plan.max_running,
                step=StepLimits(step_tokens=plan.step_tokens, chunk_tokens=plan.chunk_tokens),
            ),
            self.desk,
        )
        self.engine = WatchedEngine(self.inner, self.desk, self)
        self.steps = 0
        self.over = False
        self._columns = columns(self.inner)
        self._hands: list[SteppedHand] = []
        self.store = self._attach()

    def _options(self, told: ToldClock) -> CacheOptions:
        plan = self._plan
        return CacheOptions(
            booking=Booking(
                chunk_tokens=plan.chunk_tokens,
                reserve_tokens=plan.reserve_tokens,
                load_back=LoadBackPolicy(
                    threshold_tokens=plan.load_back_threshold, budget_tokens=LONGEST
                ),
                reuse=True,
            ),
            snapshot_pages=plan.snapshot_pages,
            eviction=EVICTION_POLICIES[plan.eviction](),
            write=plan.write,
            prefetch=plan.prefetch,
            clock=told,
            agreement=self.agreement,
            sleep=self.sleep,
        )

    def _attach(self) -> UnkindStore:
        plan = self._plan
        page_bytes = tuple(group.page_bytes for group in plan.spec.groups)
        form = StoreFormat(spec_digest=plan.spec.digest, page_bytes=page_bytes)
        quota = plan.store_objects * max(page_bytes)
        store = UnkindStore(MemoryBackend(form, quota), self.adversary)
        limits = IoLimits(queue_pages=plan.queue_pages, batch_pages=plan.batch_pages)
        worker = IoWorker(Backends(store, store), form, limits, self.clock, self._hand)
        self.engine.attach_storage(worker)
        return store

    def _hand(self, lane: Lane, name: str) -> SteppedHand:
        del name
        self._hands.append(SteppedHand(lane, self.adversary))
        return self._hands[-1]

    def sleep(self, wait_s: float) -> None:
        """Time goes on here, and so may the work."""
        self.clock.advance(wait_s)
        for hand in self._hands:
            hand.stir()

    def before_step(self) -> None:
        random, plan = self.adversary.random, self._plan
        self.clock.advance(random.random() * plan.step_s * plan.skew[self.rank])
        for hand in self._hands:
            for _ in range(random.randrange(4)):
                hand.stir()
        if self.adversary.strikes(self.adversary.hazards.forgets):
            self.store.lose(LOST_SHARE)

    def flushed(self) -> None:
        """What was cached is in the store, or nowhere; and no two stores are alike."""
        self.store.lose(self.adversary.hazards.loses)

    def after_step(self) -> None:
        """All ranks are alike, whatever has happened to each."""
        self.steps += 1
        if self.steps % CHECK_STEPS == 0:
            self.inner.check()
        seen = b"".join([column.tobytes() for column in self._columns])
        if self.steps % PICTURE_STEPS == 0 or self.over:
            seen += picture(self.inner)
        alike = (seen, self.runner.said, self)
        self._meeting.meet(self.rank, "state", (self.steps,), alike, _alike)


class WatchedEngine(RankedEngine):
    """The production engine, looked at before and after every step."""

    def __init__(self, engine: Engine, desk: Desk, rank: SimRank) -> None:
        super().__init__(engine, desk)
        self._watched = rank

    def step(self) -> list[Output]:
        self._watched.before_step()
        news = super().step()
        self._watched.after_step()
        return news

    def _apply(self, command: Command) -> None:
        super()._apply(command)
        match command:
            case Flush():
                self._watched.flushed()
            case Stop():
                self._watched.over = True
            case _:
                pass


def _alike(seen: list[tuple[bytes, list[int], SimRank]]) -> None:
    first, said, of = seen[0]
    for other, its, rank in seen[1:]:
        if other == first and its == said:
            continue
        where = first_difference((of.inner, of.runner.said), (rank.inner, rank.runner.said))
        if where is not None:
            raise AssertionError(
                f"after step {of.steps} rank {rank.rank} is not as rank 0 is: {where}"
            )


def _closed(worker: IoWorker) -> None:
    worker.close(0.0)


class Fleet:
    """``ranks`` may be looked at, and made worse, before ``run``."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.meeting = Rendezvous(plan.ranks)
        self.ranks = [SimRank(plan, rank, self.meeting) for rank in range(plan.ranks)]
        self.client = Client(plan, self.ranks[0].engine)
        self._faults: list[tuple[int, BaseException]] = []

    def run(self) -> Trace:
        """AssertionError, DivergenceError or RankLostError as the first rank that fails raises it,
        with a note that names the seed."""
        threads = [
            Thread(target=self._live, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self.plan.ranks)
        ]
        for thread in threads:
            thread.start()
        self.meeting.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            if thread.is_alive() and not self._faults:
                raise AssertionError(
                    f"seed {self.plan.seed}: ranks stand still: {self.meeting.waiting()}"
                )
        if self._faults:
            rank, fault = self._faults[0]
            fault.add_note(f"seed {self.plan.seed}, rank {rank} of {self.plan.ranks}")
            raise fault
        return self.client.trace

    def _live(self, rank: int) -> None:
        this, why = self.ranks[rank], "has ended"
        self.meeting.begin(rank)
        try:
            if rank == 0:
                self.client.run()
            else:
                this.engine.follow(_closed)
            this.inner.check()
        except BaseException as fault:  # noqa: BLE001 - kept for whoever runs the fleet
            self._faults.append((rank, fault))
            why = f"has failed ({type(fault).__name__}: {fault})"
        finally:
            self.meeting.leave(rank, why)


def run(seed: int) -> Trace:
    """One run of one seed."""
    return Fleet(plan_of(seed)).run()

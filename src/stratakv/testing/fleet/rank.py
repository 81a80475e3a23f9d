"""One rank of a simulated fleet: the production engine over a fake device and an unkind store.

Owns what a rank is made of, and what is looked at before and after each of its steps. Whatever a
rank shares with others is passed to it. Must not know who starts it.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final, TypeAlias, assert_never

from stratakv.assembly.build import Sockets, build
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.rank_context import RankContext
from stratakv.assembly.sizing import Sizes
from stratakv.cache.prices import AdmissionLimits
from stratakv.core.clock import ManualClock
from stratakv.engine.executor import Executor, Runner, SerialExecutor, TokenSource
from stratakv.engine.loop import Engine
from stratakv.engine.ranks.ranked import RankedEngine
from stratakv.engine.ranks.step_messages import Command, Flush, StepSync, Stop
from stratakv.engine.request import Output, Phase
from stratakv.engine.roles import Role, UnifiedRole
from stratakv.engine.scheduler import StepLimits
from stratakv.engine.storage_control import BackgroundStores, no_store
from stratakv.memory.block_table import BlockTable
from stratakv.policy.load_back import LoadBackPolicy
from stratakv.spec.sharding import unshared
from stratakv.storage.backend import StorageBackend, StoreFormat
from stratakv.storage.io_lane import IoLane
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.sharded import ShardedBackend
from stratakv.testing.fleet.adversary import Adversary
from stratakv.testing.fleet.ahead import AheadDevice
from stratakv.testing.fleet.device import SimMemory
from stratakv.testing.fleet.loss import Fate, MortalRanks, Point, RankDied
from stratakv.testing.fleet.picture import columns, first_difference, picture
from stratakv.testing.fleet.runner import TokenRunner
from stratakv.testing.fleet.scenario import ADAPTERS, LONGEST, Plan
from stratakv.testing.fleet.store import FaultyStore, SteppedHand
from stratakv.testing.fleet.stores import MODEL, Stores
from stratakv.testing.fleet.thread_ranks import Rendezvous
from stratakv.tiers.events import AllCleared, CacheEvent, CacheEvents, PagesRemoved, PagesStored

PICTURE_STEPS: Final = 4
"""Ranks compare their arrays after every step, and everything else that they have this often."""
LOST_SHARE: Final = 0.2


def engine_plan(plan: Plan) -> EnginePlan:
    """What every rank of the fleet is."""
    one, chunk = plan.one_store, plan.chunk_tokens // plan.steps_at_once
    return EnginePlan(
        sizes=Sizes(
            spec=plan.rank_spec,
            sharding=unshared(plan.spec) if one is None else one.sharding,
            device=plan.device,
            host=plan.host,
            max_model_len=LONGEST,
            buffer_rows=plan.buffer_rows,
        ),
        model=MODEL,
        adapters=ADAPTERS,
        max_running=plan.max_running,
        admission=AdmissionLimits(
            chunk_tokens=chunk,
            steps_at_once=plan.steps_at_once,
            reserve_tokens=plan.reserve_tokens,
            load_back=LoadBackPolicy(
                threshold_tokens=plan.load_back_threshold, budget_tokens=LONGEST
            ),
            reuse=plan.reuse,
        ),
        step=StepLimits(step_tokens=plan.step_tokens, chunk_tokens=chunk),
        snapshot_pages=plan.snapshot_pages,
        eviction=plan.eviction,
        write=plan.write,
        prefetch=plan.prefetch,
    )


MakeRole: TypeAlias = Callable[[RankContext], Role]


def _unified(ranks: RankContext) -> Role:
    del ranks  # it has nothing to agree on
    return UnifiedRole()


class SimRank:
    """One rank, complete. ``role``: what its engine is for."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        rendezvous: Rendezvous,
        stores: Stores,
        role: MakeRole = _unified,
    ) -> None:
        self._plan, self.rank, self._rendezvous = plan, rank, rendezvous
        spec = plan.rank_spec
        self.adversary = Adversary(plan.seed * 64 + rank, plan.fault_rates[rank])
        self.clock = ManualClock(1000.0 * rank)
        self.fate = Fate(plan.loss, rank)
        ranks = RankContext.of(MortalRanks(rank, rendezvous, self.fate), self.clock)
        self.agreement, self.sync = ranks.agreement, ranks.sync
        self._events = CacheEvents(spec.page_tokens, ADAPTERS) if plan.observed else None
        ahead = AheadDevice(plan.steps_at_once, Random(f"{plan.seed} {rank}"), plan.device_pace)
        memory = self.memory = SimMemory.of(
            spec, plan.device, plan.host, self.adversary, ahead.later
        )
        heads, made = self._first_heads(), list[TokenRunner]()

        def runner(tables: BlockTable) -> TokenRunner:
            near, far = ([of.rows for of in each] for each in (memory.device, memory.arenas))
            made.append(TokenRunner(spec, near, tables, heads, far))
            return made[-1]

        none = BackgroundStores(no_store, begin=_at_once)
        sockets = Sockets(
            role=partial(role, ranks),
            ranks=ranks,
            observer=self._events,
            stores=none,
            sleep=self.sleep,
        )
        make, executors = ahead.executor if ahead.depth > 1 else SerialExecutor, list[Executor]()

        def executor(runner: Runner, token_source: TokenSource) -> Executor:
            executors.append(make(runner, token_source))
            return executors[-1]

        self.inner, self.cache = build(engine_plan(plan), memory, runner, sockets, executor)
        (self.runner,), (self.executor,) = made, executors
        self.engine = WatchedEngine(self.inner, self.sync, self)
        self._columns = columns(self.inner)
        self._checked = b""
        self._hands: list[SteppedHand] = []
        self.store = self._attach(stores) if plan.stores else None

    @property
    def steps(self) -> int:
        return self.fate.steps

    def _first_heads(self) -> list[int]:
        """Of each group, the first of the heads that this rank has."""
        spec, one = self._plan.rank_spec, self._plan.one_store
        return [
            self.rank * group.buffers[0].row_shape[0]
            if one is not None and one.sharding.splits(group.id)
            else 0
            for group in spec.groups
        ]

    def _attach(self, stores: Stores) -> FaultyStore:
        """Open this rank's store. With two lanes it is open twice; what comes back is the end that
        is written to."""
        plan, shelf = self._plan, stores.of(self.rank)
        reading, writing = (
            FaultyStore(shelf.memory, self.adversary, shelf.names, self._before_write)
            for _ in range(2)
        )
        if plan.io_lanes == 1:
            reading = writing
        sliced = self._between(writing)
        backends = Backends(sliced if reading is writing else self._between(reading), sliced)
        form = StoreFormat.of(plan.rank_spec)
        limits = IoLimits(queue_pages=plan.queue_pages, batch_pages=plan.batch_pages)
        self.inner.attach_storage(IoWorker(backends, form, limits, self.clock, self._hand))
        return writing

    def _between(self, inner: StorageBackend) -> StorageBackend:
        """This rank's pages over a store of slices, as in production; with a store of its own, its
        pages are what is stored."""
        one = self._plan.one_store
        if one is None:
            return inner
        return ShardedBackend.of(inner, one.sharding, self.rank, one.cut)

    def _before_write(self) -> None:
        self.fate.meets(Point.WRITE)

    def _hand(self, lane: IoLane, name: str) -> SteppedHand:
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
        self.fate.meets(Point.STEP)
        self.clock.advance(random.random() * plan.step_s * plan.skew[self.rank])
        for hand in self._hands:
            for _ in range(random.randrange(4)):
                hand.stir()
        if self.adversary.strikes(self.adversary.fault_rates.forgets):
            self._lose(LOST_SHARE)
        if self.steps in plan.retractions:
            self._retract()

    def _retract(self) -> None:
        """The youngest that computes, as where pages run short."""
        statuses = self.inner.statuses()
        computing = [each for each in statuses if each.phase in (Phase.PREFILLING, Phase.DECODING)]
        if computing:
            self.inner.retract(computing[-1].id)

    def flushed(self) -> None:
        """What was cached is in the store, or nowhere; and no two stores are alike."""
        self._lose(self.adversary.fault_rates.loses)

    def _lose(self, share: float) -> None:
        if self.store is not None:
            self.store.lose(share)

    def after_step(self) -> None:
        """All ranks are alike, whatever has happened to each."""
        self.fate.count_step()
        if self._rendezvous.broken:  # the production code must find out by itself
            return
        seen = b"".join([column.tobytes() for column in self._columns])
        if self.steps % self._plan.check_steps == 0 and seen != self._checked:
            self._checked = seen  # what has not changed is as right as it was
            self.inner.check()
        if self._plan.ranks == 1:  # nobody to be like
            return
        if self.steps % PICTURE_STEPS == 0 or self.fate.over:
            seen += picture(self.inner)
        events = [] if self._events is None else [_plain(event) for event in self._events.take()]
        alike = (seen, (self.runner.chosen, events), self)
        self._rendezvous.meet(self.rank, "state", (self.steps,), alike, _alike)

    def died(self) -> None:
        """Nothing of this rank goes on: what it had queued is gone, and its store gets no more."""
        for hand in self._hands:
            hand.drop()


def _at_once(work: Callable[[], None]) -> None:
    work()


def _plain(event: CacheEvent) -> tuple[object, ...]:
    """Something to compare."""
    match event:
        case PagesStored(medium, group, keys, parent, tokens, tenant, lora):
            return medium, group, tuple(keys), parent, tokens.tobytes(), tenant, lora
        case PagesRemoved(medium, group, keys):
            return medium, group, tuple(keys)
        case AllCleared():
            return ()
        case _:
            assert_never(event)


class WatchedEngine(RankedEngine):
    """The production engine, looked at before and after every step."""

    def __init__(self, engine: Engine, sync: StepSync, rank: SimRank) -> None:
        super().__init__(engine, sync)
        self._watched = rank

    def step(self) -> list[Output]:
        try:
            self._watched.before_step()
            outputs = super().step()
            self._watched.after_step()
        except RankDied:
            self._watched.died()
            raise
        return outputs

    def apply(self, command: Command) -> None:
        super().apply(command)
        match command:
            case Flush():
                self._watched.flushed()
            case Stop():
                self._watched.fate.stop()
            case _:
                pass


def _alike(seen: list[tuple[bytes, tuple[object, object], SimRank]]) -> None:
    first, chosen, of = seen[0]
    for other, its, rank in seen[1:]:
        if other == first and its == chosen:
            continue
        where = first_difference((of.inner, chosen), (rank.inner, its))
        if where is not None:
            raise AssertionError(
                f"after step {of.steps} rank {rank.rank} is not as rank 0 is: {where}"
            )

"""An engine from its plan: what every engine is made of, whatever runs in it.

Owns the order in which the parts are made, and the sockets into which others plug theirs. What
depends on the device or on a model comes in: pages and their copies as ``TierMemory``, the model as
what makes its runner. Must not know settings, models or servers.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeAlias, TypeVar

from stratakv.assembly.cache import (
    MakeAllocator,
    TierMemory,
    allocators,
    block_table,
    build_cache,
)
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.rank_context import RankContext
from stratakv.assembly.sizing import Pages
from stratakv.cache.kv_cache import KVCache
from stratakv.engine.executor import Executor, OwnTokens, Runner, SerialExecutor, TokenSource
from stratakv.engine.grammars import NO_GRAMMARS, Grammars
from stratakv.engine.loop import Engine, EngineLimits
from stratakv.engine.roles import Role, UnifiedRole
from stratakv.engine.storage_control import NO_STORES, BackgroundStores
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.block_table import BlockTable
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.tiers.pools import Allocators
from stratakv.tiers.progress import Progress, Sleep
from stratakv.tiers.tiered_cache import TierOptions
from stratakv.transfer.copy_plan import Launched
from stratakv.transfer.engine import TransferEngine
from stratakv.tree.observer import CacheObserver

P = TypeVar("P")
T = TypeVar("T", bound=TransferEngine)
MakeArena: TypeAlias = Callable[[CacheGroup, int], HostArena]
MakeRunner: TypeAlias = Callable[[BlockTable], Runner]
MakeExecutor: TypeAlias = Callable[[Runner, TokenSource], Executor]


@dataclass(frozen=True, slots=True, eq=False)
class MappedMemory(Generic[P, T]):
    """The device tier in ``pools``, whatever they are; the host tier in memory of this process."""

    pages: tuple[Allocators, Allocators]
    pools: P
    arenas: Sequence[HostArena]
    transfer: T

    @classmethod
    def of(
        cls,
        plan: EnginePlan,
        make_pools: Callable[[CacheSpec, Pages], P],
        make_transfer: Callable[[CacheSpec, P, Sequence[HostArena]], T],
        make_allocator: MakeAllocator = PageAllocator,
        make_arena: MakeArena = HostArena,
    ) -> "MappedMemory[P, T]":
        """Take the memory."""
        pools = make_pools(plan.spec, plan.device)
        arenas = [make_arena(group, plan.host[group.id]) for group in plan.spec.groups]
        transfer = make_transfer(plan.spec, pools, arenas)
        return cls(allocators(plan, make_allocator), pools, arenas, transfer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sockets:
    """What plugs into an engine; what is not given is that of one that serves alone. ``role``: what
    it is for. ``ranks``: among the ranks that run the same plan; they choose tokens together, and
    no ``token_source`` is asked. ``observer``: notified of pages. ``stores``: what opens a store
    once it runs. ``sleep``: how a moment is waited for. ``progress``: what makes
    state of what has ended. ``grammars``: forms that answers may have to have."""

    role: Callable[[], Role] = UnifiedRole
    ranks: RankContext | None = None
    token_source: TokenSource = field(default_factory=OwnTokens)
    observer: CacheObserver | None = None
    stores: BackgroundStores = NO_STORES
    sleep: Sleep = time.sleep
    progress: type[Progress] = Progress
    grammars: Grammars = NO_GRAMMARS


DEFAULT_SOCKETS: Final = Sockets()


def _beside_the_plan(plan: EnginePlan, sockets: Sockets, launched: Launched) -> TierOptions:
    """``launched``: what copies come after, where a device computes while this goes on."""
    options = TierOptions(
        observer=sockets.observer,
        sleep=sockets.sleep,
        launched=launched,
        progress=sockets.progress,
        page_ages=plan.page_ages,
    )
    if (ranks := sockets.ranks) is not None:
        options = replace(options, clock=ranks.clock, agreement=ranks.agreement)
    return options


def build(
    plan: EnginePlan,
    memory: TierMemory,
    make_runner: MakeRunner,
    sockets: Sockets = DEFAULT_SOCKETS,
    make_executor: MakeExecutor = SerialExecutor,
) -> tuple[Engine, KVCache]:
    tables = block_table(plan)
    limits = EngineLimits(
        max_model_len=plan.max_model_len,
        vocab_size=plan.vocab_size,
        max_running=plan.max_running,
        step=plan.step,
    )
    tokens = sockets.token_source if sockets.ranks is None else sockets.ranks.sync
    executor = make_executor(make_runner(tables), tokens)
    cache = build_cache(plan, memory, tables, _beside_the_plan(plan, sockets, executor.launched))
    assert executor.depth == plan.admission.steps_at_once, "admission counts on another depth"
    role, stores = sockets.role(), sockets.stores
    engine = Engine(cache, executor, role, plan.namespaces, limits, stores, sockets.grammars)
    if (ranks := sockets.ranks) is not None:
        cache.tiers.watch(cache.beside)
        ranks.agreement.watch("requests", engine.figures, engine.description)
    return engine, cache

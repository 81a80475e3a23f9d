"""A cache from its plan: for an engine, and for who replays traffic without one.

Owns how a plan and its pages become a cache. Torch-free. Must not know engines, devices or models.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from stratakv.assembly.engine_plan import EnginePlan
from stratakv.cache.kv_cache import CacheOptions, KVCache
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.block_table import BlockTable
from stratakv.tiers.object_keys import HostBytes
from stratakv.tiers.pools import Allocators
from stratakv.tiers.tiered_cache import TierOptions
from stratakv.transfer.engine import TransferEngine
from stratakv.tree.policies import EVICTION_POLICIES

MakeAllocator: TypeAlias = Callable[[int], PageAllocator]


class TierMemory(Protocol):
    """Where a plan's pages lie. ``pages``: who gives out their ids, by group, on the device and on
    the host. ``arenas``: bytes of host pages, by group; none where no storage will look there.
    ``transfer``: what copies between the two."""

    @property
    def pages(self) -> tuple[Allocators, Allocators]: ...
    @property
    def arenas(self) -> Sequence[HostBytes]: ...
    @property
    def transfer(self) -> TransferEngine: ...


def allocators(
    plan: EnginePlan, make_allocator: MakeAllocator = PageAllocator
) -> tuple[Allocators, Allocators]:
    """Of every page of the plan, on the device and on the host."""
    return [make_allocator(n) for n in plan.device], [make_allocator(n) for n in plan.host]


def block_table(plan: EnginePlan) -> BlockTable:
    """A row for each request that may run, with a place for each page that it may have."""
    pages = -(-plan.max_model_len // plan.spec.page_tokens)
    return BlockTable(len(plan.spec.groups), plan.max_running, pages, plan.sizes.buffers)


def build_cache(
    plan: EnginePlan, memory: TierMemory, tables: BlockTable, beside: TierOptions | None = None
) -> KVCache:
    """``beside``: what is no plan's of its tiers: who observes and drives them, clocks, ranks.
    None: the usual."""
    tiers = replace(
        beside or TierOptions(),
        eviction=EVICTION_POLICIES[plan.eviction],
        write=plan.write,
        prefetch=plan.prefetch,
    )
    options = CacheOptions(limits=plan.admission, snapshot_pages=plan.snapshot_pages, tiers=tiers)
    return KVCache(plan.spec, memory.pages, tables, memory.transfer, options, memory.arenas)

"""The production cache without bytes: real allocators, tables, tree and policies over copies that
are done as soon as they are asked for.

Owns the specs that are compared, their pools, and the one variant that is not the production rule.
Must not know traces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from stratakv.assembly.cache import allocators, block_table
from stratakv.assembly.cache import build_cache as build_cache_of
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.sizing import Sizes
from stratakv.cache.kv_cache import KVCache
from stratakv.core.config import EngineConfig
from stratakv.core.ids import GroupId, LayerId
from stratakv.sim.instant_transfer import InstantTransfer
from stratakv.spec.budget import ExpectedLoad, pages_beside
from stratakv.spec.groups import ANCHOR, BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepWindow, Retention
from stratakv.tiers.object_keys import HostBytes
from stratakv.tiers.pools import Allocators
from stratakv.tree.nodes import Tier

PAGE_TOKENS: Final = 64
HOST_RATIO: Final = 2
RULES: Final[Mapping[str, tuple[Retention, ...]]] = {
    "full": (),
    "window-128": (KeepWindow(128),),
    "window-1024": (KeepWindow(1024),),
    "state": (KeepBoundary(),),
}
"""By name: what is kept beside the anchor, which keeps all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """``device_tokens``: what the anchor holds on the device; ``host``: whether a second tier of
    twice the pages lies behind it. ``load`` splits the rest, as a server's flags do."""

    device_tokens: int
    load: ExpectedLoad
    host: bool


def spec_named(name: str) -> CacheSpec:
    groups = [
        CacheGroup(
            id=GroupId(at),
            name=f"g{at}",
            retention=rule,
            buffers=(
                BufferSpec(
                    name="rows",
                    layers=(LayerId(at),),
                    rows_per_page=1,  # there are no bytes to lay out
                    # Beside a conversation a checkpoint is cheap, so there is room for four.
                    row_shape=(1 if at else 1 << 20,),
                    dtype="uint8",
                ),
            ),
        )
        for at, rule in enumerate((KeepAll(), *RULES[name]))
    ]
    return CacheSpec(page_tokens=PAGE_TOKENS, groups=tuple(groups))


def device_pages(spec: CacheSpec, sizes: PoolSizes) -> tuple[int, ...]:
    """By the budget rule of a server: four checkpoints per chat that the anchor can hold, and what
    the running requests need."""
    return pages_beside(spec, sizes.device_tokens // PAGE_TOKENS, sizes.load)


@dataclass(frozen=True, slots=True, eq=False)
class NoMemory:
    """Pages without bytes. A ``Memory``."""

    pages: tuple[Allocators, Allocators]
    arenas: Sequence[HostBytes] = ()
    transfer: InstantTransfer = field(default_factory=InstantTransfer)


def build_cache(spec: CacheSpec, sizes: PoolSizes, policy: str) -> KVCache:
    """``policy``: a key of ``EVICTION_POLICIES``."""
    load, device = sizes.load, device_pages(spec, sizes)
    host = [pages * HOST_RATIO * sizes.host for pages in device]
    config = EngineConfig(
        page_tokens=PAGE_TOKENS,
        max_running=load.max_running,
        chunk_tokens=load.chunk_tokens,
        reserve_tokens=load.max_model_len,  # to the last token: nothing is retracted here
        eviction=policy,
    )
    plan = EnginePlan.of(config, Sizes.of(spec, device, host, load.max_model_len), b"bench")
    return build_cache_of(plan, NoMemory(allocators(plan)), block_table(plan))


def forgo_checkpoints(cache: KVCache) -> None:
    """Make a fresh cache the baseline: pages of every group are ranked by their last use alone.

    A page that some checkpoint needs never goes cold, so it is enough to let every page be needed
    once from the start, as those of a group that keeps all are. For the device tier only: what is
    worth a backup would still follow the checkpoints.
    """
    host = cache.tiers.pools.tiers[Tier.HOST][ANCHOR]
    assert not host.capacity, "the baseline has no host tier"
    cache.tiers.tree.checkpoints.need_everything()

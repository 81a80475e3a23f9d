"""The production cache without bytes: real allocators, tables, tree and policies over copies that
are done as soon as they are asked for.

Owns the specs that are compared, their pools, and the one variant that is not the production rule.
Must not know traces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stratakv.cache.admit import AdmissionLimits
from stratakv.cache.kv_cache import CacheOptions, KVCache
from stratakv.core.config import SNAPSHOT_TOKENS
from stratakv.core.ids import GroupId, LayerId
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.block_table import BlockTable
from stratakv.policy.load_back import LoadBackPolicy
from stratakv.sim.instant_transfer import InstantTransfer
from stratakv.spec.budget import ExpectedLoad, pages_beside
from stratakv.spec.groups import ANCHOR, BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepWindow, Retention
from stratakv.tiers.tiered_cache import TierOptions
from stratakv.tree.nodes import CHECKPOINT
from stratakv.tree.order import EvictionPolicy

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
class Sizes:
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


def device_pages(spec: CacheSpec, sizes: Sizes) -> tuple[int, ...]:
    """By the budget rule of a server: four checkpoints per chat that the anchor can hold, and what
    the running requests need."""
    return pages_beside(spec, sizes.device_tokens // PAGE_TOKENS, sizes.load)


def build_cache(
    kind: type[KVCache], spec: CacheSpec, sizes: Sizes, policy: EvictionPolicy
) -> KVCache:
    device = device_pages(spec, sizes)
    host = [pages * HOST_RATIO * sizes.host for pages in device]
    load = sizes.load
    rows = BlockTable(len(spec.groups), load.max_running, -(-load.max_model_len // PAGE_TOKENS))
    limits = AdmissionLimits(
        chunk_tokens=load.chunk_tokens,
        reserve_tokens=load.max_model_len,  # to the last token: nothing is retracted here
        load_back=LoadBackPolicy(),
        reuse=True,
    )
    options = CacheOptions(
        limits=limits,
        snapshot_pages=SNAPSHOT_TOKENS // PAGE_TOKENS,
        tiers=TierOptions(eviction=policy),
    )
    tiers = ([PageAllocator(n) for n in device], [PageAllocator(n) for n in host])
    return kind(spec, tiers, rows, InstantTransfer(), options)


class WithoutCheckpoints(KVCache):
    """The baseline: pages of every group are ranked by their last use alone.

    A page that some checkpoint needs never goes cold, so it is enough to let every page be needed
    once from the start, as those of a group that keeps all are. For the device tier only: what is
    worth a backup would still follow the checkpoints.
    """

    def __init__(
        self,
        spec: CacheSpec,
        tiers: tuple[Sequence[PageAllocator], Sequence[PageAllocator]],
        tables: BlockTable,
        transfer: InstantTransfer,
        options: CacheOptions,
    ) -> None:
        assert not tiers[1][ANCHOR].capacity, "the baseline has no host tier"
        super().__init__(spec, tiers, tables, transfer, options)
        for need in self._tree.nodes.need:
            need[:] = CHECKPOINT

"""What ranks compare of their caches in every ballot, and how it is told where they differ.

Owns the choice: figures that are there anyway, and the page ids that move next. A page that one
rank has freed, taken or evicted, and another has not, shows in the same step. Must not walk the
tree: it runs each step.
"""

from typing import Final
from zlib import crc32

from stratakv.agreement.agreement import Agreement, Figures
from stratakv.cache.copies import CopyDesk
from stratakv.cache.pools import Pools
from stratakv.cache.storage import StorageTier
from stratakv.spec.groups import CacheSpec
from stratakv.tree.nodes import TIERS
from stratakv.tree.prefix_tree import PrefixTree

SEEN: Final = 1024
"""Free page ids of each pool that are compared, those that are given out next."""


def testify(
    agreement: Agreement,
    spec: CacheSpec,
    tree: PrefixTree,
    pools: Pools,
    copies: CopyDesk,
    storage: StorageTier,
) -> None:
    """Watch the cache that these make up."""

    def pages() -> Figures:
        spaces = [space for tier in TIERS for space in pools.tiers[tier]]
        return tuple((space.available(), crc32(space.next(SEEN).data)) for space in spaces)

    def residency() -> Figures:
        evictable = (tree.evictable(tier, group.id) for tier in TIERS for group in spec.groups)
        return len(tree.nodes), *evictable

    agreement.watch("the tree", residency)
    agreement.watch("free pages", pages)
    agreement.watch("copies", copies.figures)
    agreement.watch("storage", storage.figures)

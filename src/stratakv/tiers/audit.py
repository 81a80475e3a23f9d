"""Accounts for every page of every pool. Owns no state; for tests and for a running server's own
check, never on the hot path.
"""

from collections.abc import Callable

import numpy as np

from stratakv.core.ids import GroupId, PageIds
from stratakv.spec.groups import CacheSpec
from stratakv.tiers.pools import Pools
from stratakv.tree.check import check
from stratakv.tree.nodes import TIERS, Tier
from stratakv.tree.prefix_tree import PrefixTree

Owned = Callable[[Tier, GroupId], list[PageIds]]
"""Pages of a tier and group that requests own, and the tree does not."""


def audit(spec: CacheSpec, tree: PrefixTree, pools: Pools, owned: Owned) -> None:
    """Verify the tree, and that every page that is taken has exactly one owner."""
    check(tree)
    for tier in TIERS:
        for group in spec.groups:
            pages = np.concatenate([tree.held(tier, group.id), *owned(tier, group.id)])
            space = pools.tiers[tier][group.id]
            used = space.capacity - space.available()
            name = f"{tier.name} pages of group {group.name}"
            assert len(np.unique(pages)) == len(pages), f"{name}: one has two owners"
            assert len(pages) == used, f"{name}: {used} taken, {len(pages)} accounted for"

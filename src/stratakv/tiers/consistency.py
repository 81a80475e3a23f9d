"""What ranks compare of their caches in every ballot, and how a difference is reported.

Owns the choice: figures that are there anyway, the page ids that move next, and a scrubber through
everything else. A page that one rank has freed, taken or evicted, and another has not, shows in the
same step; a pin or a rank within a round of the scrubber. Must not walk the tree: it runs each
step.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol
from zlib import crc32

import numpy.typing as npt

from stratakv.agreement.agreement import Agreement, DigestInputs
from stratakv.agreement.scrubber import ScrubbedTable, Scrubber
from stratakv.memory.allocator import PageAllocator
from stratakv.spec.groups import CacheSpec
from stratakv.tiers.pools import Pools
from stratakv.tiers.storage import StorageTier
from stratakv.tiers.transfer_manager import TransferManager
from stratakv.tree.nodes import TIERS
from stratakv.tree.prefix_tree import PrefixTree

SEEN: Final = 64
"""Free page ids of each pool that are compared in every ballot, those that are given out next."""


def _spaces(spec: CacheSpec, pools: Pools) -> dict[str, PageAllocator]:
    return {
        f"{group.name} on {tier.name.lower()}": pools.tiers[tier][group.id]
        for tier in TIERS
        for group in spec.groups
    }


class _FreePages:
    def __init__(self, spaces: dict[str, PageAllocator]) -> None:
        self._spaces = spaces

    def figures(self) -> DigestInputs:
        found: dict[str, int] = {}
        for name, space in self._spaces.items():
            found[name] = space.available() << 32 | crc32(space.next(SEEN).data)
        return found

    def description(self) -> Sequence[str]:
        return [
            f"{name} {space.available()} free, of which next {space.next(SEEN)[::-1].tolist()}"
            for name, space in self._spaces.items()
        ]


class HasColumns(Protocol):
    def columns(self) -> Iterable[tuple[str, npt.NDArray[Any]]]:
        """Arrays that stay where they are, by name."""
        ...


def add_consistency_checks(
    agreement: Agreement,
    spec: CacheSpec,
    tree: PrefixTree,
    pools: Pools,
    beside: Sequence[HasColumns],
    copies: TransferManager,
    storage: StorageTier,
) -> None:
    """Watch the cache that these make up. ``beside``: what else of it is arrays."""
    names = [
        f"{group.name} to evict on {tier.name.lower()}" for tier in TIERS for group in spec.groups
    ]
    pairs = [(tier, group.id) for tier in TIERS for group in spec.groups]
    free = _FreePages(_spaces(spec, pools))

    def residency() -> DigestInputs:
        counts = [tree.eviction.evictable(tier, group) for tier, group in pairs]
        key = int.from_bytes((tree.newest_key() or b"")[:8])
        return {"nodes": len(tree), "newest key": key, **dict(zip(names, counts, strict=True))}

    scrubber = Scrubber(tables_of(tree, pools, beside))
    agreement.watch("the tree", residency)
    agreement.watch("free pages", free.figures, free.description)
    agreement.watch("copies", copies.figures)
    agreement.watch("storage", storage.figures)
    agreement.watch("the tables", scrubber.figures, scrubber.description)


def tables_of(
    tree: PrefixTree, pools: Pools, beside: Sequence[HasColumns]
) -> Iterator[ScrubbedTable]:
    """Every array of which all ranks must have the same."""
    for of in (tree, *beside):
        yield from (ScrubbedTable(name, column) for name, column in of.columns())
    for name, space in _spaces(tree.spec, pools).items():
        yield ScrubbedTable(f"free place of {name}", space.stack)

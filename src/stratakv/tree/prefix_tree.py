"""The prefix tree: what is cached, where, and who stands on it.

One node is one page, so nothing ever splits. Pure: no tensors, no threads, no clock. Mutators
return effects in the order in which they must be executed. Owns its parts, which share the columns
of ``nodes`` and ``pins``: those are for the modules of this room alone. Each part has the verbs of
one matter:

    leases       who stands on what
    spilled      what running requests read on the host
    checkpoints  what is worth keeping in groups that do not keep all
    copies       what is being copied between device and host
    backups      what of a path the device alone has
    stored       what storage has, or is given
    eviction     what leaves a tier, and what could
    write_back   the same for the device, and what to save next, where copies are made late
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from stratakv.core.clock import NowS, never
from stratakv.core.ids import NONE, GroupId, PageIds, PageKey
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.tree.backups import Backups
from stratakv.tree.checkpoints import Checkpoints
from stratakv.tree.copies import Copies
from stratakv.tree.effects import Effect, Inserted
from stratakv.tree.eviction import Evictor
from stratakv.tree.gone import Departures
from stratakv.tree.insertion import Insertion
from stratakv.tree.lacking import Lacking, lacking
from stratakv.tree.leases import Leases
from stratakv.tree.matching import Beyond, Match, Matcher
from stratakv.tree.nodes import TIERS, NodeTable, Tier
from stratakv.tree.observer import CacheObserver, PageWatcher
from stratakv.tree.order import LeastRecentlyUsed, MakePolicy
from stratakv.tree.pins import Pins
from stratakv.tree.residency import ON_DEVICE
from stratakv.tree.spilled import Spilled
from stratakv.tree.stored import StorageMarks
from stratakv.tree.write_back import WriteBackEviction


@dataclass(frozen=True, slots=True, eq=False)
class Internals:
    """Every column of a tree, for oracles: ``check``, the tree machine, tests."""

    spec: CacheSpec
    nodes: NodeTable
    pins: Pins
    leases: Leases
    stored: StorageMarks


class PrefixTree:
    """``capacity``: the most nodes there can be, that is device plus host pages of the anchor.
    ``now_s``: what it remembers of when pages left, by which it decides nothing."""

    def __init__(
        self,
        spec: CacheSpec,
        capacity: int,
        policy: MakePolicy = LeastRecentlyUsed,
        observer: CacheObserver | None = None,
        watcher: PageWatcher | None = None,
        now_s: NowS = never,
    ) -> None:
        self.spec = spec
        self._nodes = nodes = NodeTable(spec, capacity, observer, watcher, now_s)
        self._pins = pins = Pins(nodes, len(spec.groups), policy, watcher)
        self._matcher = Matcher(spec, nodes)
        self.checkpoints = Checkpoints(spec, nodes, pins)
        self.stored = StorageMarks(spec, nodes, pins)
        self.copies = Copies(nodes, pins, self.stored)
        self.spilled = Spilled(spec, nodes, pins)
        self.leases = Leases(spec, nodes, pins, self._matcher, self.copies, self.spilled)
        self.backups = Backups(spec, nodes)
        self.eviction = Evictor(spec, nodes, pins, self.checkpoints)
        self.write_back = WriteBackEviction(nodes, pins, self.eviction)
        self._insertion = Insertion(spec, nodes, pins, self.stored, self.backups)

    # -- what is there ---------------------------------------------------------------------------

    def match(self, keys: Sequence[PageKey], limit: int) -> Match:
        """How far ``keys`` is usable, looking at no more than ``limit`` pages. Read-only."""
        return self._matcher.match(keys, limit)

    def beyond(self, keys: Sequence[PageKey], found: Match, limit: int) -> Beyond:
        """What there is, or was, of the first ``limit`` pages of ``keys`` that the match ``found``
        could not use. Read-only."""
        return self._matcher.beyond(keys, found, limit)

    def starts(self, end: int) -> list[int]:
        """First page that every group needs at ``end`` pages."""
        return self._matcher.starts(end)

    def holds(self, key: PageKey, group: GroupId) -> bool:
        """Whether the page at ``key`` has the group on the device."""
        row = self._nodes.index.get(key)
        return row is not None and ON_DEVICE.item(self._nodes.state[group].item(row))

    def lacking(self, keys: Sequence[PageKey], end: int) -> list[Lacking]:
        """What groups lack to go on at ``end`` pages, as far as which the anchor is there."""
        return lacking(self.spec, self._nodes, self._matcher.starts(end), keys, end)

    def departures(self, keys: Sequence[PageKey], start: int, end: int) -> Departures:
        """How pages [start, ...) left, as far as it is remembered and at most to ``end``."""
        return self._nodes.gone.departures(keys, start, end)

    # -- what comes and goes ---------------------------------------------------------------------

    def insert(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> Inserted:
        """Adopt a request's device pages for page indices [first, len(keys)).

        ``pages[g]``: int32 [len(keys) - first], NONE where the group holds none. The pages above
        ``first`` are in the tree and leased by the caller. A page the tree holds already comes back
        as ``Remap`` and ``FreeDevice``; one that is just being loaded stays the request's own.
        """
        return self._insertion.insert(keys, first, pages)

    def land(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> list[Effect]:
        """Adopt host pages that storage delivered; arguments as for ``insert``. The pages above
        ``first`` are leased by the caller. What the host holds already is freed."""
        return self._insertion.land(keys, first, pages)

    def adopt_saved(
        self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]
    ) -> list[Effect]:
        """Adopt host pages that another engine's were copied to; as ``land``, and what of them is
        worth a stored object is asked for. NONE where a group has none."""
        return self._insertion.adopt_saved(keys, first, pages)

    def clear(self) -> list[Effect]:
        """Drop everything; nothing is pinned. Nobody lost what was dropped on purpose: what has
        left is not remembered."""
        effects: list[Effect] = []
        for tier in reversed(TIERS):
            effects += self.eviction.evict(tier, ANCHOR, len(self))
        assert not len(self), "a flush left pages behind"
        self._nodes.gone.clear()
        return effects

    # -- for those who look on ---------------------------------------------------------------------

    def __len__(self) -> int:
        """Nodes, that is pages of prefixes."""
        return len(self._nodes)

    def held(self, tier: Tier, group: GroupId) -> PageIds:
        """Every page that the tree has on a tier, in no order."""
        pages = self._nodes.page[tier][group][self._nodes.rows()]
        return pages[pages != NONE]

    def newest_key(self) -> PageKey | None:
        """The last key of the newest chain that is still there; None: there is none."""
        return self._nodes.newest_key()

    def columns(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Every array by name, for those who compare two trees."""
        yield from self._nodes.columns()
        yield from self.stored.columns()

    @property
    def internals(self) -> Internals:
        return Internals(self.spec, self._nodes, self._pins, self.leases, self.stored)

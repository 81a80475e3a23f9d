"""Pages over three tiers, under their keys: what is cached where, who stands on it, what moves.

Owns the parts; when what has ended becomes state, decides ``progress``. Knows pages, page keys,
leases, tickets; no request's rows, no block table, no model.
The device tier is whatever the allocators and the transfer engine say it is: no byte passes here.
``cache/`` makes a cache of requests of it; an engine whose device pages are its own has the host
tier alone (``foreign``).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np

from stratakv.agreement.agreement import Agreement
from stratakv.agreement.ranks import SingleRank
from stratakv.core.clock import Clock, MonotonicClock
from stratakv.core.ids import GroupId, PageIds, PageKey
from stratakv.policy.prefetch_pace import PrefetchPolicy, Timeout, prefetch_policy
from stratakv.policy.write import NoBackup, WritePolicy, WriteThrough, safe_wanted
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.tiers.attached_store import AttachedStore
from stratakv.tiers.backup_queue import BackupQueue
from stratakv.tiers.consistency import HasColumns, add_consistency_checks
from stratakv.tiers.flights import Flights
from stratakv.tiers.foreign import ForeignTransfers
from stratakv.tiers.object_keys import HostBytes
from stratakv.tiers.page_ages import PageAges
from stratakv.tiers.persist import Persister
from stratakv.tiers.pools import Allocators, Pools, check_pages
from stratakv.tiers.prefetch.fetches import Fetches, nobody_reads
from stratakv.tiers.prefetch.prefetcher import Prefetcher
from stratakv.tiers.progress import Progress, Sleep
from stratakv.tiers.statistics import PageAgeStats
from stratakv.tiers.storage import StorageTier
from stratakv.tiers.transfer_manager import TransferManager
from stratakv.transfer.copy_plan import Launched, nothing_launched
from stratakv.transfer.engine import TransferEngine
from stratakv.tree.check import check
from stratakv.tree.effects import Remap
from stratakv.tree.lease import DeviceLease, HostHold, Lease, LoadLease
from stratakv.tree.matching import Match
from stratakv.tree.nodes import TIERS, Tier
from stratakv.tree.observer import CacheObserver
from stratakv.tree.order import LeastRecentlyUsed, MakePolicy
from stratakv.tree.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """``prefetch`` None: the usual thresholds. ``clock``: of its deadlines, and for figures of when
    pages left; the same on every rank, as is all else here. ``observer``: notified
    of pages. ``agreement``: where ranks meet. ``sleep``: how a moment is waited for, in seconds.
    ``progress``: what drives it. ``launched``: what copies come after, where the device computes
    while this goes on.
    ``foreign_pages``: device pages of each group that another engine has, for ``foreign``.
    ``page_ages``: measure how old pages grow, at some microseconds a lease."""

    eviction: MakePolicy = LeastRecentlyUsed
    write: WritePolicy = field(default_factory=WriteThrough)
    prefetch: PrefetchPolicy | None = None
    clock: Clock = field(default_factory=MonotonicClock)
    observer: CacheObserver | None = None
    agreement: Agreement = field(default_factory=lambda: Agreement(SingleRank()))
    sleep: Sleep = time.sleep
    progress: type[Progress] = Progress
    launched: Launched = nothing_launched
    foreign_pages: Sequence[int] = ()
    page_ages: bool = False


class TieredCache:
    """``pages``: allocators of device and host pages, one per group; either pools may be empty.
    ``arenas``: where host pages lie; only storage looks there. ValueError unless there is one of
    each for every group.

    Beside its own verbs, what it is made of: ``progress`` drives it, a tick a step; ``storage`` is
    the third tier; ``foreign`` copies for device pages of another engine; ``tree``, ``pools`` and
    ``copies`` are for those who build on this floor."""

    def __init__(
        self,
        spec: CacheSpec,
        pages: tuple[Allocators, Allocators],
        transfer: TransferEngine,
        options: TierOptions,
        arenas: Sequence[HostBytes] = (),
    ) -> None:
        device, host = pages
        foreign = options.foreign_pages or [0] * len(spec.groups)
        for name, found in (
            ("allocators of device pages", device),
            ("allocators of host pages", host),
            ("arenas", arenas or host),
            ("foreign_pages", foreign),
        ):
            if len(found) != len(spec.groups):
                raise ValueError(f"{len(found)} {name} for {len(spec.groups)} groups")
        self.spec = spec
        self._agreement = options.agreement
        capacity = device[ANCHOR].capacity + host[ANCHOR].capacity
        rows = capacity + 1  # and the root's
        self._ages = PageAges(spec, rows, options.clock) if options.page_ages else None
        self.clock = options.clock
        self.tree = tree = PrefixTree(
            spec, capacity, options.eviction, options.observer, self._ages, self.clock.now_s
        )
        store = AttachedStore()
        persister = Persister(tree.stored, arenas, store, options.observer)
        write = options.write if host[ANCHOR].capacity else NoBackup()
        cleans = any(safe_wanted(write, space.capacity) for space in device)
        evict = tree.write_back.evict if cleans else partial(tree.eviction.evict, Tier.DEVICE)
        self.pools = Pools(spec, tree, pages, persister.want, evict)
        self.copies = TransferManager(
            tree,
            self.pools,
            BackupQueue(tree, self.pools, write),
            Flights(spec, transfer, options.launched),
        )
        prefetch = options.prefetch or prefetch_policy(
            spec.page_tokens, host[ANCHOR].capacity, Timeout()
        )
        # A step that was launched may read on the host what was freed since.
        wait = self.copies.flights.wait_for_device if spec.has_home_on_host else nobody_reads
        fetches = Fetches(tree, self.pools, arenas, wait)
        prefetcher = Prefetcher(tree, fetches, store, prefetch, options.clock, options.observer)
        self.storage = StorageTier(tree, store, persister, prefetcher, options.observer)
        self.foreign = ForeignTransfers(tree, self.pools, self.copies, foreign)
        self.progress = options.progress(
            tree,
            self.pools,
            self.copies,
            self.storage,
            options.agreement,
            options.sleep,
            options.observer,
        )
        self.progress.after(self.foreign.poll)

    def watch(self, beside: Sequence[HasColumns] = ()) -> None:
        """Let ranks compare what they have of this, and of the arrays ``beside`` it."""
        add_consistency_checks(
            self._agreement, self.spec, self.tree, self.pools, beside, self.copies, self.storage
        )

    # -- pages -----------------------------------------------------------------------------------

    def ages(self) -> PageAgeStats | None:
        """How old pages grow; None where it is not measured."""
        return None if self._ages is None else self._ages.stats()

    def match(self, keys: Sequence[PageKey], limit: int) -> Match:
        """How far ``keys`` is usable, looking at no more than ``limit`` pages. Read-only."""
        return self.tree.match(keys, limit)

    def lease(self, keys: Sequence[PageKey], end: int) -> DeviceLease | None:
        """Pin what every group needs at ``end``, a match's ``end``, and begin to load what is on
        the host alone; None, and nothing is pinned, without device pages for it. ValueError where
        a match would not find so many pages."""
        self._known("lease", keys, end, self.tree.match(keys, end).end)
        lease = self.tree.leases.take_to_load(keys, end)
        if isinstance(lease, LoadLease):
            self.copies.backups.begin()  # what loads may evict nodes that are to be saved
            loaded = self.copies.load(lease, end)
            if loaded is None:
                self.tree.leases.release(lease)
            return loaded
        return lease

    def hold(self, keys: Sequence[PageKey], end: int) -> HostHold:
        """Pin what every group needs at ``end`` pages, which are in the tree, as far as the host
        has it: a lease of the host tier alone. Its ``end`` is less where the host has less.
        ValueError where the tree does not know so many pages."""
        self._known("hold", keys, end, self.tree.match(keys, end).anchor_end)
        return self.tree.leases.hold_present(keys, end, self.tree.starts(end))

    def _known(self, verb: str, keys: Sequence[PageKey], end: int, found: int) -> None:
        if not 0 <= end <= len(keys) or found != end:
            raise ValueError(f"{verb}: {end} pages, of which a match of these keys finds fewer")

    def _named(
        self, verb: str, tier: Tier, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]
    ) -> None:
        if not 0 <= first <= len(keys):
            raise ValueError(f"{verb}: page {first} of {len(keys)}")
        spaces = self.pools.tiers[tier]
        lengths, capacity = [len(keys) - first] * len(spaces), [space.capacity for space in spaces]
        check_pages(verb, pages, lengths, capacity, f"{tier.name.lower()} pages")

    def insert(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> list[Remap]:
        """Adopt device pages for page indices [first, len(keys)); arguments as for
        ``PrefixTree.insert``. What comes back is to be carried out before anything else: where to
        read instead of the pages that the tree had already, which are free by now. ValueError
        where ``pages`` are not pages of this cache, int32, for these page indices."""
        self._named("insert", Tier.DEVICE, keys, first, pages)
        remaps, effects = self.tree.insert(keys, first, pages)
        self.copies.backups.want(self.pools.execute(effects))
        for remap in remaps:
            self.pools.counters.add(duplicate_pages=len(remap.canonical))
        return remaps

    def receive(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> None:
        """Adopt host pages that another engine has filled, of nodes that ``insert`` has made;
        arguments as for it. What the host has already is freed."""
        self._named("receive", Tier.HOST, keys, first, pages)
        self.pools.execute(self.tree.adopt_saved(keys, first, pages))

    def land(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> None:
        """Adopt host pages; arguments as for ``insert``, the pages above ``first`` are pinned."""
        self._named("land", Tier.HOST, keys, first, pages)
        self.pools.execute(self.tree.land(keys, first, pages))

    def keep(self, lease: DeviceLease | HostHold, continued: int = 0) -> None:
        """Somebody is expected to go on at the end of ``lease``: of groups that do not keep all,
        what is needed there leaves after what is needed nowhere, and is stored. ``continued``: the
        pages that this prompt had matched; no other end of theirs is kept for its sake. ValueError
        where the lease was released."""
        if not self.tree.leases.is_open(lease):
            raise ValueError("keep: the lease was released")
        if lease.end:
            kept = self.tree.checkpoints.keep(lease, lease.end, continued)
            self.copies.backups.want(self.pools.execute(kept))
            self.storage.persister.used(lease)

    def release(self, lease: Lease) -> None:
        """End a lease; what it held may leave from now on."""
        self.tree.leases.release(lease)

    def check(self, owned: Callable[[Tier, GroupId], list[PageIds]] | None = None) -> None:
        """Verify the tree, and that every page of every pool is accounted for exactly once.
        ``owned``: pages of a tier and group that whoever stands above this owns."""
        check(self.tree)
        for tier, group in product(TIERS, self.spec.groups):
            found = [self.tree.held(tier, group.id)]
            if owned is not None:
                found += owned(tier, group.id)
            if tier == Tier.HOST:
                found += self.storage.prefetcher.owned(group.id) + self.foreign.owned(group.id)
            pages, space = np.concatenate(found), self.pools.tiers[tier][group.id]
            used, name = (
                space.capacity - space.available(),
                f"{tier.name} pages of group {group.name}",
            )
            assert len(np.unique(pages)) == len(pages), f"{name}: one has two owners"
            assert len(pages) == used, f"{name}: {used} taken, {len(pages)} accounted for"

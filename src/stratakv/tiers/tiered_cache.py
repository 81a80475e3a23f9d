"""Pages over three tiers, under their keys: what is cached where, who stands on it, what moves.

Owns the parts, and when what has ended becomes state: copies in ``collect`` and ``wait``, I/O in
``go_on``. Knows pages, page keys, leases, tickets; no request's rows, no block table, no model.
The device tier is whatever the allocators and the transfer engine say it is: no byte passes here.
``cache/`` makes a cache of requests of it; an engine whose device pages are its own has the host
tier alone (``foreign``).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from stratakv.agreement.agreement import Agreement
from stratakv.agreement.ballot import Result
from stratakv.agreement.ranks import SingleRank
from stratakv.core.clock import Clock, MonotonicClock
from stratakv.core.ids import GroupId, PageIds, PageKey, RequestId
from stratakv.policy.prefetch_pace import PrefetchPolicy, Timeout, prefetch_policy
from stratakv.policy.write import NoBackup, WritePolicy, WriteThrough, safe_wanted
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.tiers.audit import audit
from stratakv.tiers.consistency import HasColumns, add_consistency_checks
from stratakv.tiers.foreign import ForeignTransfers
from stratakv.tiers.object_keys import HostBytes
from stratakv.tiers.persist import Persister
from stratakv.tiers.pools import Allocators, Pools
from stratakv.tiers.prefetch.fetches import Fetches
from stratakv.tiers.statistics import Counters, PoolStats
from stratakv.tiers.storage import StorageTier
from stratakv.tiers.transfer_manager import POLL_S, TransferManager
from stratakv.transfer.copy_plan import Launched, nothing_launched
from stratakv.transfer.engine import TransferEngine
from stratakv.tree.effects import Remap
from stratakv.tree.lease import DeviceLease, HostHold, Lease, LoadLease
from stratakv.tree.matching import Match
from stratakv.tree.nodes import Tier
from stratakv.tree.observer import CacheObserver
from stratakv.tree.order import EvictionPolicy
from stratakv.tree.prefix_tree import PrefixTree

PAUSE_POLLS: Final = 25
"""An engine that has nothing to run looks for new requests every 5 ms or so."""
FLUSH_PAUSES: Final = 200
"""A flush gives storage a second or so: one that hangs must not stop the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """``eviction`` None: least recently used. ``prefetch`` None: the usual thresholds. ``clock``:
    of its deadlines alone; the same on every rank, as is all else here. ``observer``: who is told
    of pages. ``agreement``: where ranks meet. ``sleep``: how a moment is waited for, in seconds.
    ``launched``: what copies come after, where the device computes while this goes on.
    ``foreign_pages``: device pages of each group that another engine has, for ``foreign``."""

    eviction: EvictionPolicy | None = None
    write: WritePolicy = field(default_factory=WriteThrough)
    prefetch: PrefetchPolicy | None = None
    clock: Clock = field(default_factory=MonotonicClock)
    observer: CacheObserver | None = None
    agreement: Agreement = field(default_factory=lambda: Agreement(SingleRank()))
    sleep: Callable[[float], None] = time.sleep
    launched: Launched = nothing_launched
    foreign_pages: Sequence[int] = ()


class TieredCache:
    """``pages``: allocators of device and host pages, one per group; either pools may be empty.
    ``arenas``: where host pages lie; only storage looks there. ValueError unless there is one of
    each for every group. The parts are for those who stand
    on this floor and need more than its verbs: ``tree``, ``pools``, ``copies``, ``storage``."""

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
        self._observer = options.observer
        self._agreement, self._sleep = options.agreement, options.sleep
        capacity = device[ANCHOR].capacity + host[ANCHOR].capacity
        self.tree = PrefixTree(spec, capacity, options.eviction, options.observer)
        persister = Persister(self.tree.stored, arenas, options.observer)
        write = options.write if host[ANCHOR].capacity else NoBackup()
        cleans = any(safe_wanted(write, space.capacity) for space in device)
        evict = (
            self.tree.write_back.evict if cleans else partial(self.tree.eviction.evict, Tier.DEVICE)
        )
        self.pools = Pools(spec, self.tree, pages, persister.want, evict)
        self.copies = TransferManager(
            self.tree,
            self.pools,
            transfer,
            write,
            options.agreement,
            options.sleep,
            options.launched,
        )
        prefetch = options.prefetch or prefetch_policy(
            spec.page_tokens, host[ANCHOR].capacity, Timeout()
        )
        fetches = Fetches(self.tree, self.pools, arenas)
        self.storage = StorageTier(
            self.tree, persister, fetches, prefetch, options.clock, options.observer
        )
        self._foreign = ForeignTransfers(self.tree, self.pools, self.copies, foreign)

    def watch(self, beside: Sequence[HasColumns] = ()) -> None:
        """Let ranks compare what they have of this, and of the arrays ``beside`` it."""
        add_consistency_checks(
            self._agreement, self.spec, self.tree, self.pools, beside, self.copies, self.storage
        )

    @property
    def counters(self) -> Counters:
        return self.pools.counters

    # -- pages -----------------------------------------------------------------------------------

    def match(self, keys: Sequence[PageKey], limit: int) -> Match:
        """How far ``keys`` is usable, looking at no more than ``limit`` pages. Read-only."""
        return self.tree.match(keys, limit)

    def lease(self, keys: Sequence[PageKey], end: int) -> DeviceLease | None:
        """Pin what every group needs at ``end``, a match's ``end``, and begin to load what is on
        the host alone; None, and nothing is pinned, without device pages for it. ValueError where
        the tree does not know so many pages."""
        self._known("lease", keys, end)
        lease = self.tree.leases.take_to_load(keys, end)
        if isinstance(lease, LoadLease):
            loaded = self.copies.load(lease, end)
            if loaded is None:
                self.tree.leases.release(lease)
            return loaded
        return lease

    def hold(self, keys: Sequence[PageKey], end: int) -> HostHold:
        """Pin what every group needs at ``end`` pages, which are in the tree, as far as the host
        has it: a lease of the host tier alone. Its ``end`` is less where the host has less.
        ValueError where the tree does not know so many pages."""
        self._known("hold", keys, end)
        return self.tree.leases.hold_present(keys, end, self.tree.starts(end))

    def _known(self, verb: str, keys: Sequence[PageKey], end: int) -> None:
        known = 0 <= end <= len(keys) and self.tree.match(keys, end).anchor_end == end
        if not known:
            raise ValueError(f"{verb}: {end} pages, of which a match of these keys finds fewer")

    def insert(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> list[Remap]:
        """Adopt device pages for page indices [first, len(keys)); arguments as for
        ``PrefixTree.insert``. What comes back is to be carried out before anything else: where to
        read instead of the pages that the tree had already, which are free by now."""
        remaps, effects = self.tree.insert(keys, first, pages)
        self.copies.back_up(self.pools.execute(effects))
        for remap in remaps:
            self.counters.duplicate_pages += len(remap.canonical)
        return remaps

    def land(self, keys: Sequence[PageKey], first: int, pages: Sequence[PageIds]) -> None:
        """Adopt host pages; arguments as for ``insert``, the pages above ``first`` are pinned."""
        self.pools.execute(self.tree.land(keys, first, pages))

    def keep(self, lease: DeviceLease | HostHold, continued: int = 0) -> None:
        """Somebody is expected to go on at the end of ``lease``: of groups that do not keep all,
        what is needed there leaves after what is needed nowhere, and is stored. ``continued``: the
        pages that this prompt had matched; no other end of theirs is kept for its sake."""
        if lease.end:
            kept = self.tree.checkpoints.keep(lease, lease.end, continued)
            self.copies.back_up(self.pools.execute(kept))
            self.storage.used(lease)

    def release(self, lease: Lease) -> None:
        """End a lease; what it held may leave from now on."""
        self.tree.leases.release(lease)

    @property
    def foreign(self) -> ForeignTransfers:
        """Loading into device pages, and saving from device pages, that somebody else owns."""
        return self._foreign

    # -- time ------------------------------------------------------------------------------------

    def tick(self) -> None:
        """``collect``, then ``go_on``: for those who have nothing to do in between."""
        self.go_on(None, self.collect())

    def collect(self) -> Result:
        """Vote on what has ended, and submit what was begun while the others vote; apply what has
        ended on every rank, in submission order."""
        ballot = self._agreement.ballot()
        self.copies.vote(ballot)
        self.storage.vote(ballot)
        agreed = self._agreement.agree(ballot, self.copies.submit)
        self.copies.apply(agreed)
        self._foreign.poll()
        return agreed

    def go_on(self, head: RequestId | None, agreed: Result) -> None:
        """Back up pages that must soon make room; apply what storage has answered, and submit what
        the step has found to do there. ``head``: the request whose turn comes next."""
        self.copies.clean()
        self.storage.tick(head, agreed)

    def wait(self) -> bool:
        """Block until one more copy has ended; False when none is under way."""
        waited = self.copies.wait()
        self._foreign.poll()
        return waited

    @property
    def busy(self) -> bool:
        """Whether a copy or an I/O operation is under way or waits to be submitted."""
        return self.copies.busy or self.storage.busy

    def idle_a_moment(self) -> None:
        """Let a little time pass, less where a copy or storage has something to say."""
        for _ in range(PAUSE_POLLS):
            if self.copies.ready or self.storage.ready:
                break
            self._sleep(POLL_S)

    def clear(self) -> None:
        """Drop everything cached; nothing is pinned."""
        self.pools.execute(self.tree.clear())
        if self._observer is not None:
            self._observer.dropped()

    def push_out(self, tier: Tier) -> None:
        """Take everything that nothing pins off a tier; what the tier below has of it stays."""
        for group in reversed(self.spec.groups):
            space = self.pools.tiers[tier][group.id]
            self.pools.make_room(tier, group.id, space.capacity)

    # -- what is where ---------------------------------------------------------------------------

    def stats(self) -> tuple[PoolStats, ...]:
        return self.pools.stats()

    def check(self, owned: Callable[[Tier, GroupId], list[PageIds]] | None = None) -> None:
        """Verify the tree, and that every page of every pool is accounted for exactly once.
        ``owned``: pages of a tier and group that whoever stands above this owns."""

        def everybody(tier: Tier, group: GroupId) -> list[PageIds]:
            mine = [] if owned is None else owned(tier, group)
            if tier == Tier.HOST:
                mine = [*mine, *self.storage.owned(group), *self._foreign.owned(group)]
            return mine

        audit(self.spec, self.tree, self.pools, everybody)

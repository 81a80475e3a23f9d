"""Letting a request in: what of its prefix it stands on, and the pages it books.

Owns the decision and its order: weigh the load, ask the budget, and only then pin anything. Must
not hand pages to the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from stratakv.cache.live import LivePages
from stratakv.cache.losses import Missed
from stratakv.cache.records import Admission, CachedTokens, CacheUse, Refusal
from stratakv.cache.retraction import RetractedState, Retraction
from stratakv.cache.sequence_states import SequenceState, SequenceStates
from stratakv.core.ids import GroupId, RequestId
from stratakv.core.page_keys import PageHasher
from stratakv.memory.block_table import BlockTable
from stratakv.policy.admission import Demand, demand
from stratakv.policy.checkpoints import CheckpointPolicy, last_end
from stratakv.policy.load_back import LoadBack, LoadBackPolicy
from stratakv.policy.losses import NOTHING_KNOWN, Declined, Known
from stratakv.spec.groups import ANCHOR
from stratakv.spec.retention import needed
from stratakv.tiers.tiered_cache import TieredCache
from stratakv.tree.lease import DeviceLease, LoadLease
from stratakv.tree.matching import NO_MATCH, Match


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """What a request asks for: the tokens it knows, the most it may reach, its pages' keys.
    ``request``: under which storage was asked for its prefix, if it was.
    ``priority`` is that of its pages under eviction by priority; ``again``: it was seated before
    and has counted as a use of its pages. ``use``: what it may do with the cache. ``receives``:
    what it lacks comes from another engine, as far as ``tokens``, so that it stands on nothing that
    is only needed before."""

    prefix: PageHasher
    tokens: int
    total_tokens: int
    request: RequestId | None = None
    priority: int = 0
    again: bool = False
    use: CacheUse = CacheUse.ALL
    receives: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """``chunk_tokens``: the most tokens of one request in a step. ``reserve_tokens``: output that
    is booked at admission, beyond the prompt. ``steps_at_once``: how many steps may be launched and
    not yet committed; what a window needs no more is held until then."""

    chunk_tokens: int
    reserve_tokens: int
    load_back: LoadBackPolicy
    reuse: bool
    steps_at_once: int = 1

    @property
    def ahead_tokens(self) -> int:
        """The most tokens of one request that are computed and not committed."""
        return self.chunk_tokens * self.steps_at_once


class Admitter:
    def __init__(
        self,
        tiers: TieredCache,
        tables: BlockTable,
        sequences: SequenceStates,
        limits: AdmissionLimits,
        checkpoints: CheckpointPolicy,
    ) -> None:
        self._spec = tiers.spec
        self._page = tiers.spec.page_tokens
        self._checkpoints = checkpoints
        self._tree, self._leases = tiers.tree, tiers.tree.leases
        self._pools, self._copies = tiers.pools, tiers.copies
        self._tables = tables
        self._sequences = sequences
        self._limits = limits

    def refusal(self, total_tokens: int) -> str | None:
        chunk = self._limits.ahead_tokens
        wanted = demand(self._spec, total_tokens, total_tokens, chunk, 0)
        return self._sequences.budget.refusal(wanted)

    def match(self, prefix: PageHasher, tokens: int) -> Match:
        if not self._limits.reuse:
            return NO_MATCH
        return self._tree.match(prefix.keys, last_end(tokens, self._page))

    # -- a new request, or one that must be recomputed -------------------------------------------

    def known(self, prefix: PageHasher, found: Match, tokens: int) -> Known:
        """What the tree knows of a prompt of ``tokens``, of which a match has found ``found``."""
        beyond = self._tree.beyond(prefix.keys, found, last_end(tokens, self._page))
        return Known(
            usable=found.end,
            anchor=found.anchor_end,
            whole=beyond.whole,
            device=beyond.device,
            states_only=beyond.states_only,
            gone=beyond.gone,
        )

    def admit(self, asked: AdmissionRequest, live: LivePages) -> tuple[Admission, Missed] | Refusal:
        """Lease the longest usable prefix and begin its load-back, if one is worth it. A refusal
        pins nothing."""
        self._copies.begin_backups()  # an aborted request has left some; admitting may evict
        if not self._limits.reuse:
            asked = replace(asked, use=CacheUse.NOTHING)
        found = self._found(asked)
        row = self._tables.open_row()
        if row is None:
            return Refusal.NO_ROW
        try:
            return self._enter(row, asked, found, live)
        finally:
            self._give_up(row)

    def _give_up(self, row: int) -> None:
        """Close a row at which nobody was admitted, also where its request has failed."""
        if row not in self._sequences:
            self._tables.close_row(row)

    def _enter(
        self, row: int, asked: AdmissionRequest, found: Match, live: LivePages
    ) -> tuple[Admission, Missed] | Refusal:
        load = self._weigh_load(found)
        if load is LoadBack.WAIT:
            return Refusal.LOAD_BUDGET
        declined = Declined.DEVICE_CAPACITY
        if load is LoadBack.DECLINE:
            declined = Declined.BELOW_THRESHOLD
        missed = Missed(NOTHING_KNOWN, declined)
        if CacheUse.READ in asked.use:
            missed = Missed(self.known(asked.prefix, found, asked.tokens), declined)
        admission = None
        if load is LoadBack.LOAD:
            admission = self._try(row, asked, found, found.end, live)
            if admission is None:  # the attempt may have evicted what the first match saw
                found = self._found(asked)
        if admission is None:
            admission = self._try(row, asked, found, found.device_end, live)
        return Refusal.NO_PAGES if admission is None else (admission, missed)

    def _found(self, asked: AdmissionRequest) -> Match:
        return self.match(asked.prefix, asked.tokens) if CacheUse.READ in asked.use else NO_MATCH

    def _weigh_load(self, found: Match) -> LoadBack:
        saved = (found.end - found.device_end) * self._page
        loading = self._copies.loading_pages * self._page
        answer = self._limits.load_back.decide(saved, loading)
        self._pools.counters.load_waited += answer is LoadBack.WAIT
        return answer

    def _try(
        self, row: int, asked: AdmissionRequest, found: Match, end: int, live: LivePages
    ) -> Admission | None:
        """Admit at ``end``, or not at all."""
        starts = self._starts(asked, end)
        priced = self._price(asked, end, starts)
        if priced is None:
            return None
        wanted, host = priced
        checkpoints, milestones = list[int](), list[int]()
        if asked.use is CacheUse.ALL:  # else it is apart
            checkpoints += self._checkpoints.checkpoints(asked.tokens, end, found.anchor_end)
            milestones += self._checkpoints.milestones(asked.tokens, end)
        claim = self._lease(asked, end, starts, found.device_end)
        lease = self._load(claim, end - found.device_end)
        if lease is None:
            return None
        sequence = SequenceState(
            asked.prefix, lease, wanted, end, checkpoints, milestones, asked.use
        )
        self._open_sequence(row, sequence)
        live.open(row, lease)
        device_end = min(found.device_end, end)
        cached = replace(self._cached(lease, device_end, host), use=asked.use)
        return Admission(row=row, computed=cached.total, cached=cached, tickets=lease.loading)

    def _starts(self, asked: AdmissionRequest, end: int) -> list[int]:
        """First page of each group that the request is to stand on, at most ``end``."""
        starts = self._tree.starts(end)
        if not asked.receives:
            return starts
        return [
            end
            if group.stateful
            else max(start, min(end, needed(group.retention, asked.tokens, self._page).start))
            for group, start in zip(self._spec.groups, starts, strict=True)
        ]

    def _price(
        self, asked: AdmissionRequest, end: int, starts: Sequence[int]
    ) -> tuple[Demand, list[int]] | None:
        """What to book, and pages to load by group; None where the budget refuses. Asked before
        the lease: a request that waits must not warm its prefix at every step."""
        limits = self._limits
        booked = min(asked.total_tokens, asked.tokens + limits.reserve_tokens)
        wanted = demand(self._spec, asked.total_tokens, booked, limits.ahead_tokens, end)
        keys = asked.prefix.keys
        price_of = self._leases.price
        prices = [price_of(keys, end, starts, group.id) for group in self._spec.groups]
        available = [
            self._pools.available(GroupId(group)) - price.to_pin - price.to_load
            for group, price in enumerate(prices)
        ]
        if not self._sequences.budget.fits(wanted, available):
            return None
        return wanted, [price.to_load for price in prices]

    def _lease(
        self, asked: AdmissionRequest, end: int, starts: Sequence[int], device_end: int
    ) -> DeviceLease | LoadLease:
        """Pin the prefix, on the host what of it must be loaded."""
        leases = self._leases
        take = leases.take_to_load if end > device_end else leases.take
        return take(
            asked.prefix.keys, end, starts=starts, priority=asked.priority, again=asked.again
        )

    def _load(self, lease: DeviceLease | LoadLease, saved_pages: int) -> DeviceLease | None:
        """Begin the load that a lease needs, if it does, as the last thing of an admission that may
        fail: None, and the lease is released, without device pages for it."""
        match lease:
            case DeviceLease():
                loaded = lease
            case LoadLease():
                loaded = self._copies.load(lease, max(0, saved_pages))
            case _:
                assert_never(lease)
        if loaded is None:
            self._leases.release(lease)
            return None
        self._copies.used(loaded)
        return loaded

    def _open_sequence(self, row: int, sequence: SequenceState) -> None:
        for group in self._spec.groups:
            if not group.stateful:
                start = sequence.lease.starts[group.id]
                pages = self._leases.pages(sequence.lease, group.id)
                self._tables.remap(row, group.id, start, pages)
        self._sequences.open(row, sequence)

    def _cached(self, lease: DeviceLease, device_end: int, host: Sequence[int]) -> CachedTokens:
        spans = [lease.end - start for start in lease.starts]
        return CachedTokens(
            device=device_end * self._page,
            host=(lease.end - device_end) * self._page,
            storage=0,
            groups_device=tuple(
                (span - loaded) * self._page for span, loaded in zip(spans, host, strict=True)
            ),
            groups_host=tuple(loaded * self._page for loaded in host),
            groups_storage=(0,) * len(spans),
        )

    # -- one that was retracted ------------------------------------------------------------------

    def resume(
        self, retracted: RetractedState, asked: AdmissionRequest, retraction: Retraction
    ) -> Admission | Refusal:
        """Seat a request where it was retracted; what it needs is on the host, held for it."""
        if not retraction.saved(retracted):
            return Refusal.SAVING
        self._copies.begin_backups()
        row = self._tables.open_row()
        if row is None:
            return Refusal.NO_ROW
        try:
            admission = self._try_resume(row, retracted, asked, retraction)
        finally:
            self._give_up(row)
        return Refusal.NO_PAGES if admission is None else admission

    def _try_resume(
        self, row: int, retracted: RetractedState, asked: AdmissionRequest, retraction: Retraction
    ) -> Admission | None:
        end = retracted.end
        priced = self._price(asked, end, retracted.starts)
        if priced is None:
            return None
        wanted, host = priced
        claim = self._lease(asked, end, retracted.starts, device_end=0)
        taken = retraction.take(retracted)
        if taken is None:
            self._leases.release(claim)
            return None
        lease = self._load(claim, end)
        if lease is None:
            retraction.give_back(taken)
            return None
        tickets = retraction.land(row, retracted, lease, taken)
        self._open_sequence(row, replace(retracted.sequence, lease=lease, demand=wanted))
        cached = self._cached(lease, end - host[ANCHOR], host)
        return Admission(
            row=row, computed=retracted.tokens, cached=cached, tickets=(*lease.loading, *tickets)
        )

"""Letting a request in: what of its prefix it stands on, the pages it books, and what it has lost.

Owns the decision and its order: weigh the load, ask the budget, and only then pin anything. Must
not hand pages to the tree.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, assert_never

import numpy as np

from stratakv.cache.footprint import taken_spans
from stratakv.cache.live import LivePages
from stratakv.cache.losses import LossBook, Missed
from stratakv.cache.misses import MissLog
from stratakv.cache.prices import AdmissionRequest, Prices
from stratakv.cache.records import Admission, CachedTokens, CacheUse, Refusal
from stratakv.cache.retraction import RetractedState, Retraction
from stratakv.cache.sequence_states import SequenceState, SequenceStates
from stratakv.core.ids import RequestId
from stratakv.core.page_keys import PageHasher
from stratakv.memory.block_table import BlockTable
from stratakv.policy.checkpoints import CheckpointPolicy, last_end
from stratakv.policy.load_back import LoadBack
from stratakv.policy.losses import NOTHING_KNOWN, Declined, Known
from stratakv.policy.prefetch_reasons import Tally
from stratakv.spec.groups import ANCHOR
from stratakv.tiers.prefetch.fetches import FromStorage
from stratakv.tiers.tiered_cache import TieredCache
from stratakv.tree.lease import DeviceLease, LoadLease
from stratakv.tree.matching import NO_MATCH, Match

Entered = TypeVar("Entered")


class Admitter:
    """``losses``: why tokens that were known are computed all the same; ``misses``: the same of
    each of the last requests."""

    def __init__(
        self,
        tiers: TieredCache,
        tables: BlockTable,
        sequences: SequenceStates,
        live: LivePages,
        retraction: Retraction,
        checkpoints: CheckpointPolicy,
        prices: Prices,
    ) -> None:
        self._spec = tiers.spec
        self._page = tiers.spec.page_tokens
        self._checkpoints = checkpoints
        self._tree, self._leases = tiers.tree, tiers.tree.leases
        self._pools, self._copies = tiers.pools, tiers.copies
        self._progress = tiers.progress
        self._persister, self._prefetcher = tiers.storage.persister, tiers.storage.prefetcher
        self._tables = tables
        self._sequences = sequences
        self._live = live
        self._retraction = retraction
        self._prices = prices
        self._limits, self._spilling = prices.limits, prices.spilling
        self.losses = LossBook(self._page)
        self.misses = MissLog(tiers.spec, tiers.tree, tiers.clock.now_s)

    def refusal(self, total_tokens: int, use: CacheUse = CacheUse.ALL) -> str | None:
        """None, or why a request of ``total_tokens`` could not run even alone."""
        return self._prices.refusal(total_tokens, use)

    def would_be_resident(self, row: int, asked: AdmissionRequest) -> bool:
        """Whether the request at ``row`` would be admitted with all of its pages on the device,
        beside what it has booked now."""
        lease = self._sequences[row].lease
        return self._prices.ask(asked, lease.end, lease.starts, 1, spill=False) is not None

    def match(self, prefix: PageHasher, tokens: int) -> Match:
        """How much of a prompt is usable; at least one token is always left to compute."""
        if not self._limits.reuse:
            return NO_MATCH
        return self._tree.match(prefix.keys, last_end(tokens, self._page))

    # -- a new request, or one that must be recomputed -------------------------------------------

    def _known(self, prefix: PageHasher, found: Match, tokens: int) -> Known:
        """What the tree knows of a prompt of ``tokens``, of which a match has found ``found``."""
        beyond = self._tree.beyond(prefix.keys, found, last_end(tokens, self._page))
        return Known(found.end, found.anchor_end, *beyond)

    def admit(self, asked: AdmissionRequest) -> Admission | Refusal:
        """Lease the longest usable prefix, start its load-back if one is worth it, and book pages
        for its tokens and some output. A refusal pins nothing."""
        self._copies.backups.begin()  # an aborted request has left some; admitting may evict
        if not self._limits.reuse:
            asked = replace(asked, use=CacheUse.NOTHING)
        matched = partial(self._matched, asked)
        answer = self._with_room(lambda row: self._enter(row, asked, matched))
        if answer is Refusal.NO_PAGES and self._stuck():
            answer = self._anew(asked)
        return answer if isinstance(answer, Refusal) else self._admitted(asked, *answer)

    def _with_room(
        self, enter: Callable[[int], Entered | Refusal], mine: RetractedState | None = None
    ) -> Entered | Refusal:
        """``enter`` at a row of its own; where the device has no pages, once more for each request
        that can be spilled for it. Where nobody runs who could end, those that wait, but for
        ``mine``, may keep no host pages that it needs."""
        while True:
            self._prices.lacking.clear()
            answer = self._at_a_row(enter)
            if answer is not Refusal.NO_PAGES:
                return answer
            if self._spilling.make_room(self._prices.lacking):
                continue
            if len(self._sequences) or not self._spilling:
                return answer
            if not self.give_up(mine):
                # Its own live pages may be what fills the host: then it is computed again.
                if mine is None or self._progress.busy:
                    return answer
                self._retraction.give_up()
                return Refusal.GAVE_UP

    def _anew(self, asked: AdmissionRequest) -> tuple[Admission, Missed] | Refusal:
        """Admit a request that stands on nothing. Its prefix may be what fills the device, where it
        has no copies that could be read on the host."""
        found = self._matched(asked)
        known = self._known(asked.prefix, found, asked.tokens)
        answer = self._with_room(lambda row: self._enter(row, asked, lambda: NO_MATCH))
        if isinstance(answer, Refusal) or CacheUse.READ not in asked.use:
            return answer
        return answer[0], Missed(known, Declined.DEVICE_CAPACITY)

    def _stuck(self) -> bool:
        """Whether nothing is under way that could make room: nobody runs, and no copy."""
        idle = not len(self._sequences) and not self._progress.busy
        return bool(self._spilling) and idle

    def give_up(self, mine: RetractedState | None = None) -> bool:
        """Let go of host pages that one of those that wait keeps, but for ``mine``; False where
        none does."""
        return self._prefetcher.give_up() or self._retraction.give_up(mine)

    def _at_a_row(self, enter: Callable[[int], Entered | Refusal]) -> Entered | Refusal:
        """Close the row again at which nobody was admitted, also where its request has failed."""
        row = self._tables.open_row()
        if row is None:
            return Refusal.NO_ROW
        try:
            return enter(row)
        finally:
            if row not in self._sequences:
                self._tables.close_row(row)

    def _admitted(self, asked: AdmissionRequest, admission: Admission, missed: Missed) -> Admission:
        """Storage learns of it, and its losses are counted."""
        lease = self._sequences[admission.row].lease
        self._persister.used(lease)
        if asked.again:  # its prompt has counted, and its prefetch has ended
            return admission
        settled = partial(self._settled, asked.request, missed, lease.end)
        if asked.request is None:
            settled(None)
            return admission
        self.misses.admitted(asked, missed.known, admission.cached)
        came = self._prefetcher.admitted(asked.request, lease.end, settled)
        return admission if came is None else self._with_storage(admission, came, lease)

    def _settled(
        self, request: RequestId | None, missed: Missed, end: int, storage: Tally | None
    ) -> None:
        self.misses.billed(request, self.losses.admitted(missed, end, storage))

    def _with_storage(
        self, admission: Admission, came: FromStorage, lease: DeviceLease
    ) -> Admission:
        """Say what of the prefix the request's own prefetch has brought."""
        tokens = max(0, min(lease.end, came.end) - came.base) * self._page
        groups = [
            int(np.count_nonzero((pages >= start) & (pages < lease.end))) * self._page
            for pages, start in zip(came.pages, lease.starts, strict=True)
        ]
        return replace(admission, cached=admission.cached.fetched(tokens, groups))

    def abandon(self, asked: AdmissionRequest) -> None:
        """A request ends before it was admitted, and with it its prefetch, if it has one. Who does
        not read has lost nothing."""
        if CacheUse.READ not in asked.use:
            return
        found = self.match(asked.prefix, asked.tokens)
        settled = partial(self.losses.left, self._known(asked.prefix, found, asked.tokens))
        if asked.request is None:
            settled(None)
        else:
            self._prefetcher.forget(asked.request, settled)

    def _enter(
        self, row: int, asked: AdmissionRequest, matched: Callable[[], Match]
    ) -> tuple[Admission, Missed] | Refusal:
        """``matched``: what it may stand on, asked again where that may have changed."""
        found = matched()
        load = self._weigh_load(found)
        if load is LoadBack.WAIT:
            return Refusal.LOAD_BUDGET
        declined = Declined.DEVICE_CAPACITY
        if load is LoadBack.DECLINE:
            declined = Declined.BELOW_THRESHOLD
        missed = Missed(NOTHING_KNOWN, declined)
        if CacheUse.READ in asked.use:
            missed = Missed(self._known(asked.prefix, found, asked.tokens), declined)
        spills = self._spills(asked)
        for far, spill, worth in (  # as far as the host goes, and spilled
            (True, False, load is LoadBack.LOAD),
            (True, True, spills and found.end > found.device_end),
            (False, False, True),
            (False, True, spills),
        ):
            if not worth:
                continue
            end = found.end if far else found.device_end
            admission = self._try(row, asked, found, end, spill=spill)
            if admission is not None:
                return admission, missed
            found = matched()  # the attempt may have evicted what the match saw
        return Refusal.NO_PAGES

    def _spills(self, asked: AdmissionRequest) -> bool:
        """Whether a request may leave pages on the host while it runs: one that is apart has none
        there."""
        return bool(self._spilling) and asked.use is CacheUse.ALL

    def _matched(self, asked: AdmissionRequest) -> Match:
        return self.match(asked.prefix, asked.tokens) if CacheUse.READ in asked.use else NO_MATCH

    def _weigh_load(self, found: Match) -> LoadBack:
        saved = (found.end - found.device_end) * self._page
        loading = self._copies.loading_pages * self._page
        answer = self._limits.load_back.decide(saved, loading)
        self._pools.counters.add(load_waited=answer is LoadBack.WAIT)
        return answer

    def _try(
        self, row: int, asked: AdmissionRequest, found: Match, end: int, *, spill: bool
    ) -> Admission | None:
        """Admit at ``end``, or not at all."""
        starts = self._starts(asked, end)
        left = 0 if asked.receives else asked.tokens - end * self._page
        staged = self._limits.staged(left)
        priced = self._prices.ask(asked, end, starts, left, spill=spill)
        if priced is None:
            return None
        wanted, host = priced
        checkpoints, milestones = list[int](), list[int]()
        if asked.use is CacheUse.ALL:  # else it is apart
            checkpoints += self._checkpoints.checkpoints(asked.tokens, end, found.anchor_end)
            milestones += self._checkpoints.milestones(asked.tokens, end)
        claim = self._lease(asked, end, starts, found.device_end, spill=spill)
        lease = self._load(claim, end - found.device_end)
        if lease is None:
            return None
        sequence = SequenceState(
            asked.prefix,
            lease,
            wanted,
            asked.tokens,
            end,
            checkpoints,
            milestones,
            staged,
            asked.use,
        )
        self._open_sequence(row, sequence)
        self._live.open(row, lease)
        self._open_reading(row, sequence, spill=spill)
        device_end = min(found.device_end, end)
        cached = replace(self._cached(lease, device_end, host), use=asked.use)
        return Admission(row=row, computed=cached.total, cached=cached, tickets=lease.loading)

    def _starts(self, asked: AdmissionRequest, end: int) -> list[int]:
        """First page of each group that the request is to stand on, at most ``end``."""
        starts = self._tree.starts(end)
        if not asked.receives:
            return starts
        spans = taken_spans(self._spec, asked.tokens, stored=CacheUse.STORE in asked.use)
        return [
            end if group.stateful else max(start, min(end, span.start))
            for group, start, span in zip(self._spec.groups, starts, spans, strict=True)
        ]

    def _lease(
        self,
        asked: AdmissionRequest,
        end: int,
        starts: Sequence[int],
        device_end: int,
        *,
        spill: bool,
    ) -> DeviceLease | LoadLease:
        """Pin the prefix, on the host what of it must be loaded."""
        leases = self._leases
        take = leases.take_to_load if end > device_end else leases.take
        return take(
            asked.prefix.keys,
            end,
            starts=starts,
            priority=asked.priority,
            again=asked.again,
            spill=spill,
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
        self._copies.backups.used(loaded)
        return loaded

    def _open_sequence(self, row: int, sequence: SequenceState) -> None:
        for group in self._spec.groups:
            if not group.stateful:
                start = sequence.lease.starts[group.id]
                pages = self._leases.pages(sequence.lease, group.id)
                self._tables.remap(row, group.id, start, pages)
        self._sequences.open(row, sequence)

    def _open_reading(self, row: int, sequence: SequenceState, *, spill: bool) -> None:
        if spill:
            self._spilling.open(row, sequence)
        else:
            self._spilling.open_resident(row)

    def _cached(self, lease: DeviceLease, device_end: int, loaded: Sequence[int]) -> CachedTokens:
        spans = [lease.end - start for start in lease.starts]
        return CachedTokens.of_pages(self._page, device_end, lease.end, spans, loaded)

    # -- one that was retracted ------------------------------------------------------------------

    def resume(self, retracted: RetractedState, asked: AdmissionRequest) -> Admission | Refusal:
        """Seat a retracted request again: where it was, or, where the host could not hold it, as
        far as its prefix is still cached."""
        if retracted not in self._retraction:
            answer = self.admit(asked)
            if isinstance(answer, Admission) and not asked.receives:  # else computed elsewhere
                self.losses.retracted(max(0, retracted.tokens - answer.computed))
            return answer
        if not self._retraction.saved(retracted):
            return Refusal.SAVING
        self._copies.backups.begin()
        return self._with_room(lambda row: self._back_in(row, retracted, asked), retracted)

    def _back_in(
        self, row: int, retracted: RetractedState, asked: AdmissionRequest
    ) -> Admission | Refusal:
        answer = self._try_resume(row, retracted, asked, spill=False)
        if isinstance(answer, Refusal) and self._spills(asked):
            answer = self._try_resume(row, retracted, asked, spill=True)
        return answer

    def _try_resume(
        self, row: int, retracted: RetractedState, asked: AdmissionRequest, *, spill: bool
    ) -> Admission | Refusal:
        end, left = retracted.end, asked.tokens - retracted.tokens
        priced = self._prices.ask(asked, end, retracted.starts, left, spill=spill)
        if priced is None:
            return Refusal.NO_PAGES
        wanted, host = priced
        claim = self._lease(asked, end, retracted.starts, device_end=0, spill=spill)
        taken = self._retraction.take(retracted)
        if taken is None:
            self._leases.release(claim)
            return Refusal.NO_PAGES
        lease = self._load(claim, end)
        if lease is None:
            self._retraction.give_back(taken)
            return Refusal.NO_PAGES
        tickets = self._retraction.land(row, retracted, lease, taken)
        staged = self._limits.staged(left)
        sequence = replace(retracted.sequence, lease=lease, demand=wanted, at_once=staged)
        self._open_sequence(row, sequence)
        self._open_reading(row, sequence, spill=spill)
        self._retraction.assert_restored(row, retracted, taken)
        cached = self._cached(lease, end - host[ANCHOR], host)
        return Admission(
            row=row, computed=retracted.tokens, cached=cached, tickets=(*lease.loading, *tickets)
        )

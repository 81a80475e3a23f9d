"""The cache as an engine sees it: admit, extend, commit, release; retract and resume; and ``tick``,
the only place where asynchronous work becomes state.

Owns the life of a sequence, from admission to its end. The parts it binds own the rest: ``admit``
lets in, ``commits`` hands pages to the tree, ``retraction`` keeps what was retracted, ``copies``
moves. Must not run a model or read a clock. The device tier is whatever the allocators and the
transfer engine say it is: no byte passes here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from stratakv.agreement.ballot import Work
from stratakv.cache.admit import AdmissionLimits, AdmissionRequest, Admitter
from stratakv.cache.commits import Committer
from stratakv.cache.hand_off import HandOff
from stratakv.cache.live import LivePages
from stratakv.cache.losses import LossBook
from stratakv.cache.records import Admission, CacheUse, Refusal
from stratakv.cache.retraction import RetractedState, Retraction
from stratakv.cache.sequence_states import SequenceStates
from stratakv.core.ids import NONE, GroupId, PageIds, PageKey, RequestId, RowIds, TicketId, TokenIds
from stratakv.core.page_keys import PageHasher
from stratakv.memory.block_table import BlockTable
from stratakv.policy.admission import demand
from stratakv.policy.checkpoints import CheckpointPolicy
from stratakv.spec.groups import CacheSpec
from stratakv.tiers.object_keys import HostBytes
from stratakv.tiers.pools import Allocators
from stratakv.tiers.prefetch.fetches import FromStorage
from stratakv.tiers.statistics import Counters, PoolStats
from stratakv.tiers.tiered_cache import FLUSH_PAUSES, TieredCache, TierOptions
from stratakv.transfer.engine import LayerGate, TransferEngine
from stratakv.tree.lease import DeviceLease
from stratakv.tree.matching import Match
from stratakv.tree.nodes import Tier

Int32s = RowIds


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """``limits.reuse`` False computes everything and keeps nothing. ``snapshot_pages``: how often
    a request that decodes keeps its state. ``tiers``: of what is below."""

    limits: AdmissionLimits
    snapshot_pages: int = 4
    tiers: TierOptions = field(default_factory=TierOptions)


def _checkpoint_policy(spec: CacheSpec, snapshot_pages: int) -> CheckpointPolicy:
    """A milestone of a window costs little; one of states costs a state of each layer."""
    states = any(group.stateful and not group.scratch for group in spec.groups)
    return CheckpointPolicy(
        page_tokens=spec.page_tokens,
        snapshot_pages=snapshot_pages,
        unit=snapshot_pages if states else 1,
    )


class KVCache:
    """``tiers``: allocators of device and host pages, one per group; host pools may be empty.
    ``arenas``: where host pages lie; only storage looks there."""

    def __init__(
        self,
        spec: CacheSpec,
        tiers: tuple[Allocators, Allocators],
        tables: BlockTable,
        transfer: TransferEngine,
        options: CacheOptions,
        arenas: Sequence[HostBytes] = (),
    ) -> None:
        self.spec = spec
        self._tables = tables
        self._page = spec.page_tokens
        self._tiers = TieredCache(spec, tiers, transfer, options.tiers, arenas)
        self._tree, self._pools = self._tiers.tree, self._tiers.pools
        self._copies, self.storage = self._tiers.copies, self._tiers.storage
        self.losses = LossBook(spec.page_tokens)
        self._sequences = SequenceStates(
            spec, tables, [space.capacity for space in tiers[Tier.DEVICE]]
        )
        checkpoints = _checkpoint_policy(spec, options.snapshot_pages)
        self._live = LivePages(self._tiers, tables)
        self._commits = Committer(
            self._tiers, tables, self._live, checkpoints, options.tiers.observer
        )
        self._retraction = Retraction(self._tiers, tables, self._live)
        self._admit = Admitter(self._tiers, tables, self._sequences, options.limits, checkpoints)
        self._steps_at_once = options.limits.steps_at_once
        self.hand_off = HandOff(
            self._tiers, tables, self._sequences, self._live, self._commits, self.wait
        )
        self._tiers.watch((tables, self._sequences))

    @property
    def counters(self) -> Counters:
        return self._pools.counters

    # -- the life of a request -------------------------------------------------------------------

    def refusal(self, total_tokens: int) -> str | None:
        """None, or why a request of ``total_tokens`` could not run even alone."""
        return self._admit.refusal(total_tokens)

    def match(self, prefix: PageHasher, tokens: int) -> Match:
        """How much of a prompt is usable; at least one token is always left to compute."""
        return self._admit.match(prefix, tokens)

    def admit(self, asked: AdmissionRequest) -> Admission | Refusal:
        """Lease the longest usable prefix, start its load-back if one is worth it, and book pages
        for its tokens and some output. A refusal pins nothing."""
        answer = self._admit.admit(asked, self._live)
        if isinstance(answer, Refusal):
            return answer
        admission, missed = answer
        lease = self._sequences[admission.row].lease
        self.storage.used(lease)
        if asked.again:  # its prompt has counted, and its prefetch has ended
            return admission
        settled = partial(self.losses.admitted, missed, lease.end)
        if asked.request is None:
            settled(None)
            return admission
        came = self.storage.admitted(asked.request, lease.end, settled)
        return self._with_storage(admission, came, lease)

    def _with_storage(
        self, admission: Admission, came: FromStorage | None, lease: DeviceLease
    ) -> Admission:
        """Say what of the prefix the request's own prefetch has brought."""
        if came is None:
            return admission
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
        settled = partial(self.losses.left, self._admit.known(asked.prefix, found, asked.tokens))
        if asked.request is None:
            settled(None)
        else:
            self.storage.forget(asked.request, settled)

    def gate(self, tickets: Sequence[TicketId]) -> LayerGate | None:
        """Hand over this step's loads, as one plan; what a forward over freshly admitted rows waits
        for, layer by layer."""
        self._copies.submit_loads()
        return self._copies.gate(tickets)

    def cut(self, row: int) -> int | None:
        """The token at which the row's chunk must end, because a snapshot is due there."""
        return self._commits.cut(self._sequences[row])

    def fits(self, starts: Int32s, ends: Int32s) -> bool:
        """Whether ``extend`` would find its pages; groups that do not keep all have booked them."""
        total = int((-(-ends // self._page) + starts // -self._page).sum())
        kept = [group.id for group in self.spec.groups if group.keeps_all]
        return all(self._pools.available(group) >= total for group in kept)

    def extend(self, rows: RowIds, starts: Int32s, ends: Int32s) -> None:
        """Give every row pages for tokens [start, end), and a live page where it needs one."""
        self._copies.begin_backups()
        self._live.extend(rows, self.wait)
        first = -(-starts // self._page)
        counts = -(-ends // self._page) - first
        total = int(counts.sum())
        if not total:
            return
        at_rows = np.repeat(rows, counts)
        offsets = np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        indices = np.repeat(first, counts) + offsets
        for group in self.spec.groups:
            if not group.stateful:
                pages = self._pools.take(group.id, total, self.wait)
                self._tables.pages(group.id)[at_rows, indices] = pages
                self._sequences.grow(rows, group.id, counts)

    def commit(self, row: int, tokens: TokenIds) -> None:
        """``tokens`` (all computed so far) have their KV: full pages enter the tree, the lease
        moves on, and pages behind a window become anybody's."""
        self._commits.commit(row, self._sequences[row], tokens)

    def prefilled(self, row: int, total_tokens: int) -> None:
        """The row's prompt is computed: from now on it takes one token a step, up to
        ``total_tokens``, and holds less than a chunk would."""
        self._sequences.lower(
            row, demand(self.spec, total_tokens, total_tokens, self._steps_at_once, 0).peak
        )

    def release(self, row: int, tokens: TokenIds) -> None:
        """End a request, finished or aborted, of which ``tokens`` have their KV."""
        self._retraction.landed(row, self.wait)
        self._commits.finish(row, self._sequences[row], tokens)
        self._leave(row)

    def suspect(self, row: int) -> PageKey | None:
        """What the request at ``row`` stands on and may be why it has met NaN or infinity."""
        return self.storage.distrust(self._sequences[row].lease)

    def drop(self, row: int) -> None:
        """End a request of which nothing is kept but what the tree has already."""
        self._retraction.landed(row, self.wait)
        self._leave(row)

    def _leave(self, row: int) -> None:
        """Free what a request owns, and what it stands on becomes evictable."""
        sequence = self._sequences[row]
        self.storage.used(sequence.lease)
        device = self._pools.tiers[Tier.DEVICE]
        for group in self.spec.groups:
            own = self._tables.pages(group.id)[row, sequence.lease.end :]
            device[group.id].free(own[own != NONE])
        for stray_group, _, stray in sequence.duplicates:
            device[stray_group].free(stray)
        self._live.close(row)
        self._tiers.release(sequence.lease)
        self._sequences.close(row)

    # -- retraction ------------------------------------------------------------------------------

    def retract(self, row: int, tokens: TokenIds) -> RetractedState:
        """Take a running request, of which ``tokens`` have their KV, off the device, and save what
        it needs to go on; of one that is apart nothing. ``resume`` or ``forget`` ends that."""
        self._retraction.landed(row, self.wait)
        sequence = self._sequences[row]
        self.counters.retracted += 1
        retracted = self._retraction.retract(row, sequence, 0 if sequence.apart else len(tokens))
        if retracted in self._retraction:
            self._leave(row)
        else:
            self.release(row, tokens)
        return retracted

    def resume(self, retracted: RetractedState, asked: AdmissionRequest) -> Admission | Refusal:
        """Seat a retracted request again: where it was, or, where the host could not hold it, as
        far as its prefix is still cached."""
        if retracted not in self._retraction:
            answer = self.admit(asked)
            if isinstance(answer, Admission):
                self.losses.retracted(max(0, retracted.tokens - answer.computed))
            return answer
        return self._admit.resume(retracted, asked, self._retraction)

    def forget(self, retracted: RetractedState) -> None:
        """A retracted request ends without coming back."""
        self._retraction.forget(retracted)
        self._retraction.poll()

    # -- time ------------------------------------------------------------------------------------

    def tick(self, head: RequestId | None = None) -> None:
        """Vote on what has ended, and submit this step's backups while the others vote; apply what
        has ended on every rank, in submission order, and back up pages that must soon make room;
        then the same with storage. ``head``: the request whose turn comes next."""
        agreed = self._tiers.collect()
        if agreed.ended(Work.LOAD):
            self._commits.free_duplicates(self._sequences)
        self._retraction.poll()
        self._tiers.go_on(head, agreed)

    @property
    def busy(self) -> bool:
        """Whether a copy or an I/O operation is under way or waits to be submitted."""
        return self._tiers.busy

    def pause(self, head: RequestId | None = None) -> None:
        """Let a little time pass, less where a copy or storage has something to say, and tick."""
        self._tiers.idle_a_moment()
        self.tick(head)

    def wait(self) -> bool:
        """Block until one more copy has ended; False when none is under way."""
        waited = self._tiers.wait()
        self._commits.free_duplicates(self._sequences)
        self._retraction.poll()
        return waited

    def settle(self) -> None:
        """Wait until no copy and no I/O operation is under way."""
        while self.wait():
            pass
        while self.busy:
            self.pause()

    def close(self, timeout_s: float) -> None:
        """Wait for the copies, and at most ``timeout_s`` for what storage is to keep."""
        while self.wait():
            pass
        self.storage.close(timeout_s)

    def flush(self) -> bool:
        """Drop everything cached; False, and nothing done, while a request runs or waits for what
        storage fetches, or where storage is not soon done with what it writes."""
        if len(self._sequences):
            return False
        while self.wait():
            pass
        for _ in range(FLUSH_PAUSES):
            if self.storage.holding or not self.busy:
                break
            self.pause()
        if self.storage.holding or self.busy or len(self._retraction):
            return False
        self._tiers.clear()
        return True

    def push_out(self, tier: Tier) -> None:
        """Wait for what is under way, then take everything that nothing pins off a tier; what the
        tier below has of it stays there."""
        self.settle()
        self._tiers.push_out(tier)

    def unowned(self, tier: Tier, group: GroupId) -> PageIds:
        """Pages that are nobody's, int32."""
        space = self._pools.tiers[tier][group]
        return space.next(space.capacity).copy()

    # -- what is where ---------------------------------------------------------------------------

    def stats(self) -> tuple[PoolStats, ...]:
        return self._pools.stats()

    def check(self) -> None:
        """Verify the tree, and that every page of every pool is accounted for exactly once."""
        self.losses.check()
        self._sequences.check(self._tree.leases)
        self._tiers.check(self._owned)

    def _owned(self, tier: Tier, group: GroupId) -> list[PageIds]:
        """Pages that no node of the tree stands for."""
        owned = [self._retraction.owned(tier, group)]
        if tier == Tier.HOST:
            return owned
        if self.spec.groups[group].stateful:
            return [*owned, self._live.all_owned(group)]
        for row, sequence in self._sequences.items():
            own = self._tables.pages(group)[row, sequence.lease.end :]
            owned.append(own[own != NONE])
            owned += [pages for of, _, pages in sequence.duplicates if of == group]
        return owned

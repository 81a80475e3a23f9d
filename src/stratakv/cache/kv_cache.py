"""The cache as an engine sees it: what it is made of, and the rows of the requests that run.

Owns the life of an admitted sequence: extended, committed, retracted or ended. The parts own the
rest: ``admission`` lets in, ``retraction`` keeps what was retracted, ``hand_off`` exchanges pages
with other engines, ``progress`` turns what has ended into state. Must not run a model or read a
clock. The device tier is whatever the allocators and the transfer engine say it is: no byte passes
here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from stratakv.cache.admit import Admitter
from stratakv.cache.commits import Committer
from stratakv.cache.hand_off import HandOff
from stratakv.cache.live import LivePages
from stratakv.cache.prices import AdmissionLimits, AdmissionRequest, Prices
from stratakv.cache.retraction import RetractedState, Retraction
from stratakv.cache.sequence_states import SequenceStates
from stratakv.cache.spilling import Spilling
from stratakv.core.ids import NONE, GroupId, PageIds, PageKey, RowIds, TokenIds
from stratakv.memory.block_table import BlockTable
from stratakv.policy.admission import demand
from stratakv.policy.checkpoints import CheckpointPolicy
from stratakv.spec.groups import CacheSpec
from stratakv.tiers.consistency import HasColumns
from stratakv.tiers.object_keys import HostBytes
from stratakv.tiers.pools import Allocators
from stratakv.tiers.tiered_cache import TieredCache, TierOptions
from stratakv.transfer.engine import TransferEngine
from stratakv.tree.nodes import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """``limits.reuse`` False computes everything and keeps nothing. ``snapshot_pages``: how often
    a request that decodes keeps its state. ``tiers``: of what is below."""

    limits: AdmissionLimits
    snapshot_pages: int = 4
    tiers: TierOptions = field(default_factory=TierOptions)


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
        self._kept = [group.id for group in spec.groups if group.keeps_all]
        self.tiers = TieredCache(spec, tiers, transfer, options.tiers, arenas)
        self._pools, self._copies = self.tiers.pools, self.tiers.copies
        self.storage, self.progress = self.tiers.storage, self.tiers.progress
        self._sequences = SequenceStates(
            spec,
            tables,
            [space.capacity for space in tiers[Tier.DEVICE]],
            [tiers[Tier.HOST][group].capacity for group in tables.spilled],
        )
        self._spilling = Spilling(self.tiers, tables, self._sequences)
        # A milestone of a window costs little; one of states costs a state of each layer.
        states = any(group.stateful and not group.scratch for group in spec.groups)
        every = options.snapshot_pages
        checkpoints = CheckpointPolicy(
            page_tokens=self._page, snapshot_pages=every, unit=every if states else 1
        )
        self._live = LivePages(self.tiers, tables)
        self._commits = Committer(
            self.tiers, tables, self._live, checkpoints, options.tiers.observer
        )
        self.retraction = Retraction(self.tiers, tables, self._live)
        self.admission = Admitter(
            self.tiers,
            tables,
            self._sequences,
            self._live,
            self.retraction,
            checkpoints,
            Prices(self.tiers, self._sequences, options.limits, self._spilling),
        )
        self._steps_at_once = options.limits.steps_at_once
        self.hand_off = HandOff(
            self.tiers, tables, self._sequences, self._live, self._commits, self._spilling
        )
        free_duplicates = partial(self._commits.free_duplicates, self._sequences)
        self.progress.after(free_duplicates, loads=True)
        if self._spilling:
            self.progress.after(self._spilling.settle)
        self.progress.after(self.retraction.poll)

    @property
    def beside(self) -> tuple[HasColumns, ...]:
        """What has arrays beside the tiers' own, for ranks to compare."""
        return self._tables, self._sequences

    def cut(self, row: int) -> int | None:
        """The token at which the row's chunk must end, because a snapshot is due there."""
        return self._commits.cut(self._sequences[row])

    def fits(self, starts: RowIds, ends: RowIds) -> bool:
        """Whether ``extend`` would find its pages; groups that do not keep all have booked them."""
        total = int((-(-ends // self._page) + starts // -self._page).sum())
        if self._short_of(total):
            self._spilling.settle()  # what was committed last may have been on the host before
        while short := self._short_of(total):
            if not self._spilling.make_room(short):
                break
        if short and self._spilling:
            # What waits keeps host pages without which nobody goes on.
            while self._spilling.starved and self.admission.give_up():
                pass
            self._spilling.save()
        return not short

    def _short_of(self, pages: int) -> list[GroupId]:
        return [group for group in self._kept if self._pools.available(group) < pages]

    def roomy(self) -> list[int]:
        """Rows of spilled requests for any one of which the device may have room."""
        return self._spilling.roomy()

    def would_be_resident(self, row: int, asked: AdmissionRequest) -> bool:
        """Whether the request at ``row``, retracted now, would lose nothing and come in with all of
        its pages on the device. ``asked``: what it would ask."""
        saved = self.retraction.could_save(row, self._sequences[row], asked.tokens - 1)
        return saved and self.admission.would_be_resident(row, asked)

    @property
    def stuck(self) -> bool:
        """Whether what must leave the device cannot: its copies to the host fail, again and
        again."""
        return bool(self._spilling) and self._spilling.copies_fail

    def extend(self, rows: RowIds, starts: RowIds, ends: RowIds) -> None:
        """Give every row pages for tokens [start, end), and a live page where it needs one.
        AssertionError for a start beyond what a row has: there is no hole in a request."""
        before = np.maximum(starts - 1, 0) // self._page
        for group in self._kept:
            there = self._tables.holds(group, rows, before)
            assert (there | (starts == 0)).all(), "a start beyond the pages of its request"
        self._copies.backups.begin()
        self._live.extend(rows)
        first = -(-starts // self._page)
        counts = np.maximum(-(-ends // self._page) - first, 0)
        total = int(counts.sum())
        if not total:
            return
        at_rows = np.repeat(rows, counts)
        offsets = np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        indices = np.repeat(first, counts) + offsets
        for group in self.spec.groups:
            if not group.stateful:
                pages = self._pools.take(group.id, total, self.progress.wait)
                self._tables.pages(group.id)[at_rows, indices] = pages
                self._sequences.grow(rows, group.id, counts)

    def commit(self, row: int, tokens: TokenIds) -> None:
        """``tokens`` (all computed so far) have their KV: full pages enter the tree, the lease
        moves on, and pages behind a window become anybody's; those that another engine may take of
        a whole prompt stay until ``prefilled``."""
        self._commits.commit(row, self._sequences[row], tokens)
        self._spilling.committed(row)

    def prefilled(self, row: int, tokens: int, total_tokens: int) -> None:
        """The row's prompt, of ``tokens``, is computed: from now on it takes one token a step, up
        to ``total_tokens``, and holds less than a chunk would."""
        self._commits.decodes(row, self._sequences[row], tokens)
        at_once = self._steps_at_once
        peak = demand(self.spec, total_tokens, total_tokens, at_once, 0).peak
        self._sequences.decodes(row, self._spilling.peak(row, peak, at_once))
        self._spilling.decodes(row, at_once)

    def release(self, row: int, tokens: TokenIds) -> None:
        """End a request, finished or aborted, of which ``tokens`` have their KV."""
        self.retraction.landed(row)
        self._commits.finish(row, self._sequences[row], tokens)
        self._leave(row)

    def suspect(self, row: int) -> PageKey | None:
        """What the request at ``row`` stands on and may be why it has met NaN or infinity."""
        return self.storage.distrust(self._sequences[row].lease)

    def drop(self, row: int) -> None:
        """End a request of which nothing is kept but what the tree has already."""
        self.retraction.landed(row)
        self._leave(row)

    def _leave(self, row: int) -> None:
        """Free what a request owns, and what it stands on becomes evictable."""
        sequence = self._sequences[row]
        self.storage.persister.used(sequence.lease)
        device = self._pools.tiers[Tier.DEVICE]
        for group in self.spec.groups:
            own = self._tables.pages(group.id)[row, sequence.lease.end :]
            device[group.id].free(own[own != NONE])
        for group_id, _, duplicate in sequence.duplicates:
            device[group_id].free(duplicate)
        self._live.close(row)
        self._spilling.close(row)
        self.tiers.release(sequence.lease)
        self._sequences.close(row)

    def retract(self, row: int, tokens: TokenIds) -> RetractedState:
        """Take a running request, of which ``tokens`` have their KV, off the device, and save what
        it needs to go on; of one that is apart nothing. ``Admitter.resume`` or
        ``Retraction.forget`` ends that."""
        self.retraction.landed(row)
        sequence = self._sequences[row]
        self._pools.counters.add(retracted=1)
        retracted = self.retraction.retract(row, sequence, 0 if sequence.apart else len(tokens))
        if retracted in self.retraction:
            self._leave(row)
        else:
            self.release(row, tokens)
        return retracted

    def lose(self, row: int, tokens: int) -> RetractedState:
        """Take a request off the device of which nothing came: ``tokens`` are to be computed."""
        lost = RetractedState(self._sequences[row], tokens, 0, [])
        self.drop(row)
        return lost

    def check(self) -> None:
        """Verify the tree, and that every page of every pool is accounted for exactly once."""
        self.admission.losses.check()
        self._sequences.check(self.tiers.tree.leases)
        self._spilling.check()
        self.tiers.check(self._owned)

    def _owned(self, tier: Tier, group: GroupId) -> list[PageIds]:
        """Pages that no node of the tree stands for."""
        owned = [self.retraction.owned(tier, group)]
        if tier == Tier.HOST:
            return [*owned, *self._spilling.received_pages(group)]
        if self.spec.groups[group].stateful:
            return [*owned, self._live.all_owned(group)]
        owned += self._spilling.owned(group)
        for row, sequence in self._sequences.items():
            own = self._tables.pages(group)[row, sequence.lease.end :]
            owned.append(own[own != NONE])
            owned += [pages for of, _, pages in sequence.duplicates if of == group]
        return owned

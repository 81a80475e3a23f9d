"""The cache as an engine sees it: admit, extend, commit, release; and ``tick``, the only place
where asynchronous work becomes state.

Owns the seats of admitted requests; binds tree, pools, block tables, policies and copies. Must not
run a model or read a clock. The device tier is whatever the allocators and the transfer engine say
it is: no byte passes here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stratakv.cache.copies import CopyDesk
from stratakv.cache.pools import Allocators, Pools
from stratakv.cache.records import Admission, CachedTokens, Counters, PoolStats, Refusal
from stratakv.core.ids import NONE, GroupId, PageIds, RowIds, TicketId, TokenIds
from stratakv.core.page_keys import PageHasher
from stratakv.memory.block_table import BlockTable
from stratakv.policy.admission import Demand, PageBudget, demand
from stratakv.policy.checkpoints import checkpoint_ends, last_end
from stratakv.policy.load_back import LoadBack, LoadBackPolicy
from stratakv.policy.write import NoBackup, WritePolicy, WriteThrough
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.transfer.engine import LayerGate, TransferEngine
from stratakv.transfer.plan import Direction
from stratakv.tree.check import check as check_tree
from stratakv.tree.effects import Backup
from stratakv.tree.lease import Lease
from stratakv.tree.matching import NO_MATCH, Match
from stratakv.tree.nodes import TIERS, Tier
from stratakv.tree.order import EvictionPolicy
from stratakv.tree.prefix_tree import PrefixTree

Int32s = RowIds
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """``reuse`` False computes everything and keeps nothing. ``chunk_tokens``: the most tokens of
    one request in a step."""

    chunk_tokens: int
    load_back: LoadBackPolicy
    reuse: bool = True
    eviction: EvictionPolicy | None = None


@dataclass(slots=True, eq=False)
class _Seat:
    """What an admitted request holds. ``strays``: group, page indices and pages of its own whose
    place in the tree another request's load is filling."""

    prefix: PageHasher
    lease: Lease
    demand: Demand
    continued: int
    checkpoints: list[int]
    strays: list[tuple[GroupId, Int64s, PageIds]] = field(
        default_factory=list[tuple[GroupId, Int64s, PageIds]], init=False
    )


class KVCache:
    """``tiers``: allocators of device and host pages, one per group; host pools may be empty."""

    def __init__(
        self,
        spec: CacheSpec,
        tiers: tuple[Allocators, Allocators],
        tables: BlockTable,
        transfer: TransferEngine,
        options: CacheOptions,
    ) -> None:
        device, host = tiers
        self.spec = spec
        self._options = options
        self._tables = tables
        self._page = spec.page_tokens
        capacity = device[ANCHOR].capacity + host[ANCHOR].capacity
        self._tree = PrefixTree(spec, capacity, options.eviction)
        self._pools = Pools(spec, self._tree, tables, tiers)
        has_host = host[ANCHOR].capacity > 0
        write: WritePolicy = WriteThrough() if has_host else NoBackup()
        self._copies = CopyDesk(self._tree, self._pools, transfer, write)
        self._budget = PageBudget(spec, [space.capacity for space in device])
        self._seats: dict[int, _Seat] = {}
        self._left = [np.zeros(tables.rows, np.int64) for _ in spec.groups]  # growth not yet taken

    @property
    def counters(self) -> Counters:
        return self._pools.counters

    @property
    def reuses(self) -> bool:
        return self._options.reuse

    # -- the life of a request -------------------------------------------------------------------

    def could_ever_fit(self, total_tokens: int) -> str | None:
        """None, or why a request of ``total_tokens`` could not run even alone."""
        wanted = demand(self.spec, total_tokens, self._options.chunk_tokens, 0)
        return self._budget.could_ever_fit(wanted)

    def match(self, prefix: PageHasher, prompt_tokens: int) -> Match:
        """How much of a prompt is usable; at least one token is always left to compute."""
        if not self._options.reuse:
            return NO_MATCH
        return self._tree.match(prefix.keys, last_end(prompt_tokens, self._page))

    def admit(
        self, prefix: PageHasher, prompt_tokens: int, total_tokens: int
    ) -> Admission | Refusal:
        """Lease the longest usable prefix, start its load-back if one is worth it, and book pages
        up to the request's last token. A refusal pins nothing."""
        self._copies.begin_backups()  # an aborted request has left some; admitting may evict
        found = self.match(prefix, prompt_tokens)
        row = self._tables.open_row()
        if row is None:
            return Refusal.NO_ROW
        load = self._weigh_load(found)
        if load is LoadBack.WAIT:
            self._tables.close_row(row)
            return Refusal.LOAD_BUDGET
        admission = None
        if load is LoadBack.LOAD:
            admission = self._try(row, prefix, (prompt_tokens, total_tokens), found, found.end)
            if admission is None:  # the attempt may have evicted what the first match saw
                found = self.match(prefix, prompt_tokens)
        if admission is None:
            end = found.device_end
            admission = self._try(row, prefix, (prompt_tokens, total_tokens), found, end)
        if admission is None:
            self._tables.close_row(row)
            return Refusal.NO_PAGES
        return admission

    def _weigh_load(self, found: Match) -> LoadBack:
        saved = (found.end - found.device_end) * self._page
        answer = self._options.load_back.decide(saved, self._copies.loading_pages * self._page)
        self.counters.load_declined += saved > 0 and answer is LoadBack.DECLINE
        self.counters.load_waited += answer is LoadBack.WAIT
        return answer

    def _try(
        self, row: int, prefix: PageHasher, tokens: tuple[int, int], found: Match, end: int
    ) -> Admission | None:
        """Admit at ``end``, or not at all."""
        prompt_tokens, total_tokens = tokens
        wanted = demand(self.spec, total_tokens, self._options.chunk_tokens, end)
        prices = [self._tree.price(prefix.keys, end, group.id) for group in self.spec.groups]
        host = [price.to_load for price in prices]
        available = [
            self._pools.available(group.id) - prices[group.id].to_pin - host[group.id]
            for group in self.spec.groups
        ]
        # Asked before the lease: a request that waits must not warm its prefix at every step.
        if not self._budget.fits(wanted, available):
            return None
        lease = self._tree.lease(prefix.keys, end, load=end > found.device_end)
        if lease.needs_load and not self._copies.load(lease, end - found.device_end):
            self._tree.release(lease)
            self.counters.load_no_pages += 1
            return None
        self._budget.book(wanted)
        for group in self.spec.groups:
            start = lease.starts[group.id]
            self._tables.remap(row, group.id, start, self._tree.pages(lease, group.id))
            self._left[group.id][row] = wanted.growth[group.id]
        ends = checkpoint_ends(prompt_tokens, end, found.anchor_end, self._page)
        self._seats[row] = _Seat(prefix, lease, wanted, end, list(ends))
        spans = [end - start for start in lease.starts]
        cached = CachedTokens(
            device=min(found.device_end, end) * self._page,
            host=(end - min(found.device_end, end)) * self._page,
            groups_device=tuple(
                (span - loaded) * self._page for span, loaded in zip(spans, host, strict=True)
            ),
            groups_host=tuple(loaded * self._page for loaded in host),
        )
        return Admission(row=row, cached=cached, tickets=lease.loading)

    def gate(self, tickets: Sequence[TicketId]) -> LayerGate | None:
        """What a forward over freshly admitted rows waits for, layer by layer."""
        return self._copies.gate(tickets)

    def extend(self, rows: RowIds, starts: Int32s, ends: Int32s) -> None:
        """Give every row pages for tokens [start, end); admission has promised them."""
        first = -(-starts // self._page)
        counts = -(-ends // self._page) - first
        total = int(counts.sum())
        if not total:
            return
        self._copies.begin_backups()
        at_rows = np.repeat(rows, counts)
        offsets = np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        indices = np.repeat(first, counts) + offsets
        for group in self.spec.groups:
            pages = self._pools.take(group.id, total, self.wait)
            self._tables.pages(group.id)[at_rows, indices] = pages
            self._left[group.id][rows] -= counts
            self._budget.grown(group.id, total)

    def commit(self, row: int, tokens: TokenIds) -> None:
        """``tokens`` (all computed so far) have their KV: full pages enter the tree, the lease
        moves on, and pages behind a window become anybody's."""
        seat = self._seats[row]
        end, first = len(tokens) // self._page, seat.lease.end
        if end <= first or not self._options.reuse:
            if not self._options.reuse:
                self._drop_behind(row, len(tokens))
            return
        seat.prefix.extend(tokens)
        keys = seat.prefix.keys if len(seat.prefix.keys) == end else seat.prefix.keys[:end]
        pages = [self._tables.pages(group.id)[row, first:end].copy() for group in self.spec.groups]
        backups = self._pools.execute(self._tree.insert(keys, first, pages), row)
        starts = seat.lease.starts
        self._tree.advance(seat.lease, keys, end)
        self._note_strays(row, seat, first)
        for group in self.spec.groups:
            table = self._tables.pages(group.id)
            table[row, starts[group.id] : seat.lease.starts[group.id]] = NONE
        while seat.checkpoints and seat.checkpoints[0] <= end:
            backups += self._keep(row, seat, seat.checkpoints.pop(0))
        self._copies.back_up(backups)

    def _keep(self, row: int, seat: _Seat, end: int) -> list[Backup]:
        return self._pools.execute(self._tree.keep(seat.lease, end, seat.continued), row)

    def _note_strays(self, row: int, seat: _Seat, first: int) -> None:
        """Pages in [first, lease.end) that the tree did not take: their place is being loaded."""
        if not self._tree.copies.loads:
            return
        rows = self._tree.nodes.tail(seat.lease.tip, seat.lease.end - first)
        for group in self.spec.groups:
            own = self._tables.pages(group.id)[row, first : seat.lease.end]
            canonical = self._tree.nodes.page[Tier.DEVICE][group.id][rows]
            at = np.flatnonzero((own != canonical) & (own != NONE))
            if len(at):
                seat.strays.append((group.id, first + at, own[at]))

    def _free_strays(self) -> None:
        """Where a load has ended, move the requests that computed the same pages meanwhile over to
        the loaded ones, and free theirs: admission has booked one page for a place, not two."""
        nodes = self._tree.nodes
        for row, seat in self._seats.items():
            kept: list[tuple[GroupId, Int64s, PageIds]] = []
            for group, indices, pages in seat.strays:
                rows = nodes.path(seat.lease.tip)[indices]
                if (nodes.ticket[group][rows] != NONE).any():
                    kept.append((group, indices, pages))
                    continue
                leased = indices >= seat.lease.starts[group]
                loaded = nodes.page[Tier.DEVICE][group][rows[leased]]
                self._tables.pages(group)[row, indices[leased]] = loaded
                self._pools.tiers[Tier.DEVICE][group].free(pages)
                self.counters.duplicate_pages += len(pages)
            seat.strays = kept

    def _drop_behind(self, row: int, computed: int) -> None:
        """Without reuse nothing enters the tree: pages behind a window are freed as they are."""
        starts = self._tree.starts(computed // self._page)
        for group in self.spec.groups:
            behind = self._tables.pages(group.id)[row, : starts[group.id]]
            self._pools.tiers[Tier.DEVICE][group.id].free(behind[behind != NONE])
            behind[:] = NONE

    def release(self, row: int, tokens: TokenIds) -> None:
        """End a request, finished or aborted, of which ``tokens`` have their KV."""
        self.commit(row, tokens)
        seat = self._seats.pop(row)
        end = seat.lease.end
        self._copies.back_up(self._keep(row, seat, end))
        self._copies.back_up(self._tree.unsaved(seat.lease))  # what the host had no room for then
        device = self._pools.tiers[Tier.DEVICE]
        for group in self.spec.groups:
            own = self._tables.pages(group.id)[row, end:]
            device[group.id].free(own[own != NONE])
        for stray_group, _, stray in seat.strays:
            device[stray_group].free(stray)
        self._tree.release(seat.lease)
        left = [int(column[row]) for column in self._left]
        self._budget.settle(seat.demand, left)
        self._tables.close_row(row)

    # -- time ------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Apply the copies that have ended, in submission order, then submit this step's backups
        as one plan."""
        for direction in Direction:
            loaded = self._copies.ready(direction)
            self._copies.apply(direction, loaded)
            if loaded and direction is Direction.LOAD:
                self._free_strays()
        self._copies.submit()

    @property
    def copying(self) -> bool:
        """Whether a copy is under way or waits to be submitted."""
        return self._copies.busy

    def wait(self) -> bool:
        """Block until one more copy has ended; False when none is under way."""
        waited = self._copies.wait()
        self._free_strays()
        return waited

    def settle(self) -> None:
        """Wait until no copy is under way."""
        while self.wait():
            pass

    def flush(self) -> bool:
        """Drop everything cached; False, and nothing done, while a request runs."""
        if self._seats:
            return False
        self.settle()
        for tier in reversed(TIERS):
            self._pools.execute(self._tree.evict(tier, ANCHOR, len(self._tree.nodes)), -1)
        assert not len(self._tree.nodes), "a flush left pages behind"
        return True

    # -- what is where ---------------------------------------------------------------------------

    def stats(self) -> tuple[PoolStats, ...]:
        return self._pools.stats()

    def check(self) -> None:
        """Verify the tree, and that every page of every pool is accounted for exactly once."""
        check_tree(self._tree)
        rows = self._tree.nodes.rows()
        for tier in TIERS:
            for group in self.spec.groups:
                held = self._tree.nodes.page[tier][group.id][rows]
                owned = [held[held != NONE]]
                if tier == Tier.DEVICE:
                    owned += self._owned_by_requests(group.id)
                pages = np.concatenate(owned)
                space = self._pools.tiers[tier][group.id]
                used = space.capacity - space.available()
                name = f"{tier.name} pages of group {group.name}"
                assert len(np.unique(pages)) == len(pages), f"{name}: one has two owners"
                assert len(pages) == used, f"{name}: {used} taken, {len(pages)} accounted for"

    def _owned_by_requests(self, group: GroupId) -> list[PageIds]:
        owned: list[PageIds] = []
        for row, seat in self._seats.items():
            own = self._tables.pages(group)[row, seat.lease.end :]
            owned.append(own[own != NONE])
            owned += [pages for of, _, pages in seat.strays if of == group]
        return owned

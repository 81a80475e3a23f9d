"""What a running request hands to the tree: full pages, snapshots, checkpoints.

Owns the order in which that happens, and the pages that the tree could not take yet; of a request
that is apart, that nothing happens before its end. Must not take or free a page of a request for
any other reason.

A row of the block table, for one group, when ``end`` pages have their KV and ``first`` had before::

    page      0           starts[g]            first                end
              |               |                  |                   |
    table     |  NONE         |  the tree's      |  the request's    |  its own:    |  its own:
              |  (behind a    |  pages, leased   |  own, all full    |  half full   |  empty
              |  window)      |                  |                   |              |
    commit    |               |  what no rule    |  INSERT           |  nothing: live pages never
              |               |  needs at end is |                   |  enter the tree before they
              |               |  let go: NONE    |                   |  are full
                                                 |
                        new to the tree: adopted, the table stays as it is
                        there already:   Remap to the tree's page, ours is freed
                        being loaded:    stays ours, a duplicate, until the load ends

    lease     |               [ starts[g], first )  -->  advance  -->  [ starts'[g], end )
    state     |  not in the table; its live page is given at ``end`` where a snapshot is due, and
              |  the next step reads it there and writes to a fresh one (``live``)
    marks     |  checkpoints and milestones up to ``end`` are kept: what they need is backed up

The order is that of ``_hand_over``: keys, state, insert and remap, lease, table, marks. A request
that is apart goes through ``_drop_behind`` alone until it ends: its lease stays at ``first``, and
what it computes its own. ``finish`` is the last hand-over, and makes the end a checkpoint.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from stratakv.cache.footprint import taken_spans
from stratakv.cache.live import Given, LivePages
from stratakv.cache.sequence_states import Int64s, SequenceState, SequenceStates
from stratakv.core.ids import NONE, GroupId, PageIds, TokenIds
from stratakv.memory.block_table import BlockTable
from stratakv.policy.checkpoints import CheckpointPolicy
from stratakv.tiers.tiered_cache import TieredCache
from stratakv.tree.effects import Backup
from stratakv.tree.nodes import Tier
from stratakv.tree.observer import CacheObserver


class Committer:
    def __init__(
        self,
        tiers: TieredCache,
        tables: BlockTable,
        live: LivePages,
        checkpoints: CheckpointPolicy,
        observer: CacheObserver | None,
    ) -> None:
        spec = tiers.spec
        self._spec = spec
        self._page = spec.page_tokens
        self._tiers = tiers
        self._tree, self._pools = tiers.tree, tiers.pools
        self._leases, self._marks = tiers.tree.leases, tiers.tree.checkpoints
        self._backups, self._moves = tiers.tree.backups, tiers.tree.copies
        self._to_save = tiers.copies.backups
        self._tables = tables
        self._checkpoints = checkpoints
        self._partial = any(not group.keeps_all for group in spec.groups)
        self._states = any(group.stateful and not group.scratch for group in spec.groups)
        self._live = live
        self._observer = observer

    def cut(self, sequence: SequenceState) -> int | None:
        """The token at which a chunk must end, because a snapshot is due there."""
        if not self._live.groups:
            return None
        due = sequence.checkpoints[:1] + (sequence.milestones[:1] if self._states else [])
        return min(due) * self._page if due else None

    def commit(self, row: int, sequence: SequenceState, tokens: TokenIds) -> None:
        """``tokens`` (all computed so far) have their KV: full pages enter the tree, the lease
        moves on, and pages behind a window become anybody's; at the end of its prompt, which may be
        handed over, not those that another engine may take, until ``decodes``."""
        starts = self._taken_starts(len(tokens)) if len(tokens) == sequence.prompt else None
        if sequence.apart:
            self._drop_behind(row, sequence, len(tokens) // self._page, starts)
        else:
            self._hand_over(row, sequence, tokens, last=False, starts=starts)

    def receive(self, row: int, sequence: SequenceState, tokens: TokenIds) -> None:
        """Another engine has computed ``tokens``, and of what it has sent the same is true. Of a
        group that does not keep all there is what the request needs, and no page before."""
        if sequence.apart:
            self._drop_behind(row, sequence, len(tokens) // self._page)
        else:
            self._hand_over(row, sequence, tokens, last=False, received=True)

    def decodes(self, row: int, sequence: SequenceState, tokens: int) -> None:
        """Its prompt, of ``tokens``, goes nowhere else: what is behind a window is anybody's."""
        if sequence.apart:
            self._drop_behind(row, sequence, tokens // self._page)
            return
        before, lease = sequence.lease.starts, sequence.lease
        self._leases.let_go(lease, self._tree.starts(lease.end))
        self._forget(row, before, lease.starts)

    def _taken_starts(self, tokens: int) -> list[int]:
        """First page of each group that a request keeps whose prompt of ``tokens`` another engine
        may take."""
        starts = self._tree.starts(tokens // self._page)
        return [
            start if group.stateful else min(start, span.start)
            for group, start, span in zip(
                self._spec.groups, starts, taken_spans(self._spec, tokens), strict=True
            )
        ]

    def gives_state(self, sequence: SequenceState, tokens: int) -> bool:
        """Whether a commit of ``tokens`` gives the request's state to the tree, so that its next
        step goes on from another page."""
        whole = self._states and not sequence.apart and tokens % self._page == 0
        return whole and self._due(sequence, tokens // self._page)

    def _drop_behind(
        self, row: int, sequence: SequenceState, end: int, starts: list[int] | None = None
    ) -> None:
        """Of what a request that is apart needs no more at ``end`` pages, its own pages are free,
        and those that it has read are anybody's. ``starts``: the first pages that it keeps, if not
        the usual ones."""
        starts, own = starts or self._tree.starts(end), sequence.lease.end
        for group in self._spec.groups:
            pages = self._tables.pages(group.id)[row, : starts[group.id]]
            behind = pages[own:]
            self._pools.tiers[Tier.DEVICE][group.id].free(behind[behind != NONE])
            pages[:] = NONE
        self._leases.let_go(sequence.lease, starts)

    def _hand_over(
        self,
        row: int,
        sequence: SequenceState,
        tokens: TokenIds,
        *,
        last: bool,
        received: bool = False,
        starts: list[int] | None = None,
    ) -> None:
        """``last``: the request ends here. ``received``: what is new of it may be on the host.
        ``starts``: first page of each group that the lease is to hold, if not the usual ones."""
        end, first = len(tokens) // self._page, sequence.lease.end
        grown = end > first
        if not grown and not last:
            return
        sequence.prefix.extend(tokens)
        keys = (
            sequence.prefix.keys if len(sequence.prefix.keys) == end else sequence.prefix.keys[:end]
        )
        given: Given = {}
        if end and len(tokens) == end * self._page and (last or self._due(sequence, end)):
            spare = not last and self._is_milestone(sequence, end)
            given = self._live.give(row, sequence.lease, keys[-1], end, last=last, spare=spare)
        if grown and self._observer is not None:
            self._observer.inserted(sequence.prefix.namespace, keys, first, tokens)
        if grown or given:
            start = first if grown else end - 1
            pages = list(self._pages(row, start, end, given))
            for remap in self._tiers.insert(keys, start, pages):
                self._tables.pages(remap.group)[row, remap.indices] = remap.canonical
            if received and self._tables.spilled:
                self._tiers.receive(keys, start, self._on_host(row, start, end))
            self._live.gave(row, given)
            if grown:
                self._move_on(row, sequence, first, end, starts, received=received)
                if first == sequence.continued:  # while what it continued is sure to be there
                    effects = self._marks.branch(sequence.lease, first)
                    self._to_save.want(self._pools.execute(effects))
        self._keep_due(sequence, end, given)

    def _due(self, sequence: SequenceState, end: int) -> bool:
        if sequence.checkpoints:
            return end in sequence.checkpoints or end in sequence.milestones
        return end % self._checkpoints.snapshot_pages == 0

    def _is_milestone(self, sequence: SequenceState, end: int) -> bool:
        return end in sequence.milestones and end not in sequence.checkpoints

    def _pages(self, row: int, start: int, end: int, given: Given) -> Iterator[PageIds]:
        """What a request has in page indices [start, end), by group."""
        for group in self._spec.groups:
            pages = self._tables.pages(group.id)[row, start:end].copy()
            if group.id in given:
                pages[-1] = given[group.id]
            yield pages

    def _on_host(self, row: int, start: int, end: int) -> list[PageIds]:
        """What another engine has filled of host pages for page indices [start, end), by group;
        NONE where it has filled none."""
        none, spilled = np.full(end - start, NONE, np.int32), self._tables.spilled
        return [
            spilled[group.id].host[row, start:end].copy() if group.id in spilled else none
            for group in self._spec.groups
        ]

    def _move_on(
        self,
        row: int,
        sequence: SequenceState,
        first: int,
        end: int,
        starts: list[int] | None,
        *,
        received: bool,
    ) -> None:
        before = sequence.lease.starts
        keys = sequence.prefix.keys[:end]
        self._leases.advance(sequence.lease, keys, end, starts, received=received)
        self._note_duplicates(row, sequence, first)
        self._forget(row, before, sequence.lease.starts)

    def _forget(self, row: int, before: Sequence[int], starts: Sequence[int]) -> None:
        """The row's table has no pages of what its lease held from ``before`` to ``starts``."""
        for group in self._spec.groups:
            self._tables.pages(group.id)[row, before[group.id] : starts[group.id]] = NONE

    def _keep_due(self, sequence: SequenceState, end: int, given: Given) -> None:
        if not self._partial:
            return
        if not sequence.checkpoints:
            if given if self._states else not end % self._checkpoints.snapshot_pages:
                # A host copy is made when the request ends: the next one takes the place of most.
                self._keep(sequence, end, sequence.rolling)
                sequence.roll(end)
                self._thin(sequence, end)
            return
        while sequence.milestones and sequence.milestones[0] <= end:
            effects = self._marks.pave(sequence.lease, sequence.milestones.pop(0))
            self._to_save.want(self._pools.execute(effects))
        while sequence.checkpoints and sequence.checkpoints[0] <= end:
            last = sequence.checkpoints.pop(0)
            self._to_save.want(self._keep(sequence, last))
            if not sequence.checkpoints:
                self._thin(sequence, last)

    def _thin(self, sequence: SequenceState, last: int) -> None:
        """The prefix has grown to ``last``: fewer milestones serve it as well."""
        there = self._marks.milestones(sequence.lease)
        self._marks.clear(sequence.lease, self._checkpoints.superfluous(there, last))

    def _keep(self, sequence: SequenceState, end: int, instead_of: int = 0) -> list[Backup]:
        effects = self._marks.keep(sequence.lease, end, sequence.continued, instead_of)
        return self._pools.execute(effects)

    def finish(self, row: int, sequence: SequenceState, tokens: TokenIds) -> None:
        """The request ends after ``tokens``: what it leaves behind is its last checkpoint. One that
        was apart has read none of the pages that the tree may have had already, nor will it."""
        if not sequence.stores:
            return
        self._hand_over(row, sequence, tokens, last=True)
        end, rolling = sequence.lease.end, sequence.rolling
        self._to_save.want(self._keep(sequence, end, rolling if rolling < end else 0))
        if self._marks.at(sequence.lease, rolling):
            self._to_save.want(self._keep(sequence, rolling))
        if self._partial and end:
            self._thin(sequence, end)
            self._to_save.want(self._backups.marked(sequence.lease))
        # What the host had no room for then.
        self._to_save.want(self._backups.whole(sequence.lease))

    # -- duplicates -------------------------------------------------------------------------------

    def _note_duplicates(self, row: int, sequence: SequenceState, first: int) -> None:
        """Pages in [first, lease.end) that the tree did not take: their place is being loaded."""
        if not self._moves.loads:
            return
        indices = np.arange(first, sequence.lease.end)
        for group in self._spec.groups:
            own = self._tables.pages(group.id)[row, first : sequence.lease.end]
            canonical = self._leases.pages_at(sequence.lease, group.id, indices)
            at = np.flatnonzero((own != canonical) & (own != NONE))
            if len(at):
                sequence.duplicates.append((group.id, first + at, own[at]))

    def free_duplicates(self, sequences: SequenceStates) -> None:
        """Where a load has ended, move the requests that computed the same pages meanwhile over to
        the loaded ones, and free theirs: admission has booked one page for a place, not two."""
        for row, sequence in sequences.items():
            kept: list[tuple[GroupId, Int64s, PageIds]] = []
            for group, indices, pages in sequence.duplicates:
                if self._moves.landing(sequence.lease, group, indices):
                    kept.append((group, indices, pages))
                    continue
                leased = indices >= sequence.lease.starts[group]
                loaded = self._leases.pages_at(sequence.lease, group, indices[leased])
                self._tables.pages(group)[row, indices[leased]] = loaded
                self._pools.tiers[Tier.DEVICE][group].free(pages)
                self._pools.counters.add(duplicate_pages=len(pages))
            sequence.duplicates[:] = kept

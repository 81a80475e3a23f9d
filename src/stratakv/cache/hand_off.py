"""Requests that begin on one engine and go on in another: pages for what comes, and of what goes.

Owns the taking of pages that another engine fills, what is ``needed`` at the end of the prompt and
what the same prompt can hit, and nothing that is here already. Must not move bytes, nor know how
they travel (``engine.roles``).
"""

import numpy as np
import numpy.typing as npt

from stratakv.cache.commits import Committer
from stratakv.cache.footprint import Footprints, TransferPages, taken_spans
from stratakv.cache.live import LivePages
from stratakv.cache.sequence_states import SequenceStates
from stratakv.cache.spilling import Spilling
from stratakv.core.ids import RowIds, TokenIds
from stratakv.memory.block_table import BlockTable
from stratakv.tiers.tiered_cache import TieredCache


class HandOff:
    def __init__(
        self,
        tiers: TieredCache,
        tables: BlockTable,
        sequences: SequenceStates,
        live: LivePages,
        commits: Committer,
        spilling: Spilling,
    ) -> None:
        self._spec = tiers.spec
        self._pools = tiers.pools
        self._tables = tables
        self._sequences = sequences
        self._live = live
        self._commits = commits
        self._spilling = spilling
        self._wait = tiers.progress.wait
        self._flights = tiers.copies.flights
        self._footprints = Footprints(tiers.spec, tables, live)

    def reserve(self, row: int, tokens: int) -> TransferPages:
        """Take pages for what the request at ``row``, just admitted to ``receive``, is to have
        after ``tokens`` and does not stand on; cannot fail, admission has booked them. Of what it
        reads on the host the full ones are there. They are the row's own until ``received``, or
        until it is dropped."""
        held, stored = self._sequences[row].lease.end, self._sequences[row].stores
        rows = np.array([row], np.int32)
        whole = tokens // self._spec.page_tokens
        spilled = self._tables.spilled if row in self._spilling else ()
        spans = taken_spans(self._spec, tokens, stored=stored)
        for group, span in zip(self._spec.groups, spans, strict=True):
            first = max(span.start, min(held, span.stop))
            if group.id in spilled:
                first = self._spilling.reserve(row, group.id, first, whole)
            count = min(len(span), 1) if group.stateful else span.stop - first
            if not count:
                continue
            pages = self._pools.take(group.id, count, self._wait)
            if group.stateful:
                self._live.receive(row, group.id, pages.item())
            else:
                self._tables.remap(row, group.id, first, pages)
                self._sequences.grow(rows, group.id, np.array([count]))
        self._flights.wait_for_device()  # a launched step may still read what was just freed
        return self._footprints.transfer_pages(row, tokens, held, stored=stored)

    def received(self, row: int, tokens: TokenIds) -> None:
        """What was reserved holds the KV of ``tokens``: full pages enter the tree."""
        self._commits.receive(row, self._sequences[row], tokens)
        self._spilling.received(row)

    def is_loading(self, row: int) -> bool:
        """Whether the request has pages of its own for places that are just being loaded: they go
        when the loads have ended."""
        return bool(self._sequences[row].duplicates)

    def part(self, row: int, tokens: int, total: int) -> TransferPages:
        """Of what another engine may take of the request at ``row``, of ``total`` tokens, the
        pages that are full by now, ``tokens`` having their KV. They stay there while the row is
        open."""
        assert not self.is_loading(row), "pages that are about to go"
        return self._footprints.full_pages(row, tokens, total)

    def pages(self, row: int, tokens: int) -> TransferPages:
        """Where all that lies which another engine may take of the request at ``row``, whose prompt
        of ``tokens`` has its KV. It stays there while the row is open and computes nothing."""
        while self.is_loading(row):
            assert self._wait(), "a page has two places, and nothing is under way"
        return self._footprints.transfer_pages(row, tokens)

    def gives_state(self, rows: RowIds, tokens: RowIds) -> npt.NDArray[np.bool_]:
        """Whether the requests at ``rows`` give their states to the tree when they commit
        ``tokens``, so that their next steps go on from another page; bool [n]."""
        found = np.zeros(len(rows), np.bool_)
        if self._live.groups:
            whole = np.flatnonzero(tokens % self._spec.page_tokens == 0)
            for at in whole.tolist():  # few: each comes to the end of a page now and then
                sequence = self._sequences[rows.item(at)]
                found[at] = self._commits.gives_state(sequence, tokens.item(at))
        return found

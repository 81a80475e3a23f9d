"""Which pages and which live pages a request needs at a token: ``needed``, for a row.

Owns the answer, and its three readers' records: retraction saves it, an engine that computes a
prompt for another one sends it, the other one takes pages for it. Read-only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stratakv.cache.live import LivePages
from stratakv.cache.sequence_states import SequenceState
from stratakv.core.ids import NONE, GroupId, PageIds
from stratakv.memory.block_table import BlockTable
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.spec.retention import handed_over, needed
from stratakv.tree.nodes import Tier


@dataclass(frozen=True, slots=True)
class LivePage:
    """A page that is a request's own: the partly filled page at ``index``, or, where ``index`` is
    NONE, its state. Its bytes move between a ``device`` and a ``host`` page, NONE where it has
    none."""

    group: GroupId
    index: int
    device: int
    host: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """To go on after ``tokens`` a request needs pages [starts[g], end) of every group, which its
    lease pins in the tree, and the ``live`` pages."""

    tokens: int
    end: int
    starts: list[int]
    live: list[LivePage]


@dataclass(frozen=True, slots=True, eq=False)
class GroupPages:
    """``pages`` (int32 [n]) of a group on a ``tier`` for page indices [first, first + n), live
    pages among them; a state is one page, and ``first`` is NONE."""

    group: GroupId
    first: int
    pages: PageIds
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, eq=False)
class TransferPages:
    """Where what a request needs to go on after ``tokens`` lies, or is to lie: one entry of every
    group, in order. Of a group that the request reads on the host there is one more before it, of
    the full pages that lie there; it goes on where that one ends."""

    tokens: int
    groups: tuple[GroupPages, ...]

    @property
    def count(self) -> int:
        """Pages, of all groups."""
        return sum(len(group.pages) for group in self.groups)

    def part(self, starts: Sequence[int], source: "TransferPages") -> "TransferPages":
        """Of these pages those that ``source`` has, but for the ones before page index
        ``starts[g]`` of each group. ``source`` has one entry of each."""
        groups: list[GroupPages] = []
        for mine in self.groups:
            theirs, start = source.groups[mine.group], starts[mine.group]
            if mine.first == NONE:
                groups.append(replace(mine, pages=mine.pages[: len(theirs.pages)]))
                continue
            first = max(mine.first, theirs.first, start)
            stop = max(first, theirs.first + len(theirs.pages))
            pages = mine.pages[first - mine.first : stop - mine.first]
            groups.append(replace(mine, first=first, pages=pages))
        return TransferPages(self.tokens, tuple(groups))

    def reached(self, starts: Sequence[int]) -> list[int]:
        """Of each group the page index behind its last page here, or ``starts[g]`` if that is
        more."""
        ends = (group.first + len(group.pages) for group in self.groups)
        return list(map(max, starts, ends))

    def paired(self, target: "TransferPages") -> Iterator[tuple[GroupPages, GroupPages]]:
        """Pages here, of which there is one entry of each group, and those of ``target`` that they
        are to be copied to: by page index, whatever else lies here. AssertionError where ``target``
        wants what is not here."""
        assert self.tokens == target.tokens, f"{self.tokens} tokens for {target.tokens}"
        wanted = dict.fromkeys(there.group for there in target.groups)
        assert list(wanted) == [here.group for here in self.groups], "groups in another order"
        for there in target.groups:
            here = self.groups[there.group]
            if not len(there.pages):
                continue
            assert (here.first == NONE) == (there.first == NONE), "a state for pages of tokens"
            at = there.first - here.first
            found = here.pages[at : at + len(there.pages)]
            assert at >= 0, f"group {here.group}: pages from {there.first} on, not {here.first}"
            assert len(found) == len(there.pages), f"group {here.group}: too few pages"
            yield GroupPages(here.group, there.first, found, here.tier), there


def taken_spans(spec: CacheSpec, tokens: int, *, stored: bool = True) -> list[range]:
    """Page indices, by group, that are taken of a prompt of ``tokens`` that another engine
    computes. ``stored``: they stay for those who come after."""
    rule = handed_over if stored else needed
    return [rule(group.retention, tokens, spec.page_tokens) for group in spec.groups]


class Footprints:
    def __init__(self, spec: CacheSpec, tables: BlockTable, live: LivePages) -> None:
        self._spec = spec
        self._tables = tables
        self._live = live

    def of(self, row: int, sequence: SequenceState, tokens: int) -> Footprint:
        """Of the request at ``row``, of which ``tokens`` have their KV."""
        end, own = sequence.lease.end, self._own(row, tokens)
        stateful = {live.group for live in own if live.index == NONE}
        starts = [
            end if group.id in stateful else min(end, self._kept(group, tokens, sequence).start)
            for group in self._spec.groups
        ]
        for group in self._live.groups:  # no live page: its state is the snapshot it stands on
            if group not in stateful:
                starts[group] = sequence.lease.starts[group]
        return Footprint(tokens, end, starts, own)

    def _kept(self, group: CacheGroup, tokens: int, sequence: SequenceState) -> range:
        """Page indices of a group that a request needs after ``tokens``; before its prompt's end
        also what another engine may take there."""
        span = needed(group.retention, tokens, self._spec.page_tokens)
        if group.stateful or tokens >= sequence.prompt:
            return span
        taken = handed_over(group.retention, tokens + 1, self._spec.page_tokens)
        return range(min(span.start, taken.start), span.stop)

    def _own(self, row: int, tokens: int) -> list[LivePage]:
        """Live pages that have bytes of the first ``tokens`` tokens."""
        index, part = divmod(tokens, self._spec.page_tokens)
        own: list[LivePage] = []
        for group in self._spec.groups:
            if group.stateful:
                page, at = self._live.owned(row, group.id), NONE
            else:
                page, at = self._tables.pages(group.id).item(row, index) if part else NONE, index
            if page != NONE and needed(group.retention, tokens, self._spec.page_tokens):
                own.append(LivePage(group.id, at, page, NONE))
        return own

    def assert_restored(self, row: int, saved: Footprint, sequence: SequenceState) -> None:
        """AssertionError unless the request at ``row``, just seated again, has exactly what was
        saved of it, and that is all it needs: a page more would hold anything, one less was lost.
        """
        for group in self._spec.groups:
            span = self._kept(group, saved.tokens, sequence)
            if group.stateful:
                there = not span or self._live.current(row, group.id) != NONE
                assert there, f"the state of group {group.name} was not restored"
                continue
            live = [page.index for page in saved.live if page.group == group.id]
            kept = [*range(saved.starts[group.id], saved.end), *live]
            here = self._tables.pages(group.id)[row] != NONE
            if (spilled := self._tables.spilled.get(group.id)) is not None:
                here |= spilled.host[row] != NONE
            mapped = np.flatnonzero(here)
            assert np.array_equal(mapped, kept), f"group {group.name} maps what was not saved"
            assert kept == list(span), f"group {group.name} was not saved as it is needed"

    def transfer_pages(
        self, row: int, tokens: int, held: int = 0, *, stored: bool = True
    ) -> TransferPages:
        """``taken_spans`` of the request at ``row``, but for the first ``held`` pages of every
        prefix; AssertionError where it has no page for some of it."""
        found: list[GroupPages] = []
        spans = taken_spans(self._spec, tokens, stored=stored)
        for group, span in zip(self._spec.groups, spans, strict=True):
            if group.stateful:
                found.append(self._state(row, group, tokens))
            else:
                found += self._tokens(row, group, span, held, tokens)
        return TransferPages(tokens, tuple(found))

    def full_pages(self, row: int, tokens: int, total: int) -> TransferPages:
        """``taken_spans`` of the request at ``row`` after ``total``, but for pages that are not
        full after ``tokens``, and states. AssertionError where it has no page for some of it."""
        end = tokens // self._spec.page_tokens
        found: list[GroupPages] = []
        for group, span in zip(self._spec.groups, taken_spans(self._spec, total), strict=True):
            if group.stateful:
                found.append(GroupPages(group.id, NONE, np.empty(0, np.int32)))
            else:
                found += self._tokens(row, group, span, 0, end)
        return TransferPages(total, tuple(found))

    def _state(self, row: int, group: CacheGroup, tokens: int) -> GroupPages:
        span = needed(group.retention, tokens, self._spec.page_tokens)
        found = [self._live.current(row, group.id)] if span else []
        return self._there(GroupPages(group.id, NONE, np.array(found, np.int32)), group)

    def _tokens(
        self, row: int, group: CacheGroup, span: range, first: int, end: int
    ) -> Iterator[GroupPages]:
        """Of ``span`` those with indices in [first, end)."""
        first = max(span.start, min(first, span.stop))
        stop = max(first, min(span.stop, end))
        spilled = self._tables.spilled.get(group.id)
        if spilled is not None and row in spilled:
            host = spilled.host[row, first:stop]
            away = host[: np.count_nonzero(host != NONE)].copy()
            yield self._there(GroupPages(group.id, first, away, Tier.HOST), group)
            first += len(away)
        pages = self._tables.pages(group.id)[row, first:stop].copy()
        yield self._there(GroupPages(group.id, first, pages), group)

    def _there(self, found: GroupPages, group: CacheGroup) -> GroupPages:
        there = (found.pages != NONE).all()
        assert there, f"group {group.name} lacks a page that is to be handed over"
        return found

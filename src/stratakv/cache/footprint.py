"""Which pages and which live pages a request needs at a token: ``needed``, for a row.

Owns the answer. Retraction saves it; whoever sends a request elsewhere sends it. Read-only.
"""

from dataclasses import dataclass

from stratakv.cache.live import LivePages
from stratakv.cache.sequence_states import SequenceState
from stratakv.core.ids import NONE, GroupId
from stratakv.memory.block_table import BlockTable
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import needed


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


class Footprints:
    def __init__(self, spec: CacheSpec, tables: BlockTable, live: LivePages) -> None:
        self._spec = spec
        self._tables = tables
        self._live = live

    def of(self, row: int, sequence: SequenceState, tokens: int) -> Footprint:
        """Of the request at ``row``, of which ``tokens`` have their KV."""
        page, end = self._spec.page_tokens, sequence.lease.end
        own = self._own(row, tokens)
        stateful = {live.group for live in own if live.index == NONE}
        starts = [
            end if group.id in stateful else min(end, needed(group.retention, tokens, page).start)
            for group in self._spec.groups
        ]
        for group in self._live.groups:  # no live page: its state is the snapshot it stands on
            if group not in stateful:
                starts[group] = sequence.lease.starts[group]
        return Footprint(tokens, end, starts, own)

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

"""A model that computes nothing: it keeps token ids where keys and values would lie, and reads them
back as attention would.

Owns the closed form of what it generates. The next token is a function of the whole prefix as the
anchor's pages hold it; AssertionError where another group's pages disagree with them. Must not know
who asks.
"""

from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import NONE, GroupId, LayerId, TokenIds
from stratakv.engine.batch import StepBatch
from stratakv.engine.forward import Forward
from stratakv.memory.block_table import BlockTable
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.spec.retention import needed
from stratakv.testing.fleet.spilled_rows import SpilledReads

VOCABULARY: Final = 97
_WEIGHTS: Final = np.arange(1, 4097, dtype=np.int64) * 31 % 89 + 1
_ADAPTED: Final = VOCABULARY + 1
_HEAD: Final = 4096
Numbers = npt.NDArray[np.int32] | npt.NDArray[np.int64] | npt.NDArray[np.float32]


def next_token(tokens: Numbers, start: int = 0) -> int:
    """What is generated after ``tokens``: depends on every one and on its place. A sum over the
    tokens: of those from ``start`` on it is their share."""
    weights = _WEIGHTS[start : start + len(tokens)]
    return int(tokens.astype(np.int64) @ weights) % VOCABULARY


def as_kept(tokens: Numbers, adapter: int) -> Numbers:
    """What stands for tokens under adapter number ``adapter``, or NONE: keys and values, too, are
    others under another one."""
    return tokens + _ADAPTED * (adapter + 1)


def by_head(kept: Numbers, first: int, count: int) -> npt.NDArray[np.float32]:
    """What heads [first, first + count) keep of tokens: float32 [len(kept), count]."""
    return kept.astype(np.float32)[:, None] + _heads(first, count)


def state_after(kept: Numbers) -> list[float]:
    """How many tokens a state has seen, and a digest of them."""
    return [float(len(kept)), float(next_token(kept))]


def expected_tokens(prompt: TokenIds | Sequence[int], count: int, adapter: int = NONE) -> list[int]:
    kept = as_kept(np.asarray(prompt), adapter)
    chosen: list[int] = []
    total, shift = next_token(kept), _ADAPTED * (adapter + 1)
    for place in range(len(kept), len(kept) + count):
        chosen.append(total)
        total = (total + (total + shift) * _WEIGHTS.item(place)) % VOCABULARY
    return chosen


def _heads(first: int, count: int) -> npt.NDArray[np.float32]:
    return np.arange(first, first + count, dtype=np.float32) * _HEAD


class TokenRunner:
    """``pages``: float32 [pages, rows_per_page, row] of each group, a row being the heads that this
    rank has. ``first_heads``: which is the first of them, by group. ``host``: the same of host
    pages, where requests read some there. ``chosen``: of each step, what
    this rank would have chosen; all take rank 0's."""

    def __init__(
        self,
        spec: CacheSpec,
        pages: Sequence[npt.NDArray[np.float32]],
        tables: BlockTable,
        first_heads: Sequence[int] | None = None,
        host: Sequence[npt.NDArray[np.float32]] = (),
    ) -> None:
        self._page = spec.page_tokens
        self._tables = tables
        self._groups = [group for group in spec.groups if group.buffers]
        self._pages = pages
        first = first_heads or [0] * len(pages)
        self._heads = [_heads(at, of.shape[-1]) for at, of in zip(first, pages, strict=True)]
        self._anchor = bool(spec.groups[0].buffers)
        self.spilled = SpilledReads(tables, pages, host, self._page)
        self.chosen: list[int] = []

    def show(self, chosen: list[int]) -> None:
        """What it has chosen is that."""
        self.chosen = chosen

    def frozen(self) -> "TokenRunner":
        """The same, with its tables as they are now."""
        made = copy(self)
        made._tables = deepcopy(self._tables)  # noqa: SLF001 - its own class
        return made

    def forward(self, batch: StepBatch) -> Forward:
        if (gate := batch.gate) is not None:
            for group in self._groups:
                gate.wait(LayerId(group.id))
        self.chosen = []
        at = 0
        adapters = [NONE] * len(batch.rows) if batch.adapters is None else batch.adapters.tolist()
        for row, start, count, sampled, adapter in zip(
            batch.rows.tolist(),
            batch.starts.tolist(),
            batch.counts.tolist(),
            batch.sampled.tolist(),
            adapters,
            strict=True,
        ):
            kept = as_kept(batch.tokens[at : at + count], adapter)
            at += count
            go_on = self._continue if self._anchor else self._continue_states
            answer = go_on(row, start, kept)
            if sampled:
                self.chosen.append(answer)
        logits = torch.zeros((len(self.chosen), VOCABULARY))
        logits[range(len(self.chosen)), self.chosen] = 1.0
        return Forward.of_numbers(logits, batch)

    # -- rows per token --------------------------------------------------------------------------

    def _continue(self, row: int, start: int, kept: Numbers) -> int:
        end, prefix = start + len(kept), np.empty(0, np.float32)
        for group in self._groups:
            if group.stateful:
                self._advance(row, group, prefix, start)
                continue
            self._write(row, group.id, start, kept)
            first = needed(group.retention, start, self._page).start * self._page
            seen = self._rows(row, group.id, first, end)
            if group.id == 0:
                prefix = seen
                continue
            assert (seen == prefix[first:]).all(), f"group {group.name} holds another prefix"
        return next_token(prefix)

    def _ids(self, row: int, group: GroupId, first: int, stop: int) -> npt.NDArray[np.int32]:
        pages = self._tables.pages(group)[row, first:stop]
        assert pages.min(initial=0) >= 0, f"row {row} lacks pages of group {group}"
        return pages

    def _write(self, row: int, group: GroupId, start: int, kept: Numbers) -> None:
        places = np.arange(start, start + len(kept))
        index, offset = np.divmod(places, self._page)
        pages = self._ids(row, group, index.item(0), index.item(-1) + 1)
        rows = kept.astype(np.float32)[:, None] + self._heads[group]
        self._pages[group][pages[index - index.item(0)], offset] = rows

    def _rows(self, row: int, group: GroupId, first: int, end: int) -> npt.NDArray[np.float32]:
        """Tokens [first, end) as every head has them; ``first`` is at a page."""
        heads = self._heads[group]
        pages = self._read(row, group, first // self._page, -(-end // self._page))
        seen = pages.reshape(-1, len(heads))[: end - first] - heads
        assert not np.isnan(seen).any(), f"row {row} reads pages nobody owns"
        if len(heads) > 1:
            assert (seen == seen[:, :1]).all(), f"heads of group {group} hold different prefixes"
        return seen[:, 0]

    def _read(self, row: int, group: GroupId, first: int, stop: int) -> npt.NDArray[np.float32]:
        """Pages [first, stop) of a request, from wherever they are."""
        spilled = self._tables.spilled.get(group)
        if spilled is None or row not in spilled:
            return self._pages[group][self._ids(row, group, first, stop)]
        ids = self._tables.pages(group)[row, first:stop]
        here = ids >= 0
        found = np.full((len(ids), *self._pages[group].shape[1:]), np.nan, np.float32)
        found[here] = self._pages[group][ids[here]]
        away = self.spilled.fill(group, spilled, row, first, found)
        assert away + np.count_nonzero(here) == len(ids), f"row {row} has a page in two places"
        return found

    # -- states ----------------------------------------------------------------------------------

    def _advance(self, row: int, group: CacheGroup, prefix: Numbers, start: int) -> None:
        """Check the state before ``start`` and write the one after ``prefix``."""
        found, before = self._state(row, group), self._state_of(group, prefix[:start])
        assert found == before, f"group {group.name}: state {found} at {start}, not {before}"
        self._keep(row, group, self._state_of(group, prefix))

    def _state_of(self, group: CacheGroup, tokens: Numbers) -> list[float]:
        """How many tokens a state has seen, and a digest of them; a scratch is empty at every page
        boundary."""
        if group.scratch:
            tokens = tokens[len(tokens) // self._page * self._page :]
        return state_after(tokens)

    def _state(self, row: int, group: CacheGroup) -> list[float]:
        source = self._tables.slots.source(group.id).item(row)
        return [0.0, 0.0] if source < 0 else self._pages[group.id][source, 0].tolist()

    def _keep(self, row: int, group: CacheGroup, state: list[float]) -> None:
        own = self._tables.slots.own(group.id).item(row)
        assert own >= 0, "nowhere to write the state"
        self._pages[group.id][own, 0] = state

    def _continue_states(self, row: int, start: int, kept: Numbers) -> int:
        """For an anchor without bytes: what is known of a prefix is what the states say of it."""
        digests: set[int] = set()
        for group in self._groups:
            seen, digest = self._state(row, group)
            assert seen == start, f"group {group.name}: a state of {seen} tokens at {start}"
            after = (int(digest) + next_token(kept, start)) % VOCABULARY
            self._keep(row, group, [float(start + len(kept)), float(after)])
            digests.add(after)
        assert len(digests) == 1, f"row {row}: its states disagree"
        return digests.pop()

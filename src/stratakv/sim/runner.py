"""A model that computes nothing: it keeps token ids where keys and values would lie, and reads them
back as attention would.

Owns the closed form of what it says. The next token is a function of the whole prefix as the
anchor's pages hold it; AssertionError where another group's pages disagree with them. Must not know
who asks.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import GroupId, LayerId, TokenIds
from stratakv.engine.batch import StepBatch
from stratakv.memory.block_table import BlockTable
from stratakv.sim.device import PageBytes
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.spec.retention import needed

VOCABULARY: Final = 97
_WEIGHTS: Final = np.arange(1, 4097, dtype=np.int64) * 31 % 89 + 1
Numbers = npt.NDArray[np.generic]


def next_token(tokens: Numbers, start: int = 0) -> int:
    """What is said after ``tokens``: depends on every one and on its place. A sum over the tokens:
    of those from ``start`` on it is their share."""
    weights = _WEIGHTS[start : start + len(tokens)]
    return int(tokens.astype(np.int64) @ weights) % VOCABULARY


def expected_tokens(prompt: TokenIds, count: int) -> list[int]:
    tokens, total = prompt.tolist(), next_token(prompt)
    for place in range(len(prompt), len(prompt) + count):
        tokens.append(total)
        total = (total + total * _WEIGHTS.item(place)) % VOCABULARY
    return tokens[len(prompt) :]


class TokenRunner:
    """``said``: of each step, what this rank would have said; rank 0's is what all say."""

    def __init__(self, spec: CacheSpec, pages: Sequence[PageBytes], tables: BlockTable) -> None:
        self._page = spec.page_tokens
        self._tables = tables
        self._groups = [group for group in spec.groups if group.buffers]
        self._pages = [of.rows for of in pages]
        self._anchor = bool(spec.groups[0].buffers)
        self.said: list[int] = []

    def forward(self, batch: StepBatch) -> torch.Tensor:
        if batch.gate is not None:
            batch.gate.wait(LayerId(0))
        self.said = []
        at = 0
        for row, start, count, sampled in zip(
            batch.rows.tolist(),
            batch.starts.tolist(),
            batch.counts.tolist(),
            batch.sampled.tolist(),
            strict=True,
        ):
            tokens = batch.tokens[at : at + count]
            at += count
            go_on = self._continue if self._anchor else self._continue_states
            answer = go_on(row, start, tokens)
            if sampled:
                self.said.append(answer)
        logits = torch.zeros((len(self.said), VOCABULARY))
        logits[range(len(self.said)), self.said] = 1.0
        return logits

    # -- rows per token --------------------------------------------------------------------------

    def _continue(self, row: int, start: int, tokens: TokenIds) -> int:
        end, prefix = start + len(tokens), np.empty(0, np.float32)
        for group in self._groups:
            if group.stateful:
                self._advance(row, group, prefix, start)
                continue
            self._write(row, group.id, start, tokens)
            first = needed(group.retention, start, self._page).start * self._page
            seen = self._rows(row, group.id, first, end)
            if group.id == 0:
                prefix = seen
                assert not np.isnan(prefix).any(), f"row {row} reads pages nobody owns"
                continue
            assert (seen == prefix[first:]).all(), f"group {group.name} holds another prefix"
        return next_token(prefix)

    def _ids(self, row: int, group: GroupId, first: int, stop: int) -> npt.NDArray[np.int32]:
        pages = self._tables.pages(group)[row, first:stop]
        assert pages.min(initial=0) >= 0, f"row {row} lacks pages of group {group}"
        return pages

    def _write(self, row: int, group: GroupId, start: int, tokens: TokenIds) -> None:
        places = np.arange(start, start + len(tokens))
        index, offset = np.divmod(places, self._page)
        pages = self._ids(row, group, index.item(0), index.item(-1) + 1)
        self._pages[group][pages[index - index.item(0)], offset, 0] = tokens

    def _rows(self, row: int, group: GroupId, first: int, end: int) -> npt.NDArray[np.float32]:
        """Tokens [first, end) as the pages hold them; ``first`` is at a page."""
        pages = self._ids(row, group, first // self._page, -(-end // self._page))
        return self._pages[group][pages].reshape(-1)[: end - first]

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
        return [float(len(tokens)), float(next_token(tokens))]

    def _state(self, row: int, group: CacheGroup) -> list[float]:
        source = self._tables.slots.source(group.id).item(row)
        return [0.0, 0.0] if source < 0 else self._pages[group.id][source, 0].tolist()

    def _keep(self, row: int, group: CacheGroup, state: list[float]) -> None:
        own = self._tables.slots.own(group.id).item(row)
        assert own >= 0, "nowhere to write the state"
        self._pages[group.id][own, 0] = state

    def _continue_states(self, row: int, start: int, tokens: TokenIds) -> int:
        """For an anchor without bytes: what is known of a prefix is what the states say of it."""
        digests: set[int] = set()
        for group in self._groups:
            seen, digest = self._state(row, group)
            assert seen == start, f"group {group.name}: a state of {seen} tokens at {start}"
            after = (int(digest) + next_token(tokens, start)) % VOCABULARY
            self._keep(row, group, [float(start + len(tokens)), float(after)])
            digests.add(after)
        assert len(digests) == 1, f"row {row}: its states disagree"
        return digests.pop()

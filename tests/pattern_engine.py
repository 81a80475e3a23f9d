"""An engine over any spec whatever, in which nothing is computed and every byte is checked.

``PatternRunner`` stands where a model would: before a step it verifies every row, of every sidecar
and layer, of the pages that the step would read, and then writes those it would write. A page's
bytes follow from the tokens up to its end, so another prefix's never pass. ``verify_pages`` does
the same with every page that the tree has, on both tiers, and every object of a store.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch

from stratakv.assembly.models import EngineParts
from stratakv.core.config import EngineConfig
from stratakv.core.ids import NONE, GroupId, PageKey
from stratakv.core.page_keys import PageHasher
from stratakv.engine.attention.torch_pools import TorchPools
from stratakv.engine.batch import StepBatch
from stratakv.engine.forward import Forward
from stratakv.engine.request import Prompt
from stratakv.engine.stats import RequestStatus
from stratakv.memory.block_table import BlockTable
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.spec.retention import needed
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.fake_engine import PatternWriter
from stratakv.transfer.copier import Copier
from stratakv.transfer.cpu import DEFAULT_COPIER
from stratakv.tree.nodes import Tier
from tests.engines import VOCABULARY, next_token, token_engine

MakeRunner: TypeAlias = Callable[[CacheSpec, TorchPools, BlockTable], "PatternRunner"]


class PatternRunner:
    """``parts``: the engine that it runs in, which knows who is in which row, and their tokens."""

    def __init__(self, spec: CacheSpec, pools: TorchPools, tables: BlockTable) -> None:
        self._spec = spec
        self._page = spec.page_tokens
        self._pools = pools
        self._tables = tables
        self._pattern = PatternWriter(spec)
        self._prefixes: dict[int, tuple[Prompt, PageHasher]] = {}
        self.parts: EngineParts | None = None
        self._by_row: dict[int, RequestStatus] = {}

    @cached_property
    def _layers(self) -> list[int]:
        groups = self._spec.groups
        return sorted({i for group in groups for buffer in group.buffers for i in buffer.layers})

    def forward(self, batch: StepBatch) -> Forward:
        assert self.parts is not None
        self._by_row = {one.row: one for one in self.parts.engine.statuses()}
        rows, starts = batch.rows.tolist(), batch.starts.tolist()
        if batch.gate is None:
            self._verify(rows, starts, None)
        for layer in self._layers if batch.gate else ():
            batch.gate.wait(layer)
            self._verify(rows, starts, [layer])
        answers: list[int] = []
        for row, start, count, sampled in zip(
            rows, starts, batch.counts.tolist(), batch.sampled.tolist(), strict=True
        ):
            self._write(row, start, start + count)
            if sampled:
                answers.append(next_token(self._tokens(row)[: start + count]))
        chosen = torch.tensor(answers, dtype=torch.int64)
        return Forward.of_numbers(torch.nn.functional.one_hot(chosen, VOCABULARY).float(), batch)

    def _tokens(self, row: int) -> np.ndarray:
        return self._by_row[row].known

    def _key(self, row: int, end: int) -> PageKey:
        """What bytes that end at token ``end`` follow from: at a page boundary the page's key."""
        assert self.parts is not None
        prompt = self._by_row[row].prompt
        namespace = self.parts.plan.namespaces.of(prompt.adapter, prompt.salt)
        whose, prefix = self._prefixes.get(row, (None, None))
        if prefix is None or whose is not prompt:
            prefix = PageHasher(namespace, self._page)
            self._prefixes[row] = prompt, prefix
        tokens = self._tokens(row)
        prefix.extend(tokens)
        if end and end % self._page == 0:
            return prefix.keys[end // self._page - 1]
        root = namespace.root()
        return PageKey(hashlib.sha256(root + tokens[:end].tobytes()).digest())

    def _verify(self, rows: Sequence[int], starts: Sequence[int], layers) -> None:
        """Each row is about to go on at its start."""
        for row, start in zip(rows, starts, strict=True):
            for group in self._spec.groups:
                indices = needed(group.retention, start, self._page)
                if group.stateful:
                    pages = self._tables.slots.source(group.id)[row : row + 1][: len(indices)]
                else:
                    pages = self._tables.pages(group.id)[row, indices.start : indices.stop]
                assert (pages != NONE).all(), f"row {row} lacks pages of {group.name} at {start}"
                keys = [self._key(row, min(start, (n + 1) * self._page)) for n in indices]
                self._pattern.verify_device(self._pools, group.id, pages, keys, layers)

    def _write(self, row: int, start: int, end: int) -> None:
        for group in self._spec.groups:
            pages, ends = self._written(row, group, start, end)
            assert (pages != NONE).all(), f"row {row} has nowhere to write {group.name}"
            keys = [self._key(row, end) for end in ends]
            self._pattern.write(self._pools, group.id, pages, keys)

    def _written(
        self, row: int, group: CacheGroup, start: int, end: int
    ) -> tuple[np.ndarray, list[int]]:
        """Pages that take tokens [start, end), and the token that each then ends at."""
        if group.stateful:
            return self._tables.slots.own(group.id)[row : row + 1], [end]
        indices = range(start // self._page, -(-end // self._page))
        pages = self._tables.pages(group.id)[row, indices.start : indices.stop]
        return pages, [min(end, (n + 1) * self._page) for n in indices]


@contextmanager
def pattern_engine(
    spec: CacheSpec,
    config: EngineConfig,
    device: Sequence[int],
    host: Sequence[int],
    copier: Copier = DEFAULT_COPIER,
    make_runner: MakeRunner = PatternRunner,
) -> Iterator[EngineParts]:
    runners: list[PatternRunner] = []

    def made(*over) -> PatternRunner:
        runners.append(make_runner(*over))
        return runners[0]

    with token_engine(spec, config, device, host, copier, make_runner=made) as parts:
        runners[0].parts = parts
        yield parts


def verify_pages(parts: EngineParts, shelf: MemoryBackend | None = None) -> int:
    """Settle, and verify every page of the tree on both tiers and every object of ``shelf`` row by
    row; how many there were."""
    parts.cache.progress.settle()
    nodes, spec, pattern = (
        parts.cache.tiers.tree.internals.nodes,
        parts.spec,
        PatternWriter(parts.spec),
    )
    found = 0
    for group in spec.groups:
        for tier in Tier:
            column = nodes.page[tier][group.id]
            held = {key: column[row] for key, row in nodes.index.items() if column[row] != NONE}
            keys, pages = list(held), np.array(list(held.values()), np.int32)
            found += len(keys)
            if tier is Tier.DEVICE:
                pattern.verify_device(parts.pools, group.id, pages, keys)
            else:
                pattern.verify_host(parts.arenas[group.id], group.id, pages, keys)
    # At once: the store's thread may still be told of a use, for which nobody waits.
    objects = shelf.snapshot() if shelf is not None else {}
    for key, data in objects.items():
        expected = pattern.host_pages(GroupId(key.group), [key.page])
        assert data == expected.tobytes(), f"object {key}: not its prefix"
        found += 1
    return found

"""Decode steps as CUDA graphs: recorded once for each size, replayed over buffers that stay.

Owns the buffers, the rows that pad a step up to a size, and what of a replay belongs to the step.
Which steps are replayed is ``graph_choice``'s; every other goes to the runner that it stands
before. A graph comes in as ``Graphs``: torch's, or in tests one that refuses what a GPU would.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from stratakv.core.ids import NONE, GroupId, PageIds
from stratakv.engine.attention.paged_layer import Scratch
from stratakv.engine.attention.step_meta import StepShape
from stratakv.engine.attention.triton_kernels import Partial
from stratakv.engine.attention.triton_static import StaticGroup
from stratakv.engine.batch import StepBatch
from stratakv.engine.cuda.graph_choice import Eager, GraphSizes, SizeOrEager
from stratakv.engine.forward import Forward
from stratakv.engine.huggingface.model_call import CallInputs, CallOutputs
from stratakv.engine.huggingface.runner import ModelRunner
from stratakv.engine.huggingface.state_layer import StateRows
from stratakv.engine.tensors import Numbers, on_device
from stratakv.engine.token_ids import token_ids
from stratakv.memory.block_table import BlockTable


class Graph(Protocol):
    def replay(self) -> None:
        """Launch what was recorded, on the calling thread's stream."""
        ...


class Graphs(Protocol):
    """What records. All of one engine share their memory, so each is dead once another runs."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do ``work`` where it will be recorded: what it needs is compiled and allocated."""
        ...

    def record(self, work: Callable[[], CallOutputs]) -> tuple[Graph, CallOutputs]:
        """``work`` as a graph, and where its replays leave what it returns. RuntimeError where it
        does what no graph can."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """``inputs``: a graph has addresses alone, and keeps nothing alive."""

    inputs: CallInputs
    graph: Graph
    outputs: CallOutputs


class GraphRunner:
    """Before ``eager``. ``tables``: its block table, whose last row is nobody's. ``padding``: of
    each group a page that is nobody's either: what pads a step is a request of one token on that
    row, which reads and writes these pages alone. Nothing is recorded before ``capture``."""

    def __init__(
        self,
        eager: ModelRunner,
        tables: BlockTable,
        padding: Mapping[GroupId, int],
        graphs: Graphs,
        sizes: GraphSizes,
    ) -> None:
        self.sizes = sizes
        self.steps: Counter[SizeOrEager] = Counter()
        self._eager, self._tables, self._graphs = eager, tables, graphs
        self._device, self._scratch = eager.call.device, Scratch()
        self._row, most = tables.rows - 1, max(sizes.sizes)
        self._tokens = self._buffer(most, torch.int32)
        self._positions = self._buffer(most, torch.int64)
        partial = Partial(self._device)
        self._groups = {
            group.id: StaticGroup(
                group, most, tables.max_pages * group.page_tokens, self._device, partial
            )
            for group in eager.groups
        }
        self._states = {
            group: (self._buffer(most, torch.int64), self._buffer(most, torch.int64))
            for group in eager.stateful
        }
        for group in self._groups:
            tables.pages(group)[self._row, 0] = padding[group]
        for group in self._states:
            tables.slots.source(group)[self._row] = padding[group]
            tables.slots.own(group)[self._row] = padding[group]
        self._recorded: dict[int, _Recorded] = {}

    def _buffer(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(rows, dtype=dtype, device=self._device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every size, the largest first. All are warmed up before: memory that one of them
        makes grow must not be another's already."""
        inputs = {size: self._inputs(size) for size in sorted(self.sizes.sizes, reverse=True)}
        for one in inputs.values():
            self._graphs.warm_up(lambda one=one: self._eager.call(one, self._scratch))
        for size, one in inputs.items():
            found = self._graphs.record(lambda one=one: self._eager.call(one, self._scratch))
            self._recorded[size] = _Recorded(one, *found)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Forward:
        choice = self.sizes.choose(batch) if self._recorded else Eager.ROWS
        self.steps[choice] += 1
        if isinstance(choice, Eager):
            return self._eager.forward(batch)
        recorded = self._recorded[choice]
        self._fill(self._padded(batch, choice))
        recorded.graph.replay()
        rows, outputs = len(batch.rows), recorded.outputs
        # Copied: the next replay writes here, and a step's logits are its own.
        logits = outputs.logits[:rows].to(torch.float32, copy=True)
        if not batch.sampled.all():
            logits = logits[on_device(np.flatnonzero(batch.sampled), self._device)]
        return Forward.of_hidden(logits, outputs.hidden[:rows], batch)

    def _padded(self, batch: StepBatch, size: int) -> StepBatch:
        """``batch``, and requests that are nobody's, at their first token."""
        behind = size - len(batch.rows)
        return StepBatch(
            rows=np.append(batch.rows, np.full(behind, self._row, np.int32)),
            starts=np.append(batch.starts, np.zeros(behind, np.int32)),
            counts=np.append(batch.counts, np.ones(behind, np.int32)),
            tokens=np.append(batch.tokens, np.zeros(behind, np.int32)),
            sampled=np.append(batch.sampled, np.zeros(behind, np.bool_)),
            gate=None,
            newest=batch.newest,
        )

    def _inputs(self, size: int) -> CallInputs:
        """Of a graph of ``size`` rows: the beginnings of the buffers, with padding alone."""
        nobody = np.empty(0, np.int32)
        empty = StepBatch(
            rows=nobody, starts=nobody, counts=nobody, tokens=nobody,
            sampled=np.empty(0, np.bool_), gate=None,
        )  # fmt: skip
        batch = self._padded(empty, size)
        self._fill(batch)
        shape, tokens = StepShape.of(batch), self.sizes.tokens(size)
        height = size if self._states else 1
        return CallInputs(
            tokens=self._tokens[:size],
            positions=self._positions[:size],
            kept=torch.arange(size // height, device=self._device),
            height=height,
            groups={
                group: static.attention(shape, self._tables.pages(group), tokens)
                for group, static in self._groups.items()
            },
            states={
                group: StateRows(source[:size], own[:size])
                for group, (source, own) in self._states.items()
            },
        )

    def _fill(self, batch: StepBatch) -> None:
        """The buffers with a step's rows, as many as its graph has."""
        shape, slots = StepShape.of(batch), self._tables.slots
        self._tokens[: len(batch.tokens)] = token_ids(batch, self._device)
        self._copy(self._positions, shape.positions)
        for group, static in self._groups.items():
            static.fill(shape, self._tables.pages(group))
        for group, (source, own) in self._states.items():
            self._copy(source, _present(slots.source(group)[batch.rows]))
            self._copy(own, _present(slots.own(group)[batch.rows]))

    def _copy(self, buffer: torch.Tensor, array: Numbers) -> None:
        buffer[: len(array)] = on_device(array, self._device)


def _present(pages: PageIds) -> PageIds:
    assert pages.min() > NONE, "a request's state has no page"
    return pages

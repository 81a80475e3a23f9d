"""An executor that runs ahead: steps are computed on a thread of their own, in order.

While step N is computed its caller plans and launches the next one and answers others. A token that
is not known yet is taken from the step that chose it. Owns the thread, and each row's newest token.
Must not know a device: whoever waits for one releases the interpreter.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE
from stratakv.engine.batch import SamplingBatch, StepBatch
from stratakv.engine.executor import Runner, TokenSource
from stratakv.engine.forward import Forward
from stratakv.engine.sampling import Sampled, choose
from stratakv.memory.block_table import BlockTable
from stratakv.transfer.copy_plan import NOTHING_LAUNCHED, Fence

Columns: TypeAlias = Sequence[npt.NDArray[np.int32]]


class MirroredRunner:
    """A runner on a copy of the block table: it computes a step on the table as it was when the
    step was launched. ``runner`` reads ``mirror``, and nothing else writes it."""

    def __init__(self, tables: BlockTable, mirror: BlockTable, runner: Runner) -> None:
        self._tables, self._mirror, self._runner = tables, mirror, runner

    def tables(self) -> Columns:
        return [array.copy() for _, array in self._tables.columns()]

    def computed(self, tables: Columns, batch: StepBatch) -> Forward:
        for (_, mine), theirs in zip(self._mirror.columns(), tables, strict=True):
            mine[:] = theirs
        return self._runner.forward(batch)

    def forward(self, batch: StepBatch) -> Forward:
        return self.computed(self.tables(), batch)


class TablesRunner(Runner, Protocol):
    def tables(self) -> Columns: ...
    def computed(self, tables: Columns, batch: StepBatch) -> Forward: ...


class StepFence:
    """Passes when a step's tokens have been chosen: by then the device has done all of it."""

    def __init__(self, step: Future[Forward]) -> None:
        self._step = step

    def wait(self) -> None:
        wait((self._step,))

    def passed(self) -> bool:
        return self._step.done()


class ThreadExecutor:
    """Two steps at once: one that is computed, and one that waits for it. Tokens are chosen on the
    thread, so that nobody else waits for the device; ``token_source`` is asked as ever, one step
    after the other as they are collected, and is given them."""

    depth = 2

    def __init__(self, runner: TablesRunner, token_source: TokenSource) -> None:
        self.runner = runner
        self._token_source = token_source
        self._thread = ThreadPoolExecutor(1, "stratakv-compute")
        self._steps: deque[tuple[Future[Forward], SamplingBatch]] = deque()
        self._last: Fence = NOTHING_LAUNCHED
        self._newest: dict[int, int] = {}

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> None:
        assert len(self._steps) < self.depth, "a step is launched before an older one is collected"
        step = self._thread.submit(self._compute, batch, sampling, self.runner.tables())
        self._steps.append((step, sampling))
        self._last = StepFence(step)

    def collect(self) -> Sampled:
        """Raises what the step has raised."""
        assert self._steps, "no step is launched"
        step, sampling = self._steps.popleft()
        return self._token_source.choose(step.result(), sampling)

    def idle(self) -> None:
        self._token_source.idle()

    def launched(self) -> Fence:
        return self._last

    def _compute(self, batch: StepBatch, sampling: SamplingBatch, tables: Columns) -> Forward:
        unknown = np.flatnonzero(batch.tokens == NONE)
        if len(unknown):
            rows = np.repeat(batch.rows, batch.counts)[unknown]
            tokens = batch.tokens.copy()
            tokens[unknown] = [self._newest[row] for row in rows.tolist()]
            batch = replace(batch, tokens=tokens)
        forward = self.runner.computed(tables, batch)
        chosen = choose(forward, sampling)
        # Who has failed is computed once more before anybody knows: any token will do.
        known = np.maximum(chosen.tokens, 0).tolist()
        self._newest.update(zip(batch.rows[batch.sampled].tolist(), known, strict=True))
        return replace(forward, chosen=chosen)

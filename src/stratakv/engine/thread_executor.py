"""An executor that runs ahead: steps are computed on a thread of their own, in order.

While step N is computed its caller plans and launches the next one and answers others. A token that
is not known yet is taken from the step that chose it, on the device. Owns the thread, and when a
step has passed. A device comes in as its ``ComputeStream``; who waits for it releases the
interpreter. It is waited for where a step is collected, behind all that was launched by then.
"""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import NONE
from stratakv.engine.batch import SamplingBatch, StepBatch
from stratakv.engine.executor import Runner, TokenSource
from stratakv.engine.forward import Forward
from stratakv.engine.sampling import Coming, Sampled, drawn
from stratakv.engine.token_ids import NewestTokens
from stratakv.memory.block_table import BlockTable
from stratakv.transfer.copy_plan import NOTHING_LAUNCHED, Fence

Columns: TypeAlias = Sequence[npt.NDArray[np.int32]]


class MirroredRunner:
    """A runner on a copy of the block table: it computes a step on the table as it was when the
    step was launched. ``runner`` reads ``mirror``, and nothing else writes its rows that are also
    of ``tables``: it may have more."""

    def __init__(self, tables: BlockTable, mirror: BlockTable, runner: Runner) -> None:
        self._tables, self._mirror, self._runner = tables, mirror, runner

    def tables(self) -> Columns:
        return [array.copy() for _, array in self._tables.columns()]

    def computed(self, tables: Columns, batch: StepBatch) -> Forward:
        for (_, mine), theirs in zip(self._mirror.columns(), tables, strict=True):
            mine[: len(theirs)] = theirs
        return self._runner.forward(batch)

    def forward(self, batch: StepBatch) -> Forward:
        return self.computed(self.tables(), batch)


class TablesRunner(Runner, Protocol):
    def tables(self) -> Columns: ...
    def computed(self, tables: Columns, batch: StepBatch) -> Forward: ...


class ComputeStream(Protocol):
    """Where a device computes what its thread gives it. It may return long before that is done."""

    def enter(self) -> None:
        """Called once, on the thread that computes: what that launches is this stream's."""
        ...

    def mark(self) -> Fence:
        """Passes when all that was launched so far is done."""
        ...


class HostCompute:
    """Of a device that has computed when its call returns."""

    def enter(self) -> None:
        pass

    def mark(self) -> Fence:
        return NOTHING_LAUNCHED


HOST_COMPUTE: Final[ComputeStream] = HostCompute()


class LaunchedStep:
    """``given``: set when the device has been given all of it; ``mark`` then passes when that is
    done. ``drawn``: its forward, and what it chooses, on the device. A step that chooses none is
    known long before it is done."""

    def __init__(self, batch: StepBatch, sampling: SamplingBatch) -> None:
        self.batch, self.sampling = batch, sampling
        self.given = threading.Event()
        self.mark: Fence = NOTHING_LAUNCHED
        self.drawn: Future[tuple[Forward, Coming]]


class StepFence:
    """Passes when the device has done all of a step, whatever that samples."""

    def __init__(self, step: LaunchedStep) -> None:
        self._step = step

    def wait(self) -> None:
        self._step.given.wait()
        self._step.mark.wait()

    def passed(self) -> bool:
        return self._step.given.is_set() and self._step.mark.passed()


class ThreadExecutor:
    """Two steps at once: one that is computed, and one that waits for it. Tokens are chosen on the
    thread, and read there when their step is collected, so that nobody else waits for the device;
    ``token_source`` is asked as ever, one step after the other as they are collected, and is given
    them. ``stream``: of the device."""

    depth = 2

    def __init__(
        self,
        runner: TablesRunner,
        token_source: TokenSource,
        stream: ComputeStream = HOST_COMPUTE,
    ) -> None:
        self.runner = runner
        self._token_source = token_source
        self._stream = stream
        self._thread = ThreadPoolExecutor(1, "stratakv-compute", stream.enter)
        self._steps: deque[LaunchedStep] = deque()
        self._last: Fence = NOTHING_LAUNCHED
        self._newest = NewestTokens()
        self._otherwise = np.empty(0, np.int32)

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> None:
        assert len(self._steps) < self.depth, "a step is launched before an older one is collected"
        step = LaunchedStep(batch, sampling)
        step.drawn = self._thread.submit(self._compute, step, self.runner.tables())
        self._steps.append(step)
        self._last = StepFence(step)

    def collect(self) -> Sampled:
        """Raises what the step has raised. AssertionError where it has gone on from a token that
        is not the one that all ranks have agreed on since: its keys would be another token's."""
        assert self._steps, "no step is launched"
        step = self._steps.popleft()
        forward, chosen = step.drawn.result()
        read = self._thread.submit(chosen.read).result()
        self._check(step)
        agreed = self._token_source.choose(replace(forward, chosen=read), step.sampling)
        own, rows = read.tokens, step.batch.rows[step.batch.sampled]
        self._otherwise = rows[(own != agreed.tokens) & (agreed.tokens >= 0)]
        return agreed

    def _check(self, step: LaunchedStep) -> None:
        if len(self._otherwise):
            ahead = _unknown_rows(step.batch)
            wrong = np.intersect1d(self._otherwise, ahead).tolist()
            assert not wrong, f"ranks have chosen different tokens for rows {wrong}"

    def idle(self) -> None:
        self._token_source.idle()

    def launched(self) -> Fence:
        return self._last

    def _compute(self, step: LaunchedStep, tables: Columns) -> tuple[Forward, Coming]:
        batch = step.batch
        try:
            if len(_unknown_rows(batch)):
                batch = replace(batch, newest=self._newest)
            forward = self.runner.computed(tables, batch)
        finally:  # also of a step that fails on the way: the device may be at what came before
            try:
                step.mark = self._stream.mark()
            finally:
                step.given.set()
        return forward, self._drawn(forward, step)

    @torch.inference_mode()
    def _drawn(self, forward: Forward, step: LaunchedStep) -> Coming:
        chosen = drawn(forward, step.sampling)
        self._newest.put(step.batch.rows[step.batch.sampled], chosen.tokens)
        return chosen.coming()


def _unknown_rows(batch: StepBatch) -> npt.NDArray[np.int32]:
    """Of the tokens that are not known when a step is launched, in order."""
    return np.repeat(batch.rows, batch.counts)[batch.tokens == NONE]

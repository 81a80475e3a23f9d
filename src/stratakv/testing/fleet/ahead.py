"""A device that runs ahead: steps are launched before the tokens of those before them are known
here, and computed when a schedule says, at the latest when somebody must have them.

Owns what the device was given, in order, and the tokens that it chose. Must not know why a step is
launched.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import numpy as np

from stratakv.core.ids import NONE, RowIds
from stratakv.engine.batch import SamplingBatch, StepBatch
from stratakv.engine.executor import Runner, TokenSource
from stratakv.engine.forward import Forward
from stratakv.engine.sampling import Sampled, choose
from stratakv.testing.fleet.runner import TokenRunner


class AheadDevice:
    """``pace``: how likely the oldest piece of work is done at a look; ``depth``: of steps."""

    def __init__(self, depth: int, random: Random, pace: float) -> None:
        self.depth = depth
        self._random = random
        self._pace = pace
        self._queue: deque[Callable[[], None]] = deque()
        self._given = 0

    def launched(self) -> "DeviceFence":
        """All that the device was given so far."""
        return DeviceFence(self, self._given)

    def give(self, work: Callable[[], None]) -> "DeviceFence":
        """Do this after all that was given before."""
        self._queue.append(work)
        self._given += 1
        return self.launched()

    def later(self, work: Callable[[], None]) -> None:
        """The same, at once where nothing is left to do."""
        if self._queue:
            self.give(work)
        else:
            work()

    def done(self) -> int:
        """How many pieces of work are; this look may be the one that finds another."""
        if self._queue and self._random.random() < self._pace:
            self._queue.popleft()()
        return self._given - len(self._queue)

    def run(self, count: int) -> None:
        """Do the first ``count`` pieces of work."""
        while self._given - len(self._queue) < count:
            self._queue.popleft()()

    def executor(self, runner: Runner, token_source: TokenSource) -> "AheadExecutor":
        """For the assembly."""
        assert isinstance(runner, TokenRunner), "only a simulated model can be put off"
        return AheadExecutor(self, runner, token_source)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceFence:
    """A ``Fence``."""

    device: AheadDevice
    count: int

    def wait(self) -> None:
        self.device.run(self.count)

    def passed(self) -> bool:
        return self.device.done() >= self.count


@dataclass(slots=True, eq=False)
class _Step:
    """``rows``: those that get a token."""

    batch: StepBatch
    sampling: SamplingBatch
    runner: TokenRunner
    rows: RowIds
    computed: list[tuple[Forward, Sampled]] = field(default_factory=list[tuple[Forward, Sampled]])


class AheadExecutor:
    """An ``Executor``. ``batches``: of all steps so far, as they were launched; ``most``: how many
    were launched at once."""

    def __init__(self, device: AheadDevice, runner: TokenRunner, token_source: TokenSource) -> None:
        self.runner = runner
        self.batches: list[StepBatch] = []
        self.most = 0
        self._device = device
        self._token_source = token_source
        self._newest: dict[int, int] = {}  # what the device chose for a row last
        self._launched: deque[tuple[DeviceFence, _Step]] = deque()

    @property
    def depth(self) -> int:
        return self._device.depth

    def launched(self) -> DeviceFence:
        return self._device.launched()

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> None:
        """What the tables say now is what the step reads and writes."""
        step = _Step(batch, sampling, self.runner.frozen(), batch.rows[batch.sampled])
        self.batches.append(batch)
        self._launched.append((self._device.give(partial(self._compute, step)), step))
        self.most = max(self.most, len(self._launched))
        self._device.done()

    def _compute(self, step: _Step) -> None:
        batch = step.batch
        rows = np.repeat(batch.rows, batch.counts).tolist()
        known = batch.tokens.tolist()
        tokens = [
            self._newest[row] if token == NONE else token
            for row, token in zip(rows, known, strict=True)
        ]
        forward = step.runner.forward(replace(batch, tokens=np.array(tokens, np.int32)))
        chosen = choose(forward, step.sampling)
        for row, token in zip(step.rows.tolist(), chosen.tokens.tolist(), strict=True):
            self._newest[row] = max(token, 0)
        step.computed.append((forward, chosen))

    def collect(self) -> Sampled:
        fence, step = self._launched.popleft()
        fence.wait()
        (forward, chosen) = step.computed[0]
        sampled = self._token_source.choose(forward, step.sampling)
        assert np.array_equal(sampled.tokens, chosen.tokens), "the device goes on after another one"
        self.runner.show(step.runner.chosen)
        return sampled

    def idle(self) -> None:
        self.runner.show([])
        self._token_source.idle()

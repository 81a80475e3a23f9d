"""A device that is not the CPU's: what a second ``Device`` has to bring, in the plainest way.

Its pools are torch's memory, a piece for each layer, which no ``DevicePools`` owns. It runs ahead:
steps are computed on a thread of its own, each after a random moment, on a copy of the tables, and
the next one is launched before the last one is collected; what its copies come after is a fence in
the same queue. It gathers pages, and its host pages are arenas of its own.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import torch

from stratakv.assembly.device import Device, runner_of
from stratakv.core.ids import NONE
from stratakv.engine.batch import SamplingBatch, StepBatch
from stratakv.engine.dense_kernels import DenseKernels
from stratakv.engine.sampling import choose
from stratakv.engine.torch_pools import TORCH_DTYPES
from stratakv.memory.block_table import BlockTable
from stratakv.memory.host_arena import HostArena
from stratakv.testing.compute_queue import ComputeQueue
from stratakv.transfer.cpu import CpuTransferEngine


class LayerPools:
    """``LayerTensors`` for the runner, ``DevicePages`` for what copies."""

    def __init__(self, spec, pages):
        self.pages = tuple(pages)
        self.raw, self.typed = {}, {}
        for group, count in zip(spec.groups, pages, strict=True):
            for buffer in group.buffers:
                for at, layer in enumerate(buffer.layers):
                    raw = torch.full((count, buffer.layer_bytes), 0xFF, dtype=torch.uint8)
                    self.raw[group.id, buffer.name, at] = raw.share_memory_()
                    typed = raw.view(TORCH_DTYPES[buffer.dtype])
                    shape = (count, buffer.rows_per_page, *buffer.row_shape)
                    self.typed[group.id, buffer.name, layer] = typed.view(shape)

    def layer(self, group, buffer_name, layer_id):
        return self.typed[group, buffer_name, layer_id]

    def layer_pages(self, group, buffer_name, layer):
        return self.raw[group, buffer_name, layer].numpy()


class Arena(HostArena):
    """Would be pinned."""


class MirroredRunner:
    """Computes on tables as they were when a step was launched."""

    def __init__(self, model, spec, pools, tables, kernels):
        self._tables = tables
        self._mirror = BlockTable(len(spec.groups), tables.rows, tables.max_pages)
        self._runner = runner_of(model, spec, pools, self._mirror, kernels)

    def tables(self):
        return [array.copy() for _, array in self._tables.columns()]

    def computed(self, tables, batch):
        for (_, mine), theirs in zip(self._mirror.columns(), tables, strict=True):
            mine[:] = theirs
        return self._runner.forward(batch)

    def forward(self, batch):
        return self.computed(self.tables(), batch)


@dataclass(eq=False)
class Step:
    batch: StepBatch
    sampling: SamplingBatch
    tables: list[np.ndarray]
    fence: object = None
    forward: list = field(default_factory=list)


class LaunchedExecutor:
    depth = 2

    def __init__(self, runner, token_source, queue):
        self.runner, self._token_source, self._queue = runner, token_source, queue
        self._steps = deque()
        self._newest = {}  # by row: the token that the device chose last

    def launch(self, batch, sampling):
        assert len(self._steps) < self.depth
        step = Step(batch, sampling, self.runner.tables())
        self._queue.launch(lambda: self._compute(step))
        step.fence = self._queue.fence()
        self._steps.append(step)

    def _compute(self, step):
        batch = step.batch
        rows = np.repeat(batch.rows, batch.counts)
        tokens = [
            self._newest[row] if token == NONE else token
            for row, token in zip(rows.tolist(), batch.tokens.tolist(), strict=True)
        ]
        batch = replace(batch, tokens=np.array(tokens, np.int32))
        forward = self.runner.computed(step.tables, batch)
        chosen = choose(forward, step.sampling).tokens.tolist()
        for row, token in zip(batch.rows[batch.sampled].tolist(), chosen, strict=True):
            self._newest[row] = max(token, 0)
        step.forward.append(forward)

    def collect(self):
        step = self._steps.popleft()
        step.fence.wait()
        (forward,) = step.forward
        return self._token_source.choose(forward, step.sampling)

    def idle(self):
        self._token_source.idle()

    def launched(self):
        return self._queue.fence()


class CountingTransfer(CpuTransferEngine):
    """``held``: plans that came while the device was still at what they come after."""

    held = 0

    def submit(self, plan):
        CountingTransfer.held += not plan.after.passed()
        return super().submit(plan)


def second_device(seed=0):
    """As a ``Device``, and how to end its threads."""
    queues = []

    def executor(runner, token_source):
        queues.append(ComputeQueue(Random(seed)))
        return LaunchedExecutor(runner, token_source, queues[-1])

    def close():
        for queue in queues:
            queue.close()

    device = Device(
        pools=LayerPools,
        transfer=CountingTransfer,
        kernels=lambda model: DenseKernels(model.device, model.module.dtype),
        arenas=Arena,
        runner=MirroredRunner,
        executor=executor,
        steps_at_once=LaunchedExecutor.depth,
    )
    return device, close

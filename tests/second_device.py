"""A device that is not the CPU's, as far as a machine without a GPU can have one.

Its pools are torch's memory. It runs ahead: steps are computed on a stream of their own, each
after a random moment, while the next one is launched, and one that chooses no token is known long
before it is computed; its copies are queued on streams that are late at random, and come after what
was launched. It gathers pages, and has arenas of its own.
"""

from concurrent.futures import Future
from functools import partial
from random import Random

import torch

from stratakv.assembly.device import Device, mirrored_runner
from stratakv.engine.attention.dense_kernels import DenseKernels
from stratakv.engine.attention.torch_pools import TensorPools
from stratakv.engine.forward import Forward
from stratakv.engine.thread_executor import ThreadExecutor
from stratakv.memory.host_arena import HostArena
from stratakv.testing.compute_queue import ComputeQueue
from stratakv.testing.patience import PATIENCE_S
from stratakv.transfer.cpu import CpuTransferEngine
from tests.simulated_streams import SimulatedStreams


class Arena(HostArena):
    """Would be pinned."""


class LateStream:
    """Computes each step after a random moment. Who asks for logits waits for them."""

    def __init__(self, random):
        self.queue = ComputeQueue(random)

    def runner(self, *parts):
        return LateRunner(mirrored_runner(*parts), self)

    def enter(self):
        pass

    def mark(self):
        return self.queue.fence()


class LateRunner:
    def __init__(self, runner, stream):
        self.tables, self.forward = runner.tables, runner.forward
        self._runner, self._stream = runner, stream

    def computed(self, tables, batch):
        return late_forward(self._stream.queue, self._runner.computed, tables, batch)


def late_forward(queue, compute, tables, batch):
    """Of a step that is computed when ``queue`` comes to it."""
    found = Future()
    queue.launch(partial(_into, found, compute, tables, batch))
    if batch.sampled.any() or batch.scored is not None:
        return found.result(PATIENCE_S)
    return Forward.of_numbers(torch.empty(0, 1), batch)


def _into(found, compute, *step):
    try:
        found.set_result(compute(*step))
    except BaseException as fault:
        found.set_exception(fault)
        raise


class CountingTransfer(CpuTransferEngine):
    """``held``: plans that came while the device was still at what they come after."""

    held = 0

    def submit(self, plan):
        CountingTransfer.held += not plan.after.passed()
        return super().submit(plan)


def second_device(seed=0):
    """As a ``Device``, and how to end its threads."""
    made, stream = [], LateStream(Random(seed))

    def transfer(spec, pools, arenas):
        made.append(SimulatedStreams(seed))
        copier = made[-1].copier
        return CountingTransfer(spec, pools, arenas, copier, copier)

    def close():
        for streams in made:
            streams.close()
        stream.queue.close()

    device = Device(
        pools=partial(TensorPools, device=torch.device("cpu")),
        transfer=transfer,
        kernels=lambda model: DenseKernels(model.device, model.module.dtype),
        arenas=Arena,
        runner=stream.runner,
        executor=partial(ThreadExecutor, stream=stream),
        steps_at_once=ThreadExecutor.depth,
    )
    return device, close

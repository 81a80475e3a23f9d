"""A device that is not the CPU's, as far as a machine without a GPU can have one.

Its pools are torch's memory. It runs ahead: steps are computed on a thread of their own, each
after a random moment, while the next one is launched; its copies are queued on streams that are
late at random, and come after what was launched. It gathers pages, and has arenas of its own.
"""

import time
from functools import partial
from random import Random

import torch

from stratakv.assembly.device import Device, mirrored_runner
from stratakv.engine.dense_kernels import DenseKernels
from stratakv.engine.thread_executor import ThreadExecutor
from stratakv.engine.torch_pools import TensorPools
from stratakv.memory.host_arena import HostArena
from stratakv.testing.compute_queue import MOST_S
from stratakv.transfer.cpu import CpuTransferEngine
from tests.simulated_streams import SimulatedStreams


class Arena(HostArena):
    """Would be pinned."""


class LateRunner:
    """Computes each step after a random moment."""

    def __init__(self, runner, random):
        self.tables, self.forward = runner.tables, runner.forward
        self._runner, self._random = runner, random

    def computed(self, tables, batch):
        time.sleep(self._random.random() * MOST_S)
        return self._runner.computed(tables, batch)


class CountingTransfer(CpuTransferEngine):
    """``held``: plans that came while the device was still at what they come after."""

    held = 0

    def submit(self, plan):
        CountingTransfer.held += not plan.after.passed()
        return super().submit(plan)


def second_device(seed=0):
    """As a ``Device``, and how to end its threads."""
    made, random = [], Random(seed)

    def transfer(spec, pools, arenas):
        made.append(SimulatedStreams(seed))
        copier = made[-1].copier
        return CountingTransfer(spec, pools, arenas, copier, copier)

    def close():
        for streams in made:
            streams.close()

    device = Device(
        pools=partial(TensorPools, device=torch.device("cpu")),
        transfer=transfer,
        kernels=lambda model: DenseKernels(model.device, model.module.dtype),
        arenas=Arena,
        runner=lambda *parts: LateRunner(mirrored_runner(*parts), random),
        executor=ThreadExecutor,
        steps_at_once=ThreadExecutor.depth,
    )
    return device, close

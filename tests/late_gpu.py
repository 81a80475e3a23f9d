"""A ``Device`` as ``--device cuda`` assembles it, on a machine without a GPU: but for the driver,
which is late at random, the place, and who records graphs.
"""

from dataclasses import replace
from itertools import count

import torch

from stratakv.assembly.cuda import Gpu, device_over
from stratakv.engine.attention.dense_kernels import DenseKernels
from stratakv.engine.cuda.graph_choice import GraphOptions
from stratakv.engine.thread_executor import MirroredRunner
from stratakv.transfer.cuda import PinOptions
from tests.fake_cuda import BOTH_WAYS, FakeCuda
from tests.second_device import late_forward

AT = torch.device("cpu")


class QueuedRunner(MirroredRunner):
    """Its steps are queued on the GPU's stream; the thread that gives them goes on."""

    def __init__(self, runner, gpu):
        vars(self).update(vars(runner))
        self._gpu = gpu

    def computed(self, tables, batch):
        return late_forward(self._gpu.streams[-3].queue, super().computed, tables, batch)


def dense(model):
    return DenseKernels(model.device, model.module.dtype)


def late_gpu(seed=0, kernels=dense, graphs=None, max_bs=None):
    """The device and its driver. ``graphs``: makes who records decode steps; None: nobody does.
    What is not recorded attends by ``kernels``; torch's, for Triton's interpreter is slow."""
    made, seeds = FakeCuda(seed, device=None), count()

    def gpu():
        return Gpu(
            at=AT,
            driver=made,
            trials=lambda: BOTH_WAYS,
            free=lambda: 1 << 30,
            idle=lambda: next(seeds),
            pinned=PinOptions(chunk_bytes=1 << 16),
            graphs=graphs,
        )

    device = device_over(gpu, AT, GraphOptions(max_bs=max_bs))

    def transfer(spec, pools, arenas):
        made.arenas += [(arena.bytes.ctypes.data, arena.size_bytes) for arena in arenas]
        return device.transfer(spec, pools, arenas)

    return replace(
        device,
        transfer=transfer,
        kernels=kernels,
        runner=lambda *parts: QueuedRunner(device.runner(*parts), made),
    ), made

"""A ``Device`` as ``--device cuda`` makes it, over a driver that is late at random."""

from dataclasses import replace
from itertools import count

import torch

from stratakv.assembly.cuda import Gpu, device_over
from stratakv.engine.dense_kernels import DenseKernels
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


def late_gpu(seed=0, kernels=dense):
    """As ``--device cuda``, but for the driver, the place and the kernels."""
    made, seeds = FakeCuda(seed, device=None), count()

    def gpu():
        return Gpu(
            at=AT,
            driver=made,
            trials=lambda: BOTH_WAYS,
            free=lambda: 1 << 30,
            idle=lambda: next(seeds),
            pinned=PinOptions(chunk_bytes=1 << 16),
        )

    device = device_over(gpu, AT)

    def transfer(spec, pools, arenas):
        made.arenas += [(arena.bytes.ctypes.data, arena.size_bytes) for arena in arenas]
        return device.transfer(spec, pools, arenas)

    return replace(
        device,
        transfer=transfer,
        kernels=kernels,
        runner=lambda *parts: QueuedRunner(device.runner(*parts), made),
    ), made

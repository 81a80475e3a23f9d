"""Triton's kernels on a GPU, bfloat16 on its tensor cores among them, pass the public suite."""

import torch

from stratakv.engine.triton_kernels import TritonKernels
from stratakv.testing.kernel_conformance import KernelConformance

AT = torch.device("cuda", 0)


class TestTritonKernels(KernelConformance):
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    device = AT

    def kernels(self, dtype):
        return TritonKernels(AT)

"""Triton's kernels on a GPU, bfloat16 on its tensor cores among them, pass the public suite."""

import torch

from stratakv.engine.attention.triton_kernels import TritonKernels
from stratakv.testing.kernel_conformance import KernelConformance

AT = torch.device("cuda", 0)


class TestFloat32(KernelConformance):
    """A class for each dtype: ``make gpu`` has a part for each."""

    dtypes = (torch.float32,)
    device = AT

    def kernels(self, dtype):
        return TritonKernels(AT)


class TestFloat16(TestFloat32):
    dtypes = (torch.float16,)


class TestBfloat16(TestFloat32):
    dtypes = (torch.bfloat16,)

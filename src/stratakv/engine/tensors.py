"""From the arrays of a plan to tensors where the model runs, and back. Owns the one place that
moves them.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Numbers: TypeAlias = npt.NDArray[np.number | np.bool_]


def on_device(array: Numbers, device: torch.device) -> torch.Tensor:
    """The array's numbers on ``device``; on the CPU they share its memory. Nobody waits: they go by
    pinned memory, on the thread's stream, and torch takes that back once they are there."""
    here = torch.from_numpy(array)
    if device.type == "cpu":
        return here
    return here.pin_memory().to(device, non_blocking=True)


def read_freely(tensor: torch.Tensor) -> bool:
    """Whether the host may look at its numbers without a wait."""
    return tensor.device.type == "cpu"


def finite_in(numbers: torch.Tensor) -> torch.Tensor:
    """bool, which are finite; on a CPU by NumPy, for torch makes four operations of it."""
    if read_freely(numbers):
        return torch.from_numpy(np.isfinite(numbers.numpy()))
    return numbers.isfinite()


class ToHost:
    """Numbers of tensors on their way to the host, behind what their device was given by now. They
    go by pinned memory on the calling thread's stream; on the CPU they share their memory."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        first = tensors[0]
        self._there, self._done = list(tensors), None
        if not first.is_cuda:
            return
        self._there = [torch.empty_like(one, device="cpu", pin_memory=True) for one in tensors]
        for to, one in zip(self._there, tensors, strict=True):
            to.copy_(one, non_blocking=True)
        self._done = torch.cuda.Event(blocking=True)
        self._done.record(torch.cuda.current_stream(first.device))  # it may be another GPU's

    def wait(self) -> list[npt.NDArray[Any]]:
        """The calling thread sleeps, once, until all are there."""
        if self._done is not None:
            self._done.synchronize()
        return [one.numpy() for one in self._there]


def on_host(*tensors: torch.Tensor) -> list[npt.NDArray[Any]]:
    """The numbers of all, after one wait of the calling thread."""
    return ToHost(*tensors).wait()

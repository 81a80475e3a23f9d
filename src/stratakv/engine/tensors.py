"""From the arrays of a plan to tensors where the model runs, and back. Owns the one place that
moves them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.integer]]


def on_device(array: Numbers, device: torch.device) -> torch.Tensor:
    """The array's numbers on ``device``; on the CPU they share its memory."""
    return torch.from_numpy(array).to(device)


def on_host(*tensors: torch.Tensor) -> list[npt.NDArray[Any]]:
    """The numbers of all, after one wait of the calling thread: they come by pinned memory on the
    thread's stream, and it sleeps until they are there. On the CPU they share their memory."""
    first = tensors[0]
    if not first.is_cuda:
        return [tensor.numpy() for tensor in tensors]
    there = [torch.empty_like(one, device="cpu", pin_memory=True) for one in tensors]
    for to, one in zip(there, tensors, strict=True):
        to.copy_(one, non_blocking=True)
    done = torch.cuda.Event(blocking=True)
    done.record(torch.cuda.current_stream(first.device))  # the thread's own may be another GPU's
    done.synchronize()
    return [to.numpy() for to in there]

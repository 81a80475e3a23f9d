"""From the arrays of a plan to tensors where the model runs. Owns the one place that moves them."""

import numpy as np
import torch

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.integer]]


def on_device(array: Numbers, device: torch.device) -> torch.Tensor:
    """The array's numbers on ``device``; on the CPU they share its memory."""
    return torch.from_numpy(array).to(device)

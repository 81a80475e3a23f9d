"""A GPU as a ``CudaDriver``: torch's streams and events, and what moves bytes between them.

Thin: who waits for what is decided in ``transfer.cuda``, and what goes which way in
``transfer.copy_paths``. Owns the calls. Every thread that calls is given the GPU first, for threads
begin on the first one.
"""

from typing import Final, assert_never

import numpy as np
import torch

from stratakv.engine.cuda.library import CudaLibrary
from stratakv.transfer.copy_paths import TRIAL_BYTES, CopyPath
from stratakv.transfer.copy_trials import TrialMemory
from stratakv.transfer.streams import Moves
from stratakv.transfer.triton_copy import launch_moves

PORTABLE_AND_MAPPED: Final = 3
FIRST: Final = -1
"""Priority of a stream."""


class TorchEvent:
    """Who blocks for it sleeps: a thread that spun would take a core from those that plan."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def passed(self) -> bool:
        torch.cuda.set_device(self._device)
        return self.event.query()

    def block(self) -> None:
        torch.cuda.set_device(self._device)
        self.event.synchronize()


class TorchStream:
    """Its copies are made by ``library`` or by a kernel."""

    def __init__(self, stream: torch.cuda.Stream, library: CudaLibrary) -> None:
        self._stream, self._library = stream, library

    def enter(self) -> None:
        torch.cuda.set_device(self._stream.device)
        torch.cuda.set_stream(self._stream)

    def record(self) -> TorchEvent:
        return TorchEvent(self._stream)

    def hold(self, event: TorchEvent) -> None:
        self._stream.wait_event(event.event)

    def move(self, moves: Moves, path: CopyPath) -> None:
        match path:
            case CopyPath.ENGINE:
                self._library.copy(moves, self._stream.cuda_stream)
            case CopyPath.KERNEL:
                self._launch(moves)
            case _:
                assert_never(path)

    def _launch(self, moves: Moves) -> None:
        """Addresses go by pinned memory that torch takes back once they are there."""
        ends = torch.from_numpy(np.stack((moves.targets, moves.sources, moves.sizes)))
        with torch.cuda.stream(self._stream):
            there = ends.pin_memory().to(self._stream.device, non_blocking=True)
            launch_moves(*there, largest=int(moves.sizes.max()), wide=moves.wide)


class TorchCuda:
    """The GPU ``device``."""

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None, "which GPU"
        self._device = device
        torch.cuda.set_device(device)
        torch.cuda.init()
        self.library = CudaLibrary(device.index)
        runtime = torch.cuda.cudart()
        assert runtime is not None, "torch is built without CUDA"
        self._runtime = runtime

    def stream(self, *, urgent: bool) -> TorchStream:
        priority = FIRST if urgent else 0
        return TorchStream(torch.cuda.Stream(self._device, priority=priority), self.library)

    def register(self, address: int, size_bytes: int) -> None:
        torch.cuda.set_device(self._device)
        error = self._runtime.cudaHostRegister(address, size_bytes, PORTABLE_AND_MAPPED)
        torch.cuda.check_error(int(error))

    def unregister(self, address: int) -> None:
        torch.cuda.set_device(self._device)
        torch.cuda.check_error(int(self._runtime.cudaHostUnregister(address)))

    def free_bytes(self) -> int:
        """Of the GPU's memory, now."""
        return torch.cuda.mem_get_info(self._device)[0]


def trial_memory(device: torch.device, size_bytes: int = TRIAL_BYTES) -> TrialMemory:
    """Given back with what is returned."""
    there = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    source, target = (torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in "12")
    held = there, source, target
    return TrialMemory(there.data_ptr(), source.numpy(), target.numpy(), held)

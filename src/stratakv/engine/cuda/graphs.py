"""torch's CUDA graphs. Owns the calls; what is recorded and replayed when is ``graph_runner``'s."""

from collections.abc import Callable

import torch

from stratakv.engine.cuda.driver import FIRST
from stratakv.engine.huggingface.model_call import CallOutputs


class TorchGraphs:
    """``Graphs`` on the GPU ``device``, on a stream of their own and in one pool of memory. A
    kernel is replayed with the priority of the stream on which it was recorded, not of the one
    that replays it: steps go before copies, recorded or not."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device, priority=FIRST)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()

    def record(self, work: Callable[[], CallOutputs]) -> tuple[torch.cuda.CUDAGraph, CallOutputs]:
        """Other threads go on meanwhile: one of them pins memory."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            outputs = work()
        return graph, outputs

"""Streams of a device that is late at random: what copies on a GPU are ordered by, without one.

A stream is a thread that does what it was given, in order, each after a moment of its own. Copies
are made by Triton's interpreter or by ``memmove``: of whatever lies at the addresses by then.
"""

import ctypes
import threading
from functools import partial
from random import Random

import torch

from stratakv.testing.compute_queue import ComputeQueue
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.streams import StreamCopier
from stratakv.transfer.triton_copy import launch_moves


def by_memmove(moves):
    for target, source, size in zip(*moves_of(moves), strict=True):
        ctypes.memmove(target, source, size)


_INTERPRETER = threading.Lock()
"""Which program runs is a global of Triton's interpreter: two streams' kernels would mix."""


def by_kernel(moves):
    ends = [torch.from_numpy(one) for one in (moves.targets, moves.sources, moves.sizes)]
    with _INTERPRETER:
        launch_moves(*ends, largest=int(moves.sizes.max()), wide=moves.wide)


def moves_of(moves):
    return moves.targets.tolist(), moves.sources.tolist(), moves.sizes.tolist()


class SimulatedStream:
    def __init__(self, random, path):
        self.queue, self._path = ComputeQueue(random), path

    def after(self, fence):
        self.queue.launch(fence.wait)

    def copy(self, moves):
        self.queue.launch(partial(self._path, moves))

    def mark(self):
        return self.queue.fence()


class SimulatedStreams:
    """A ``StreamCopier`` over one for each direction."""

    def __init__(self, seed=0, path=by_memmove, registered=None):
        random = Random(seed)
        self.streams = {each: SimulatedStream(random, path) for each in Direction}
        beside = () if registered is None else (registered,)
        self.copier = StreamCopier(self.streams, *beside)

    def close(self):
        for stream in self.streams.values():
            stream.queue.close()

"""The driver's own library, for what torch has no verb for: copies in a batch, and a GPU's place.

Owns its calls and their numbers. Nothing here is used before it has copied some bytes right
(``transfer.copy_trials``). Must not choose, nor wait.
"""

import ctypes
from typing import Final

import numpy as np

from stratakv.transfer.streams import Moves

NAME: Final = "libcuda.so.1"
STREAM_ORDER: Final = 1
"""Of a copy's source: it is read when the stream comes to it."""
ATTRIBUTES_BYTES: Final = 64
"""The record has 24, with the order first and zeros for what is not said."""
_POINTER: Final = ctypes.c_void_p
_SIZE: Final = ctypes.c_size_t


class CudaLibrary:
    """Of one GPU. OSError where there is no driver. Any thread may call it."""

    def __init__(self, index: int, name: str = NAME) -> None:
        self._cuda = ctypes.CDLL(name)
        self._device = ctypes.c_int()
        self._context = _POINTER()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._batch = self._symbol("cuMemcpyBatchAsync_v2")  # of CUDA 13
        self._old_batch = self._symbol("cuMemcpyBatchAsync")  # of CUDA 12.8

    def pci(self) -> str:
        """As Linux names the GPU below /sys."""
        name = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", name, ctypes.c_int(32), self._device)
        return name.value.decode("ascii").lower()

    def copy(self, moves: Moves, stream: int) -> None:
        """Queue ``moves`` on a stream, in no order among themselves; RuntimeError where one cannot
        be."""
        self._call("cuCtxSetCurrent", self._context)
        if self._batch is None and self._old_batch is None:
            self._one_by_one(moves, stream)
            return
        ends = [np.ascontiguousarray(one) for one in (moves.targets, moves.sources, moves.sizes)]
        pointers = [_POINTER(one.ctypes.data) for one in ends]
        attributes = ctypes.create_string_buffer(ATTRIBUTES_BYTES)
        attributes[0] = bytes([STREAM_ORDER])
        first = _SIZE(0)
        every = (*pointers, _SIZE(len(moves.sizes)), attributes, ctypes.byref(first), _SIZE(1))
        if self._batch is not None:
            self._call("cuMemcpyBatchAsync_v2", *every, _POINTER(stream))
        else:
            failed = _SIZE(0)
            self._call("cuMemcpyBatchAsync", *every, ctypes.byref(failed), _POINTER(stream))

    def _one_by_one(self, moves: Moves, stream: int) -> None:
        for target, source, size in zip(
            moves.targets.tolist(), moves.sources.tolist(), moves.sizes.tolist(), strict=True
        ):
            ends = ctypes.c_uint64(target), ctypes.c_uint64(source)
            self._call("cuMemcpyAsync", *ends, _SIZE(size), _POINTER(stream))

    def _symbol(self, name: str) -> object | None:
        try:
            return self._cuda[name]
        except AttributeError:
            return None

    def _call(self, name: str, *given: object) -> None:
        code = self._cuda[name](*given)
        if code:
            raise RuntimeError(f"{name}: CUDA driver error {code}")

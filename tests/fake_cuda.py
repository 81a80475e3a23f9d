"""A GPU's driver, without one: streams are threads that are late at random.

Copies read and write whatever lies at the addresses when a stream comes to them. What a driver
would not allow is an error here: host memory that is not registered, or is no more, and a copy that
crosses from one registration into the next.
"""

import threading
from bisect import bisect_right
from random import Random

from stratakv.testing.compute_queue import ComputeQueue
from stratakv.testing.patience import PATIENCE_S
from stratakv.transfer.copy_paths import CopyChoice, CopyPath
from stratakv.transfer.copy_plan import Direction
from tests.simulated_streams import by_kernel, by_memmove

BOTH_WAYS = CopyChoice({Direction.LOAD: 64, Direction.BACKUP: 0}, CopyPath.ENGINE)
PATHS = {CopyPath.KERNEL: by_memmove, CopyPath.ENGINE: by_memmove}
BY_TRITON = {CopyPath.KERNEL: by_kernel, CopyPath.ENGINE: by_memmove}


class FakeEvent:
    def __init__(self, fence):
        self._fence = fence

    def passed(self):
        return self._fence.passed()

    def block(self):
        self._fence.wait()


class FakeStream:
    def __init__(self, driver, random):
        self._driver, self.queue = driver, ComputeQueue(random)
        self.moved, self.held, self.entered = [], 0, []

    def enter(self):
        self.entered.append(threading.current_thread().name)

    def record(self):
        return FakeEvent(self.queue.fence())

    def hold(self, event):
        self.held += 1
        self.queue.launch(event.block)

    def move(self, moves, path):
        self.moved.append((path, moves.group))
        self.queue.launch(lambda: self._driver.move(moves, path))


class FakeCuda:
    """``device``: arrays that are the GPU's own, which need no registration; None: all that is not
    in ``arenas``, addresses and sizes. ``refused``: the
    registration that fails, counted from 0."""

    def __init__(self, seed=0, device=(), paths=PATHS, refused=-1):
        self._random, self._paths, self._refused = Random(seed), paths, refused
        self._device = None
        if device is not None:
            self._device = [(one.ctypes.data, one.nbytes) for one in device]
        self.arenas = []
        self.streams, self.registered, self.urgent = [], {}, []
        self._changed = threading.Condition()
        self.let, self.asked = threading.Event(), 0
        self.let.set()

    def stream(self, *, urgent):
        self.streams.append(FakeStream(self, self._random))
        self.urgent.append(urgent)
        return self.streams[-1]

    def register(self, address, size_bytes):
        assert self.let.wait(PATIENCE_S)
        self.asked += 1
        if self.asked - 1 == self._refused:
            raise RuntimeError("out of memory to pin")
        assert address not in self.registered
        self.registered[address] = size_bytes

    def unregister(self, address):
        del self.registered[address]

    def move(self, moves, path):
        for ends in (moves.targets, moves.sources):
            for at, size in zip(ends.tolist(), moves.sizes.tolist(), strict=True):
                assert self._may(at, size), f"{size} bytes at {at} are nobody's"
        self._paths[path](moves)

    def _may(self, at, size):
        if self._device is None:
            return not self._in_an_arena(at) or self._is_registered(at, size)
        own = any(base <= at and at + size <= base + whole for base, whole in self._device)
        return own or self._is_registered(at, size)

    def _in_an_arena(self, at):
        return any(base <= at < base + whole for base, whole in self.arenas)

    def _is_registered(self, at, size):
        starts = sorted(self.registered)
        place = bisect_right(starts, at) - 1
        return place >= 0 and at + size <= starts[place] + self.registered.get(starts[place], 0)

    def whole(self, at, size):
        """Whether registrations cover all of it."""
        end = at + size
        while at < end and (of := [base for base in self.registered if base <= at]):
            if (base := max(of)) + self.registered[base] <= at:
                return False
            at = base + self.registered[base]
        return at >= end

    def close(self):
        for stream in self.streams:
            stream.queue.close()


def pool_arrays(spec, pools):
    return [pools.raw(group.id, buffer.name) for group in spec.groups for buffer in group.buffers]

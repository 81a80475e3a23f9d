"""A backend that tests of the I/O worker hold, break and watch, and the jobs that they send it.

Owns the gate. Bytes and statuses are the memory backend's.
"""

import threading

from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import Everything, ObjectKey, StoreFormat
from stratakv.storage.io_jobs import Kind, Store
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.patience import PATIENCE_S, wait_until

PAGE = 8
FORM = StoreFormat(spec_digest=b"d" * 16, page_bytes=(PAGE, 4 * PAGE))


class Gate(MemoryBackend):
    """Remembers every call, and holds those of the named verbs until they are let through."""

    def __init__(self, *held, quota_bytes=1 << 20):
        super().__init__(FORM, quota_bytes)
        self.calls = []
        self.threads = set()
        self.entered = threading.Semaphore(0)
        self.open = {verb: threading.Semaphore(0) for verb in held}
        self.failing = {}
        self.closed = 0

    def let(self, verb, times=1):
        self.open[verb].release(times)

    def wait_entered(self):
        assert self.entered.acquire(timeout=PATIENCE_S), "the backend was not called"

    def _pass(self, verb, keys):
        self.calls.append((verb, 1 if isinstance(keys, Everything) else len(keys)))
        self.threads.add(threading.current_thread())
        if verb in self.open:
            self.entered.release()
            assert self.open[verb].acquire(timeout=PATIENCE_S), f"{verb} was never let through"
        if verb in self.failing:
            raise self.failing[verb]

    def contains(self, keys):
        self._pass("contains", keys)
        return super().contains(keys)

    def read(self, keys, into):
        self._pass("read", keys)
        return super().read(keys, into)

    def write(self, keys, pages):
        self._pass("write", keys)
        return super().write(keys, pages)

    def remove(self, keys):
        self._pass("remove", keys)
        return super().remove(keys)

    def close(self):
        self.closed += 1
        super().close()


def keys_of(count, first=0, group=0):
    return tuple(
        ObjectKey(PageKey(i.to_bytes(32, "big")), GroupId(group))
        for i in range(first, first + count)
    )


def buffers(count, fill=0, size=PAGE):
    return tuple(memoryview(bytearray([fill] * size)) for _ in range(count))


def answers(worker, kind, count=1):
    """The next ``count`` answers, waiting for them."""
    wait_until(lambda: worker.ready(kind) >= count, f"{count} answers to {kind}")
    return worker.take(kind, count)


def answer(worker, kind):
    return answers(worker, kind)[0]


def stored(worker, count, fill=7, first=0):
    assert worker.submit(Store(keys_of(count, first), buffers(count, fill))) is not None
    return answer(worker, Kind.STORE)


class Workers:
    """Makes workers, and ends them whatever their tests have left held."""

    def __init__(self, clock):
        self._clock = clock
        self._made, self._backends = [], []

    def __call__(self, reading, writing=None, **limits):
        backends = Backends(reading, writing or reading)
        self._backends += [reading, backends.writing]
        self._made.append(IoWorker(backends, FORM, IoLimits(**limits), self._clock))
        return self._made[-1]

    def close(self):
        for backend in self._backends:
            for semaphore in backend.open.values():
                semaphore.release(1000)
        for worker in self._made:
            assert worker.close(PATIENCE_S)

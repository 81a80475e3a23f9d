# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""What LMCache has asked for and not heard of yet, and the buffers that it has lent for that.

Owns the answers, the threads that find them, and the loans. LMCache gives the memory of a buffer to
other chunks without a word: when its own lock has run out, and when it has given up on a load. So
nothing is read from a buffer or written into it but while LMCache is known to hold it: a store
copies before its submission returns, a load writes under a loan that can be taken back.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey as ChunkKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from stratakv.core.clock import Clock

Bytes: TypeAlias = npt.NDArray[np.uint8]
QUEUED_BYTES: Final = 1 << 30
"""Of copies that wait to be written: more are not made, but for one task alone."""
MOST_ANSWERS: Final = 4096
"""LMCache has eight requests under way, unless it is told otherwise."""
CLOSE_S: Final = 30.0
"""How long what is queued may take when LMCache ends."""


class Results:
    """What has ended, by task, and the notifier that says so to a poll."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ended: dict[int, Any] = {}
        self.notifier: Final = create_event_notifier()

    def put(self, task: int, result: object) -> None:
        with self._lock:
            self._ended[task] = result
        self.notifier.notify()

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            ended, self._ended = self._ended, {}
        return ended


class Answers(Results):
    """Each of which is asked for, but for those of requests that LMCache has given up on: it says
    of no task that nobody will ask, so of more than ``MOST_ANSWERS`` the oldest go."""

    def put(self, task: int, result: object) -> None:
        with self._lock:
            if len(self._ended) >= MOST_ANSWERS:
                del self._ended[next(iter(self._ended))]
        super().put(task, result)

    def take(self, task: int) -> Any:  # noqa: ANN401 - LMCache's own results
        with self._lock:
            return self._ended.pop(task, None)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer to a load of ``keys``."""

    keys: Sequence[ChunkKey]
    bits: Bitmap


class QueuedCopies:
    """What was copied and is not yet written."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.size_bytes = 0

    def take(self, objects: Sequence[MemoryObj]) -> Sequence[Bytes] | None:
        """Copies of all of them; None where too much is queued."""
        size_bytes = sum(one.get_size() for one in objects)
        with self._lock:
            if self.size_bytes and self.size_bytes + size_bytes > QUEUED_BYTES:
                return None
            self.size_bytes += size_bytes
        try:
            return [np.array(bytes_of(one), np.uint8) for one in objects]
        except Exception:
            self._lower(size_bytes)
            raise

    def drop(self, copies: Sequence[Bytes]) -> None:
        self._lower(sum(map(len, copies)))

    def _lower(self, size_bytes: int) -> None:
        with self._lock:
            self.size_bytes -= size_bytes


class LentBuffers:
    """The buffers of one load, until they are taken back, or ``latest_s`` has come: LMCache's own
    lock, of whose end nobody tells us, must run out later."""

    def __init__(
        self, keys: Sequence[ChunkKey], buffers: Sequence[MemoryObj], clock: Clock, latest_s: float
    ) -> None:
        self.keys: Final = frozenset(keys)
        self.filled: Final[list[int]] = []
        self._buffers: Sequence[MemoryObj] | None = buffers
        self._clock = clock
        self._latest_s = latest_s
        self._lock = Lock()

    @property
    def open(self) -> bool:
        return self._buffers is not None and self._clock.now_s() < self._latest_s

    def fill(self, at: int, page: Bytes) -> None:
        """Copy a page to a buffer, unless that is LMCache's again."""
        with self._lock:
            if self._buffers is None or self._clock.now_s() >= self._latest_s:
                return
            if not self._buffers[at].is_valid():  # freed by force
                return
            np.copyto(np.frombuffer(bytes_of(self._buffers[at]), np.uint8), page)
            self.filled.append(at)

    def take_back(self) -> None:
        """Nobody touches a buffer from now on. Waits for the copy of a page at most."""
        with self._lock:
            self._buffers = None


class TaskThread:
    """One thread that does what it is given, in that order."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._closing = False

    def submit(self, run: Callable[[], None], give_up: Callable[[], None]) -> None:
        """``give_up``: in place of ``run`` once this is being closed."""
        self._thread.submit(lambda: give_up() if self._closing else run())

    def close(self) -> None:
        """Do what is queued, for ``CLOSE_S`` at most; what has begun is waited for."""
        if not self._closing:
            wait([self._thread.submit(int)], CLOSE_S)
        self._closing = True
        self._thread.shutdown(wait=True)


def bytes_of(chunk: MemoryObj) -> memoryview:
    return memoryview(chunk.byte_array).cast("B")[: chunk.get_size()]

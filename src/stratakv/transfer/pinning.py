"""Host memory that a driver has to be told of before a device may address it.

Owns the thread that registers arenas, a chunk at a time, while the server serves already, and how
far it is. A copy that comes before its pages waits on the thread that copies. What registers comes
in; must not know a driver.
"""

import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from stratakv.core.ids import GroupId
from stratakv.core.units import format_bytes
from stratakv.memory.host_arena import HostArena

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 256 << 20
"""About a tenth of a second each."""
OS_PAGE_BYTES: Final = 4096
LINES: Final = 10
"""Of a log, about how far it is."""


class NotPinnedError(RuntimeError):
    """Host memory is not pinned, and will not be; its cause says why, and is in the log already."""


@dataclass(frozen=True, slots=True)
class PinnedSpan:
    """``end_bytes``: of its group's arena, counted from the first byte on."""

    group: GroupId
    address: int
    size_bytes: int
    end_bytes: int


def chunks_of(arenas: Sequence[HostArena], chunk_bytes: int = CHUNK_BYTES) -> list[PinnedSpan]:
    """All groups advance alike. No chunk cuts a host page, which one copy may move, nor a page of
    the machine, which is registered once."""
    found: list[tuple[float, PinnedSpan]] = []
    for arena in arenas:
        whole = arena.size_bytes
        if not whole:
            continue
        unit = math.lcm(arena.layout.stride_bytes, OS_PAGE_BYTES)
        step = max(1, chunk_bytes // unit) * unit
        for start in range(0, whole, step):
            size = min(step, whole - start)
            chunk = PinnedSpan(arena.group.id, arena.bytes.ctypes.data + start, size, start + size)
            found.append((start / whole, chunk))
    return [chunk for _, chunk in sorted(found, key=lambda each: each[0])]


class Pinning:
    """``register``: tells the driver of (address, bytes); ``cpus``: where the thread runs, so that
    fresh memory comes from near the device; empty: anywhere."""

    def __init__(
        self,
        arenas: Sequence[HostArena],
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        cpus: Collection[int] = (),
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._chunks = chunks_of(arenas, chunk_bytes)
        self._register, self._unregister = register, unregister
        self._cpus = cpus
        self._changed = threading.Condition()
        self._ends = {arena.group.id: 0 for arena in arenas}
        self._done = 0
        self._closed = False
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="stratakv-pinning", daemon=True)
        self._thread.start()

    @property
    def total_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self._chunks)

    @property
    def pinned_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self._chunks[: self._done])

    def wait(self, group: GroupId, size_bytes: int) -> None:
        """Return once the first ``size_bytes`` of a group's arena are registered.
        NotPinnedError where they never will be."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ends[group] >= size_bytes or self._fault or self._closed
            )
            if self._ends[group] < size_bytes:
                raise NotPinnedError("host memory is not pinned") from self._fault

    def close(self) -> None:
        """End the thread, and take back what was registered; nothing may be copied any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for chunk in self._chunks[: self._done]:
            self._unregister(chunk.address)
        self._done = 0

    def _run(self) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)  # of this thread alone
        for chunk in self._chunks:
            if self._closed:
                return
            try:
                self._register(chunk.address, chunk.size_bytes)
            except Exception as fault:
                log.exception("%s of host memory cannot be pinned", format_bytes(chunk.size_bytes))
                self._fail(fault)
                return
            with self._changed:
                self._ends[chunk.group] = chunk.end_bytes
                self._done += 1
                self._changed.notify_all()
            self._report()

    def _report(self) -> None:
        """A line for each tenth, and for the end."""
        done, total = self._done, len(self._chunks)
        if done * LINES // total > (done - 1) * LINES // total:
            sizes = format_bytes(self.pinned_bytes), format_bytes(self.total_bytes)
            log.info("%s of %s of host memory are pinned", *sizes)

    def _fail(self, fault: Exception) -> None:
        with self._changed:
            self._fault = fault
            self._changed.notify_all()

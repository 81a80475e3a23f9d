"""What it costs to move pages, by how many there are, for ``bench growth``.

Owns the moves: copies between device and host, and pages into a file store and out of it. Processor
time of the whole process, since threads of their own move bytes. Must not judge the figures.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from stratakv.bench.transfer import move, uniform_spec
from stratakv.core.clock import WallClock
from stratakv.core.ids import GroupId, PageKey
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.storage.backend import Everything, ObjectKey, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore
from stratakv.transfer.copy_plan import Direction, GroupCopy
from stratakv.transfer.cpu import CpuTransferEngine

PAGE_TOKENS: Final = 16
PAGE_BYTES: Final = 256 << 10
SEGMENT_BYTES: Final = 2 << 10


def copies_us(pages: int, repeats: int) -> float:
    """To the host and back, of ``pages`` scattered pages of 256 KiB in segments of 2 KiB."""
    spec = uniform_spec(PAGE_TOKENS, PAGE_BYTES, SEGMENT_BYTES)
    pools, arena = DevicePools(spec, [pages]), HostArena(spec.groups[0], pages)
    for buffer in spec.groups[0].buffers:
        pools.raw(GroupId(0), buffer.name).fill(1)
    arena.bytes.fill(2)
    engine = CpuTransferEngine(spec, pools, [arena])
    rng = np.random.default_rng(0)

    def both_ways() -> None:
        device, host = (rng.permutation(pages).astype(np.int32) for _ in range(2))
        for direction in (Direction.BACKUP, Direction.LOAD):
            move(engine, direction, GroupCopy(GroupId(0), device, host), PAGE_BYTES)

    taken_us = _median_us(both_ways, repeats)
    engine.close()
    return taken_us


def stored_us(pages: int, repeats: int) -> float:
    """Into a file store and out of it, of ``pages`` pages of 256 KiB."""
    form = StoreFormat(spec_digest=b"growth".ljust(16), page_bytes=(PAGE_BYTES,))
    keys = [ObjectKey(PageKey(at.to_bytes(32, "little")), GroupId(0)) for at in range(pages)]
    source, target = ([memoryview(bytearray(PAGE_BYTES)) for _ in keys] for _ in range(2))
    with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as name:
        store = FileStore(Path(name), form, StoreLimits(quota_bytes=1 << 30), WallClock())

        def both_ways() -> None:
            store.remove(Everything.EVERYTHING)
            assert set(store.write(keys, source)) == {WriteStatus.STORED}, "not all were stored"
            assert set(store.read(keys, target)) == {ReadStatus.HIT}, "not all were found"

        taken_us = _median_us(both_ways, repeats)
        store.close()
    return taken_us


def _median_us(work: Callable[[], None], repeats: int) -> float:
    """The first does not count: it touches memory for the first time."""
    taken_s: list[float] = []
    for _ in range(repeats + 1):
        begin_s = time.process_time()
        work()
        taken_s.append(time.process_time() - begin_s)
    return median(taken_s[1:]) * 1e6

"""``stratakv bench storage``: pages into a store and back, against a raw loop over one slab file,
and what a store costs the engine's thread (``storage_steps``).

Owns the measurement. The yardstick writes and reads the same bytes with one pwritev or preadv per
page, without keys, headers or hashes; it is interleaved with the measured runs, so that a busy
machine slows both. Reads are warm (from the page cache) and cold (dropped from it before). Every
byte that a store brings back is compared. Takes about 1 GiB of memory and 2 GiB of disk.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

import numpy as np

from stratakv.bench.rig import Laps, in_turn
from stratakv.bench.storage_steps import TARGET as STEP_TARGET
from stratakv.bench.storage_steps import step_time_ratios
from stratakv.bench.storage_yardsticks import (
    FILES,
    REDIS_TARGET,
    Extent,
    Pipelines,
    Slab,
    StorageYardstick,
    check_redis,
    cut,
    redis_opener,
)
from stratakv.core.clock import WallClock
from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StorageBackend,
    StoreFormat,
    WriteStatus,
)
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore
from stratakv.storage.sealed import SealedBackend, sealed_form
from stratakv.storage.store_key import LEAST_BYTES, StoreKey

PAGE_KIB: Final = (256, 1024, 4096)
TARGETS: Final = {"write_ratio": 0.85, "read_warm_ratio": 0.85, "read_cold_ratio": 0.9}
CONTAINS_TARGET_MS: Final = 6.0
_KEYS: Final = 10_000
_DIGEST: Final = b"stratakv bench 1"
_QUOTA_BYTES: Final = 32 << 30
"""The store cuts it into segments of a 64th. Few take it as small as the bench's bytes, and then
the kernel's read-ahead would start anew every few milliseconds, which it does not for the slab."""

StoreFactory: TypeAlias = Callable[[StoreFormat], StorageBackend]
"""Opens a store that holds at least 1 GiB, and in which nobody else has pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCase:
    """Medians; a ratio is the median of the ratios of neighbouring runs. GB are 10^9 bytes. None: a
    backend without a cache to drop."""

    backend: str
    page_bytes: int
    write_ratio: float
    read_warm_ratio: float
    read_cold_ratio: float | None
    write_gb_s: float
    read_gb_s: float
    read_cold_gb_s: float | None
    raw_write_gb_s: float
    raw_read_gb_s: float
    raw_cold_gb_s: float | None


def run(directory: Path | None = None, redis: str | None = None) -> dict[str, object]:
    """Measure the file store in ``directory`` (default: the one for temporary files), without a key
    and with one, and the Redis at ``redis`` if given; print a table. Three to four minutes.
    ConfigError where Redis does not answer."""
    if redis is not None:
        check_redis(redis)
    with tempfile.TemporaryDirectory(dir=directory, prefix="stratakv-bench-") as name:
        root = Path(name)
        openers = {"file": _file_opener(root), "file+key": _sealed_opener(root)}
        cases = [
            measure(name, opener, Slab(root, FILES.pages(kib << 10)), root)
            for name, opener in openers.items()
            for kib in PAGE_KIB
        ]
        if redis is not None:
            cases += [
                measure("redis", redis_opener(redis), Pipelines.of(redis, kib << 10), root)
                for kib in PAGE_KIB
            ]
        contains_ms = measure_contains(_file_opener(root))
        print_table(cases, contains_ms)
        steps = step_time_ratios(root)
    print(
        f"CPU time of a step with a store to that without: {steps['step_time_ratio']:.2f}; "
        f"where the forward does nothing: {steps['scheduler_time_ratio']:.2f}"
    )
    return {
        "targets": {
            **TARGETS,
            "contains_10k_ms": CONTAINS_TARGET_MS,
            "step_time_ratio": STEP_TARGET,
            "scheduler_time_ratio": STEP_TARGET,
            "redis_ratio": REDIS_TARGET,
        },
        "cases": [asdict(case) for case in cases],
        "contains_10k_ms": contains_ms,
        **steps,
    }


def print_table(cases: Sequence[StorageCase], contains_ms: float) -> None:
    print("store beside a raw loop, over a slab or by redis-py; GB/s and ratio to raw")
    print("backend  page KiB   write        warm read    cold read")
    for case in cases:
        cold = "-" if case.read_cold_gb_s is None else f"{case.read_cold_gb_s:5.2f}"
        cold += "" if case.read_cold_ratio is None else f" {case.read_cold_ratio:5.2f}"
        print(
            f"{case.backend:8s} {case.page_bytes >> 10:8d}  {case.write_gb_s:5.2f} "
            f"{case.write_ratio:5.2f}  {case.read_gb_s:5.2f} {case.read_warm_ratio:5.2f}  {cold}"
        )
    print(f"contains of {_KEYS} keys: {contains_ms:.2f} ms")


def measure(backend: str, opener: StoreFactory, raw: StorageYardstick, root: Path) -> StorageCase:
    """One backend beside its yardstick, which is closed. ``root``: where a cache is dropped."""
    extent, source, laps = raw.extent, raw.source, Laps()
    page_bytes = len(source[0])
    target = cut(bytearray(extent.run_bytes), page_bytes)
    form = StoreFormat(spec_digest=_DIGEST, page_bytes=(page_bytes,))
    with closing(raw), closing(opener(form)) as store:
        inner = store.inner if isinstance(store, SealedBackend) else store
        ours = _Stored(store, extent)
        for turn in range(extent.repeats + 1):
            raw.clear()
            ours.begin(len(source), turn)
            for name, one in in_turn((("raw", raw), ("store", ours)), turn):
                _write_out(root)
                laps.time(f"{name} write", partial(one.write, source))
            for name, one in in_turn((("raw", raw), ("store", ours)), turn):
                _read(laps, f"{name} warm", one, target, source)
        has_cache = isinstance(inner, FileStore)
        for turn in range(extent.repeats + 1) if has_cache else ():
            for name, one in in_turn((("raw", raw), ("store", ours)), turn):
                _write_out(root, drop=True)
                _read(laps, f"{name} cold", one, target, source)
        store.remove(Everything.EVERYTHING)

    def gb_s(name: str) -> float:
        return extent.run_bytes / laps.median_s(name) / 1e9

    return StorageCase(
        backend=backend,
        page_bytes=page_bytes,
        write_ratio=laps.ratio("raw write", "store write"),
        read_warm_ratio=laps.ratio("raw warm", "store warm"),
        read_cold_ratio=laps.ratio("raw cold", "store cold") if has_cache else None,
        write_gb_s=gb_s("store write"),
        read_gb_s=gb_s("store warm"),
        read_cold_gb_s=gb_s("store cold") if has_cache else None,
        raw_write_gb_s=gb_s("raw write"),
        raw_read_gb_s=gb_s("raw warm"),
        raw_cold_gb_s=gb_s("raw cold") if has_cache else None,
    )


def measure_contains(opener: StoreFactory) -> float:
    """Median ms of one question for 10,000 keys, half of which are there."""
    store = opener(StoreFormat(spec_digest=_DIGEST, page_bytes=(512,)))
    keys = _keys(_KEYS, 0)
    page = memoryview(bytes(512))
    store.write(keys[::2], [page] * len(keys[::2]))
    taken_s: list[float] = []
    for _ in range(FILES.repeats):
        begin_s = time.perf_counter()
        found = store.contains(keys)
        taken_s.append(time.perf_counter() - begin_s)
        assert found[::2].all(), "a stored page is not found"
        assert not found[1::2].any(), "a page is found that was never stored"
    store.close()
    return median(taken_s) * 1e3


def _file_opener(root: Path) -> StoreFactory:
    def opener(form: StoreFormat) -> StorageBackend:
        directory = Path(tempfile.mkdtemp(dir=root))
        return FileStore(directory, form, StoreLimits(quota_bytes=_QUOTA_BYTES), WallClock())

    return opener


def _sealed_opener(root: Path) -> StoreFactory:
    """As a server with ``--storage-key-file`` has it."""
    key, opener = StoreKey(bytes(range(LEAST_BYTES))), _file_opener(root)

    def sealed(form: StoreFormat) -> StorageBackend:
        inner = sealed_form(form, key)
        return SealedBackend(opener(inner), inner, key)

    return sealed


def _read(
    laps: Laps,
    name: str,
    one: "StorageYardstick | _Stored",
    target: Sequence[memoryview],
    source: Sequence[memoryview],
) -> None:
    """A timed read into ``target``, which has the pages of the read before: a byte of each is wrong
    by then, or a store that reads nothing would pass."""
    for page in target:
        page[0] ^= 0xFF
    laps.time(name, partial(one.read, target))
    if isinstance(one, _Stored):  # a yardstick may keep what it reads in its client's own bytes
        assert all(a == b for a, b in zip(source, target, strict=True)), f"{name}: bytes differ"


class _Stored:
    """What is measured: a store under fresh keys every turn."""

    def __init__(self, store: StorageBackend, extent: Extent) -> None:
        self._store, self._extent = store, extent
        self._keys: list[ObjectKey] = []

    def begin(self, count: int, turn: int) -> None:
        self._store.remove(self._keys or Everything.EVERYTHING)
        self._keys = _keys(count, turn)

    def write(self, pages: Sequence[memoryview]) -> None:
        for part in self._extent.batches(pages):
            statuses = self._store.write(self._keys[part], pages[part])
            assert set(statuses) == {WriteStatus.STORED}, f"not stored: {set(statuses)}"

    def read(self, pages: Sequence[memoryview]) -> None:
        for part in self._extent.batches(pages):
            statuses = self._store.read(self._keys[part], pages[part])
            assert set(statuses) == {ReadStatus.HIT}, f"no hits: {set(statuses)}"


def _write_out(root: Path, *, drop: bool = False) -> None:
    """Leave no dirty page of any file below ``root``: the kernel holds up who wrote much. With
    ``drop`` leave no page in the cache at all."""
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            if drop:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _keys(count: int, turn: int) -> list[ObjectKey]:
    rng = np.random.default_rng(turn)
    return [ObjectKey(PageKey(rng.bytes(32)), GroupId(0)) for _ in range(count)]

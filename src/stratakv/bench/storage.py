"""``stratakv bench storage``: pages into a store and back, against a raw loop over one slab file,
and what a store costs the engine's thread (``storage_steps``).

Owns the measurement. The yardstick writes and reads the same bytes with one pwritev or preadv per
page, without keys, headers or hashes; it is interleaved with the measured runs, so that a busy
machine slows both. Reads are warm (from the page cache) and cold (dropped from it before). Every
byte that comes back is compared. Takes about 1 GiB of memory and 2 GiB of disk.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

import numpy as np

from stratakv.bench.storage_redis import TARGET_RATIO as REDIS_TARGET
from stratakv.bench.storage_redis import measure_redis
from stratakv.bench.storage_steps import TARGET as STEP_TARGET
from stratakv.bench.storage_steps import step_time_ratios
from stratakv.core.clock import WallClock
from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import (
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
TARGETS: Final = {"write_ratio": 0.75, "read_warm_ratio": 0.8, "read_cold_ratio": 0.85}
CONTAINS_TARGET_MS: Final = 10.0
OPEN_TARGET_S: Final = 5.0
_RUN_BYTES: Final = 256 << 20
_BATCH_BYTES: Final = 32 << 20
_REPEATS: Final = 7
_KEYS: Final = 10_000
_DIGEST: Final = b"stratakv bench 1"
_QUOTA_BYTES: Final = 32 << 30
"""The store cuts it into segments of a 64th. Few take it as small as the bench's bytes, and then
the kernel's read-ahead would start anew every few milliseconds, which it does not for the slab."""

Opener: TypeAlias = Callable[[StoreFormat], StorageBackend]
"""Opens an empty store that holds at least 1 GiB, each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
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
    raw_cold_gb_s: float


def run(
    json_path: str | None, directory: Path | None = None, redis_url: str | None = None
) -> dict[str, object]:
    """Measure the file store in ``directory`` (default: the one for temporary files), without a key
    and with one, and the Redis at ``redis_url`` if given; print a table, write the JSON to
    ``json_path`` if given. Three to four minutes. StorageError where Redis does not answer."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="stratakv-bench-") as name:
        root = Path(name)
        openers = {"file": _file_opener(root), "file+key": _sealed_opener(root)}
        cases = [
            measure(name, opener, root, kib << 10)
            for name, opener in openers.items()
            for kib in PAGE_KIB
        ]
        contains_ms = measure_contains(_file_opener(root))
        print_table(cases, contains_ms)
        steps = step_time_ratios(root)
    print(
        f"CPU time of a step with a store to that without: {steps['step_time_ratio']:.2f}; "
        f"where the forward does nothing: {steps['scheduler_time_ratio']:.2f}"
    )
    redis = [] if redis_url is None else [measure_redis(redis_url, kib << 10) for kib in PAGE_KIB]
    for one in redis:
        print(
            f"redis    {one.page_bytes >> 10:8d}  {one.write_gb_s:5.2f} {one.write_ratio:5.2f}  "
            f"{one.read_gb_s:5.2f} {one.read_warm_ratio:5.2f}  (to pipelined redis-py)"
        )
    report: dict[str, object] = {
        "targets": {
            **TARGETS,
            "contains_10k_ms": CONTAINS_TARGET_MS,
            "step_time_ratio": STEP_TARGET,
            "redis_ratio": REDIS_TARGET,
        },
        "cases": [asdict(case) for case in cases]
        + [asdict(one) | {"read_cold_ratio": None} for one in redis],
        "contains_10k_ms": contains_ms,
        **steps,
    }
    if json_path is not None:
        Path(json_path).write_text(json.dumps(report, indent=2) + "\n")
    return report


def print_table(cases: Sequence[Case], contains_ms: float) -> None:
    print("store beside a raw slab loop; GB/s and ratio to raw")
    print("backend  page KiB   write        warm read    cold read")
    for case in cases:
        cold = "-" if case.read_cold_gb_s is None else f"{case.read_cold_gb_s:5.2f}"
        cold += "" if case.read_cold_ratio is None else f" {case.read_cold_ratio:5.2f}"
        print(
            f"{case.backend:8s} {case.page_bytes >> 10:8d}  {case.write_gb_s:5.2f} "
            f"{case.write_ratio:5.2f}  {case.read_gb_s:5.2f} {case.read_warm_ratio:5.2f}  {cold}"
        )
    print(f"contains of {_KEYS} keys: {contains_ms:.2f} ms")


def measure(backend: str, opener: Opener, root: Path, page_bytes: int) -> Case:
    """One backend at one page size; ``root`` is where the raw slab goes, and on which the cache is
    dropped."""
    source, target = _pages(page_bytes, fill=True), _pages(page_bytes, fill=False)
    slab = _Slab(root, page_bytes)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        begin_s = time.perf_counter()
        work()
        seconds.setdefault(name, []).append(time.perf_counter() - begin_s)

    form = StoreFormat(spec_digest=_DIGEST, page_bytes=(page_bytes,))
    store = opener(form)
    has_cache = isinstance(store.inner if isinstance(store, SealedBackend) else store, FileStore)
    for turn in range(_REPEATS + 1):
        keys = _keys(len(source), turn)
        # Who comes second meets what the first has left in the caches: they take turns.
        order = slice(None, None, 1 if turn % 2 else -1)
        pairs = (("raw write", slab.write), ("store write", partial(_write, store, keys)))
        for name, move in pairs[order]:
            _write_out(root)
            timed(name, partial(move, source))
        readers = _readers(slab, store, keys)
        for name, move in readers[order]:
            timed(f"{name} warm", partial(move, target))
        assert all(a == b for a, b in zip(source, target, strict=True)), "bytes differ"
        if turn < _REPEATS:
            store.remove(keys)
    readers = _readers(slab, store, _keys(len(source), _REPEATS))
    for turn in range(_REPEATS + 1):
        for name, move in readers[:: 1 if turn % 2 else -1]:
            if has_cache:
                _write_out(root, drop=True)
            timed(f"{name} cold", partial(move, target))
    store.close()
    slab.close()
    # The first round warms what the machine keeps, and takes the disk's blocks.
    kept = {name: values[1:] for name, values in seconds.items()}
    speed = {name: _RUN_BYTES / median(values) / 1e9 for name, values in kept.items()}

    def ratio(name: str) -> float:
        pairs = zip(kept[f"raw {name}"], kept[f"store {name}"], strict=True)
        return median(raw_s / taken_s for raw_s, taken_s in pairs)

    return Case(
        backend=backend,
        page_bytes=page_bytes,
        write_ratio=ratio("write"),
        read_warm_ratio=ratio("warm"),
        read_cold_ratio=ratio("cold") if has_cache else None,
        write_gb_s=speed["store write"],
        read_gb_s=speed["store warm"],
        read_cold_gb_s=speed["store cold"] if has_cache else None,
        raw_write_gb_s=speed["raw write"],
        raw_read_gb_s=speed["raw warm"],
        raw_cold_gb_s=speed["raw cold"],
    )


def measure_contains(opener: Opener) -> float:
    """Median ms of one question for 10,000 keys, half of which are there."""
    store = opener(StoreFormat(spec_digest=_DIGEST, page_bytes=(512,)))
    keys = _keys(_KEYS, 0)
    page = memoryview(bytes(512))
    store.write(keys[::2], [page] * len(keys[::2]))
    taken: list[float] = []
    for _ in range(_REPEATS):
        begin_s = time.perf_counter()
        found = store.contains(keys)
        taken.append(time.perf_counter() - begin_s)
        assert found[::2].all(), "a stored page is not found"
        assert not found[1::2].any(), "a page is found that was never stored"
    store.close()
    return median(taken) * 1e3


def _readers(
    slab: "_Slab", store: StorageBackend, keys: list[ObjectKey]
) -> list[tuple[str, Callable[[Sequence[memoryview]], None]]]:
    return [("raw", slab.read), ("store", partial(_read, store, keys))]


class _Slab:
    """The yardstick: pages in one preallocated file."""

    def __init__(self, root: Path, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._fd = os.open(root / "slab", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.posix_fallocate(self._fd, 0, _RUN_BYTES)

    def write(self, pages: Sequence[memoryview]) -> None:
        for at, page in enumerate(pages):
            os.pwritev(self._fd, [page], at * self._page_bytes)

    def read(self, pages: Sequence[memoryview]) -> None:
        for at, page in enumerate(pages):
            os.preadv(self._fd, [page], at * self._page_bytes)

    def close(self) -> None:
        os.close(self._fd)


def _file_opener(root: Path) -> Opener:
    def opener(form: StoreFormat) -> StorageBackend:
        directory = Path(tempfile.mkdtemp(dir=root))
        return FileStore(directory, form, StoreLimits(quota_bytes=_QUOTA_BYTES), WallClock())

    return opener


def _sealed_opener(root: Path) -> Opener:
    """As a server with ``--storage-key-file`` has it."""
    key, opener = StoreKey(bytes(range(LEAST_BYTES))), _file_opener(root)

    def sealed(form: StoreFormat) -> StorageBackend:
        inner = sealed_form(form, key)
        return SealedBackend(opener(inner), inner, key)

    return sealed


def _write(store: StorageBackend, keys: list[ObjectKey], pages: Sequence[memoryview]) -> None:
    for part in _batches(pages):
        statuses = store.write(keys[part], pages[part])
        assert set(statuses) == {WriteStatus.STORED}, f"not stored: {set(statuses)}"


def _read(store: StorageBackend, keys: list[ObjectKey], into: Sequence[memoryview]) -> None:
    for part in _batches(into):
        statuses = store.read(keys[part], into[part])
        assert set(statuses) == {ReadStatus.HIT}, f"no hits: {set(statuses)}"


def _batches(pages: Sequence[memoryview]) -> list[slice]:
    step = max(1, _BATCH_BYTES // len(pages[0]))
    return [slice(at, at + step) for at in range(0, len(pages), step)]


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


def _pages(page_bytes: int, *, fill: bool) -> list[memoryview]:
    rng = np.random.default_rng(page_bytes)
    view = memoryview(bytearray(rng.bytes(_RUN_BYTES) if fill else _RUN_BYTES))
    return [view[at : at + page_bytes] for at in range(0, _RUN_BYTES, page_bytes)]


def _keys(count: int, turn: int) -> list[ObjectKey]:
    rng = np.random.default_rng(turn)
    return [ObjectKey(PageKey(rng.bytes(32)), GroupId(0)) for _ in range(count)]

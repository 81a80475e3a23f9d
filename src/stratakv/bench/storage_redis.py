"""The Redis backend beside pipelined redis-py, with the same bytes on the same server.

Owns the measurement. The yardstick is what a careful user of the client would write: one pipeline
for a batch of values of the same size, without keys of ours, headers or hashes; what it reads stays
in the client's own bytes. Runs are interleaved, and every byte that the backend reads is compared.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final, TypeAlias

import numpy as np

from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import Everything, ObjectKey, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.header import HEADER_BYTES
from stratakv.storage.redis import RedisBackend, RedisOptions

TARGET_RATIO: Final = 0.8
_RUN_BYTES: Final = 64 << 20
_BATCH_BYTES: Final = 16 << 20
_REPEATS: Final = 15
_DIGEST: Final = b"stratakv bench 2"

Client: TypeAlias = Any
"""``redis.Redis``, whose pipelines have no precise types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisCase:
    """Medians of runs; a ratio is the median of those of neighbouring runs. GB are 10^9 bytes."""

    backend: str
    page_bytes: int
    write_ratio: float
    read_warm_ratio: float
    write_gb_s: float
    read_gb_s: float


def measure_redis(url: str, page_bytes: int) -> RedisCase:
    """``url`` as redis-py takes it: a server with 256 MiB to spare, whose keys below ``stratakv-
    bench`` are ours. StorageError where it does not answer."""
    import redis  # noqa: PLC0415 - an extra

    form = StoreFormat(spec_digest=_DIGEST, page_bytes=(page_bytes,))
    store = RedisBackend(form, RedisOptions(url=url, prefix="stratakv-bench"))
    client = redis.Redis.from_url(url)
    count = _RUN_BYTES // page_bytes
    rng = np.random.default_rng(page_bytes)
    pages = rng.integers(0, 256, (count, page_bytes), np.uint8)
    back = np.zeros_like(pages)
    values = [bytes(HEADER_BYTES) + page.tobytes() for page in pages]
    keys = [ObjectKey(PageKey(rng.bytes(32)), GroupId(0)) for _ in range(count)]
    names = [f"stratakv-bench-raw:{key.page.hex()}" for key in keys]
    works: dict[str, Callable[[], None]] = {
        "raw write": partial(_raw_write, client, names, values),
        "store write": partial(_write, store, keys, pages),
        "raw read": partial(_raw_read, client, names),
        "store read": partial(_read, store, keys, back),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    try:
        for turn in range(_REPEATS + 1):
            store.remove(Everything.EVERYTHING)
            client.delete(*names)
            for verb in ("write", "read"):
                for who in ("raw", "store")[:: 1 if turn % 2 else -1]:
                    begin_s = time.perf_counter()
                    works[f"{who} {verb}"]()
                    seconds[f"{who} {verb}"].append(time.perf_counter() - begin_s)
            assert (back == pages).all(), "bytes differ"
    finally:
        store.remove(Everything.EVERYTHING)
        client.delete(*names)
        client.close()
        store.close()
    kept = {name: taken_s[1:] for name, taken_s in seconds.items()}  # the first one warms up

    def ratio(verb: str) -> float:
        pairs = zip(kept[f"raw {verb}"], kept[f"store {verb}"], strict=True)
        return median(raw_s / store_s for raw_s, store_s in pairs)

    return RedisCase(
        backend="redis",
        page_bytes=page_bytes,
        write_ratio=ratio("write"),
        read_warm_ratio=ratio("read"),
        write_gb_s=_RUN_BYTES / median(kept["store write"]) / 1e9,
        read_gb_s=_RUN_BYTES / median(kept["store read"]) / 1e9,
    )


def _batches(count: int, page_bytes: int) -> list[slice]:
    step = max(1, _BATCH_BYTES // page_bytes)
    return [slice(at, at + step) for at in range(0, count, step)]


def _raw_write(client: Client, names: Sequence[str], values: Sequence[bytes]) -> None:
    for part in _batches(len(names), len(values[0])):
        pipeline = client.pipeline(transaction=False)
        for name, value in zip(names[part], values[part], strict=True):
            pipeline.set(name, value)
        pipeline.execute()


def _raw_read(client: Client, names: Sequence[str]) -> None:
    for part in _batches(len(names), _RUN_BYTES // len(names)):
        pipeline = client.pipeline(transaction=False)
        for name in names[part]:
            pipeline.get(name)
        assert None not in pipeline.execute(), "a value is not there"


def _write(store: RedisBackend, keys: Sequence[ObjectKey], pages: np.ndarray[Any, Any]) -> None:
    for part in _batches(len(keys), pages.shape[1]):
        done = store.write(keys[part], [page.data for page in pages[part]])
        assert set(done) == {WriteStatus.STORED}, f"not stored: {set(done)}"


def _read(store: RedisBackend, keys: Sequence[ObjectKey], back: np.ndarray[Any, Any]) -> None:
    for part in _batches(len(keys), back.shape[1]):
        found = store.read(keys[part], [page.data for page in back[part]])
        assert set(found) == {ReadStatus.HIT}, f"no hits: {set(found)}"

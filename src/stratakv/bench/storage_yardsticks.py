"""The yardsticks of ``stratakv bench storage``: pages without keys of ours, headers or hashes.

Owns what is moved, and how it would be moved by hand: in one file, and through redis-py.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from stratakv.core.choices import given
from stratakv.core.errors import ConfigError
from stratakv.storage.backend import StoreFormat
from stratakv.storage.header import HEADER_BYTES
from stratakv.storage.redis import RedisBackend
from stratakv.storage.urls import RedisOptions, hidden

REDIS_TARGET: Final = 0.8
_PREFIX: Final = "stratakv-bench"

Client: TypeAlias = Any
"""``redis.Redis``, whose pipelines have no precise types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes of a run and of a batch, and runs of a case."""

    run_bytes: int
    batch_bytes: int
    repeats: int

    def pages(self, page_bytes: int) -> list[memoryview]:
        """Of a run, filled."""
        filled = np.random.default_rng(page_bytes).bytes(self.run_bytes)
        return cut(bytearray(filled), page_bytes)

    def batches(self, pages: Sequence[memoryview]) -> list[slice]:
        step = max(1, self.batch_bytes // len(pages[0]))
        return [slice(at, at + step) for at in range(0, len(pages), step)]


class StorageYardstick(Protocol):
    """The same pages, ``source``, moved without keys of ours, headers or hashes."""

    source: list[memoryview]

    @property
    def extent(self) -> Extent: ...

    def clear(self) -> None: ...

    def write(self, pages: Sequence[memoryview]) -> None:
        """All of ``source``."""
        ...

    def read(self, pages: Sequence[memoryview]) -> None: ...

    def close(self) -> None: ...


def cut(room: bytearray, page_bytes: int) -> list[memoryview]:
    view = memoryview(room)
    return [view[at : at + page_bytes] for at in range(0, len(view), page_bytes)]


FILES: Final = Extent(run_bytes=256 << 20, batch_bytes=32 << 20, repeats=7)
SERVERS: Final = Extent(run_bytes=64 << 20, batch_bytes=16 << 20, repeats=15)


class Slab:
    """The yardstick of files: pages in a preallocated one."""

    extent = FILES

    def __init__(self, root: Path, source: list[memoryview]) -> None:
        self.source = source
        self._fd = os.open(root / "slab", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.posix_fallocate(self._fd, 0, self.extent.run_bytes)

    def clear(self) -> None:
        """Nothing: its blocks are taken beforehand."""

    def write(self, pages: Sequence[memoryview]) -> None:
        for at, page in enumerate(pages):
            os.pwritev(self._fd, [page], at * len(page))

    def read(self, pages: Sequence[memoryview]) -> None:
        for at, page in enumerate(pages):
            os.preadv(self._fd, [page], at * len(page))

    def close(self) -> None:
        os.close(self._fd)


def check_redis(url: str) -> None:
    """ConfigError for a server that does not answer, or a URL of none."""
    import redis  # noqa: PLC0415 - an extra

    try:
        with redis.Redis.from_url(url) as client:
            client.ping()
    except (ValueError, redis.RedisError) as error:
        raise ConfigError(
            f"{given('--redis', hidden(url))}: {error}; allowed is redis://HOST:PORT/NUMBER of a "
            "server that answers"
        ) from error


def redis_opener(url: str) -> Callable[[StoreFormat], RedisBackend]:
    """``url`` as redis-py takes it: a server with 256 MiB to spare, whose keys below ``_PREFIX``
    are ours. StorageError, when it opens, where it does not answer."""
    return lambda form: RedisBackend(form, RedisOptions(url=url, prefix=_PREFIX))


class Pipelines:
    """The yardstick of Redis, what a careful user of its client would write: one pipeline for a
    batch of values of the same size, which stay in the client's own bytes when they are read."""

    extent = SERVERS

    def __init__(self, client: Client, source: list[memoryview]) -> None:
        self.source = source
        self._client = client
        self._values = [bytes(HEADER_BYTES) + bytes(page) for page in source]
        self._names = [f"{_PREFIX}-raw:{at}" for at in range(len(source))]

    @classmethod
    def of(cls, url: str, page_bytes: int) -> "Pipelines":
        import redis  # noqa: PLC0415 - an extra

        return cls(redis.Redis.from_url(url), SERVERS.pages(page_bytes))

    def clear(self) -> None:
        self._client.delete(*self._names)

    def write(self, pages: Sequence[memoryview]) -> None:
        for part in self.extent.batches(pages):
            pipeline = self._client.pipeline(transaction=False)
            for name, value in zip(self._names[part], self._values[part], strict=True):
                pipeline.set(name, value)
            pipeline.execute()

    def read(self, pages: Sequence[memoryview]) -> None:
        for part in self.extent.batches(pages):
            pipeline = self._client.pipeline(transaction=False)
            for name in self._names[part]:
                pipeline.get(name)
            assert None not in pipeline.execute(), "a value is not there"

    def close(self) -> None:
        self.clear()
        self._client.close()

"""Pages in an S3 bucket, one object each, through obstore.

Owns the requests: many at once, bounded, inside one blocking call, on an event loop that runs only
during that call. What expires is a lifecycle rule of the bucket. Must not have threads or keep an
index.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from stratakv.core.errors import ConfigError, StorageError
from stratakv.storage.backend import Everything, ObjectKey, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.header import HEADER_BYTES, payload_hash
from stratakv.storage.remote_object import (
    are_genuine,
    blank_heads,
    first_places,
    head_views,
    library_missing,
    name_of,
    seal_head,
    unsealed_heads,
)
from stratakv.storage.urls import S3Options

if TYPE_CHECKING:
    from obstore.store import S3Store

_CODE: Final = re.compile(r"<Code>(\w{1,60})</Code>|status code: (\d{3})")
_NO_ROOM: Final = frozenset({"QuotaExceeded", "XMinioStorageFull", "507"})
DELETED_AT_ONCE: Final = 1000

T = TypeVar("T")
Item = TypeVar("Item")


class S3Backend:
    """A ``StorageBackend``. Asks for one object when it is made, so that a missing bucket, a wrong
    key or a right that is lacking (``s3:ListBucket`` too: without it a miss is forbidden) is
    known at once.

    ConfigError where obstore is missing or does not take the settings; StorageError where the
    service does not answer or does not let us in.
    """

    def __init__(self, form: StoreFormat, options: S3Options) -> None:
        self._form, self._options = form, options
        self._root = f"{options.prefix}/" if options.prefix else ""
        self._store = _open(options)
        self._runner: asyncio.Runner | None = asyncio.Runner()
        try:
            self._run(self._get(f"{self._root}{form.spec_digest.hex()}/probe"))
        except BaseException:
            self.close()
            raise

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        names = self._names(keys)
        return np.array(self._run(self._each(self._is_there, names)), np.bool_)

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        names = self._names(keys)
        heads = blank_heads(len(keys))
        places = list(zip(names, head_views(heads), into, strict=True))
        hashes = self._run(self._each(self._land, places))
        genuine = are_genuine(keys, self._form, heads, [each or 0 for each in hashes])
        statuses = [
            ReadStatus.MISS if each is None else ReadStatus.HIT if good else ReadStatus.CORRUPT
            for each, good in zip(hashes, genuine.tolist(), strict=True)
        ]
        corrupt = [n for n, s in zip(names, statuses, strict=True) if s is ReadStatus.CORRUPT]
        if corrupt:
            # Put aside: what is gone is written anew, what stays would be refused as present.
            with suppress(StorageError):
                self._run(self._delete(corrupt))
        return statuses

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        heads = head_views(unsealed_heads(keys, self._form))
        objects = list(zip(self._names(keys), heads, pages, strict=True))
        first = first_places(keys)
        done = self._run(self._each(self._put, [objects[i] for i in first.values()]))
        statuses = dict(zip(first, done, strict=True))
        again = {key: _again(status) for key, status in statuses.items()}
        return [(statuses if first[key] == i else again)[key] for i, key in enumerate(keys)]

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """S3 knows no last use."""

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        if isinstance(keys, Everything):
            return self._run(self._delete_all())
        names = np.array(self._names(keys), object)
        there = names[self.contains(keys)].tolist()
        self._run(self._delete(there))
        return len(there)

    def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _names(self, keys: Sequence[ObjectKey]) -> list[str]:
        return [f"{self._root}{name_of(key, self._form)}" for key in keys]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._runner is None:
            work.close()
            raise StorageError("s3: the store is closed")
        try:
            return self._runner.run(work)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _each(self, one: Callable[[Item], Awaitable[T]], items: Sequence[Item]) -> list[T]:
        """``one`` for every item, ``concurrency`` at a time; the first that raises ends it all."""
        gate = asyncio.Semaphore(self._options.concurrency)

        async def bounded(item: Item) -> T:
            async with gate:
                return await one(item)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(bounded(item)) for item in items]
        return [task.result() for task in tasks]

    async def _is_there(self, name: str) -> bool:
        try:
            await self._store.head_async(name)
        except FileNotFoundError:
            return False
        except Exception as error:  # noqa: BLE001 - obstore raises builtins and its own
            raise _failed("HEAD", error) from None
        return True

    async def _get(self, name: str) -> memoryview | None:
        try:
            return memoryview(await (await self._store.get_async(name)).bytes_async())
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise _failed("GET", error) from None
            return None
        except Exception as error:  # noqa: BLE001 - obstore raises builtins and its own
            raise _failed("GET", error) from None

    async def _land(self, place: tuple[str, memoryview, memoryview]) -> int | None:
        """The hash of what is now in the buffer; None: no such object; 0: it did not fit."""
        name, head, page = place
        data = await self._get(name)
        if data is None:
            return None
        if len(data) != HEADER_BYTES + len(page):
            return 0
        head[:] = data[:HEADER_BYTES]
        page[:] = data[HEADER_BYTES:]
        return payload_hash(page)

    async def _put(self, item: tuple[str, memoryview, memoryview]) -> WriteStatus:
        name, head, page = item
        seal_head(head, page)
        try:
            await self._store.put_async(name, [head, page], mode="create", use_multipart=False)
        except Exception as error:  # noqa: BLE001 - obstore raises builtins and its own
            if type(error).__name__ == "AlreadyExistsError":
                return WriteStatus.PRESENT
            if _code(error) in _NO_ROOM:
                return WriteStatus.REFUSED
            raise _failed("PUT", error) from None
        return WriteStatus.STORED

    async def _delete(self, names: list[str]) -> None:
        try:
            for begin in range(0, len(names), DELETED_AT_ONCE):
                await self._store.delete_async(names[begin : begin + DELETED_AT_ONCE])
        except Exception as error:  # noqa: BLE001 - obstore raises builtins and its own
            raise _failed("DELETE", error) from None

    async def _delete_all(self) -> int:
        place, deleted = f"{self._root}{self._form.spec_digest.hex()}/", 0
        try:
            async for some in self._store.list(place, chunk_size=DELETED_AT_ONCE):
                await self._delete([found["path"] for found in some])
                deleted += len(some)
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001 - obstore raises builtins and its own
            raise _failed("LIST", error) from None
        return deleted


def _again(status: WriteStatus) -> WriteStatus:
    """Of a second write right after the first one."""
    return WriteStatus.PRESENT if status is WriteStatus.STORED else status


def _open(options: S3Options) -> "S3Store":
    try:
        from obstore.store import S3Store  # noqa: PLC0415 - only who uses it needs it
    except ImportError as error:
        raise library_missing("s3", error) from error
    settings: dict[str, Any] = dict(options.settings)
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=options.timeout_s),
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
    }
    if str(settings.get("endpoint", "")).startswith("http://"):
        # Without an endpoint of ours the library's environment decides this too.
        client["allow_http"] = True
    try:
        return S3Store(
            options.bucket,
            **settings,
            client_options=cast("Any", client),
            retry_config={
                "max_retries": options.retries,
                "retry_timeout": timedelta(seconds=options.timeout_s),
            },
        )
    except Exception as error:  # noqa: BLE001 - obstore raises builtins and its own
        # The library's text may quote a setting, and a setting may be a secret.
        allowed = "the settings of obstore's S3Config"
        raise ConfigError(
            f"--storage s3://{options.bucket}: {type(error).__name__}: allowed are {allowed}"
        ) from None


def _code(error: BaseException) -> str:
    """What the service called it, else the status of HTTP, else the type of the exception."""
    found = _CODE.findall(str(error))
    words = [code for code, _ in found if code] or [status for _, status in found]
    return words[0] if words else type(error).__name__


def _failed(what: str, error: BaseException) -> StorageError:
    """Short and without what was sent: the library's own text quotes requests and answers."""
    return StorageError(f"s3: {what} failed: {_code(error)}")

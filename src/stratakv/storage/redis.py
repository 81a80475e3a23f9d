"""Pages in Redis or Valkey, one string each, over connections that redis-py opens.

Owns the commands. A batch is pipelined and bounded in bytes, so neither end holds more of it than
that. What is evicted is the server's choice (``maxmemory-policy``; its clock counts seconds). Must
not have threads or keep an index.
"""

import re
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stratakv.core.errors import StorageError
from stratakv.storage.backend import Everything, ObjectKey, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.header import HEADER_BYTES, payload_hash
from stratakv.storage.redis_wire import RedisWire, Reply, ServerError, command
from stratakv.storage.remote_object import (
    are_genuine,
    batches,
    blank_heads,
    head_views,
    library_missing,
    name_of,
    seal_head,
    unsealed_heads,
)
from stratakv.storage.urls import RedisOptions

_NO_ROOM: Final = frozenset({"OOM", "MISCONF", "READONLY", "NOREPLICAS"})
"""Answers of a server that cannot take a write now, though it is otherwise well."""
_CONTROL: Final = 4096
"""Small commands in one round trip."""
_MOST_NAMES: Final = 16 * _CONTROL
"""Names in one answer to SCAN, which takes the number that is asked for as a hint."""
_NAME_BYTES: Final = 1024
_CURSOR_BYTES: Final = 20
_CLEAR_TIMEOUTS: Final = 12
"""What the removal of everything may take, in ``timeout_s``: whoever writes waits behind it."""


class RedisBackend:
    """A ``StorageBackend``. Connects when it is made, and again after every failure.

    ConfigError where redis-py is missing; StorageError where the server cannot be reached or does
    not let us in.
    """

    def __init__(self, form: StoreFormat, options: RedisOptions) -> None:
        try:
            import redis  # noqa: PLC0415 - only who uses it needs it
            from redis.backoff import NoBackoff  # noqa: PLC0415
            from redis.retry import Retry  # noqa: PLC0415
        except ImportError as error:
            raise library_missing("redis", error) from error
        self._form, self._options = form, options
        # Retries are the I/O worker's; protocol 2 because `RedisWire` reads that one.
        self._pool: Any = redis.ConnectionPool.from_url(
            options.url,
            **options.login,
            protocol=2,
            socket_timeout=options.timeout_s,
            socket_connect_timeout=options.connect_timeout_s,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=self._log_in,
        )
        with self._wire() as wire:
            wire.send([command(b"PING")])
            _expect(wire.reply(), "PING")

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        return np.array(self._count([command(b"EXISTS", name) for name in self._names(keys)]), bool)

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        statuses: list[ReadStatus] = []
        with self._wire() as wire:
            for at in batches([HEADER_BYTES + len(page) for page in into], self._batch_bytes):
                statuses += self._read_batch(wire, keys[at], into[at])
        corrupt = [i for i, status in enumerate(statuses) if status is ReadStatus.CORRUPT]
        if corrupt:
            # Put aside: what is gone is written anew, what stays would be refused as present.
            with suppress(StorageError):
                self.remove([keys[i] for i in corrupt])
        return statuses

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        statuses = [WriteStatus.PRESENT] * len(keys)
        # One small round trip first: a shared server has most pages of a busy prefix already.
        absent = np.flatnonzero(~self.contains(keys)).tolist()
        with self._wire() as wire:
            sizes = [HEADER_BYTES + len(pages[i]) for i in absent]
            for at in batches(sizes, self._batch_bytes):
                some = absent[at]
                done = self._write_batch(wire, [keys[i] for i in some], [pages[i] for i in some])
                for i, status in zip(some, done, strict=True):
                    statuses[i] = status
        return statuses

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        ttl_s = self._options.ttl_s
        with suppress(StorageError):
            if ttl_s is None:
                self._count([command(b"TOUCH", name) for name in self._names(keys)])
            else:
                ttl = _milliseconds(ttl_s)
                self._count([command(b"PEXPIRE", name, ttl) for name in self._names(keys)])

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        if isinstance(keys, Everything):
            return self._remove_all()
        return sum(self._count([command(b"UNLINK", name) for name in self._names(keys)]))

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.disconnect()

    @property
    def _batch_bytes(self) -> int:
        return self._options.batch_bytes

    def _names(self, keys: Sequence[ObjectKey]) -> list[bytes]:
        prefix = self._options.prefix
        return [f"{prefix}:{name_of(key, self._form, ':')}".encode() for key in keys]

    def _remove_all(self) -> int:
        place = f"{self._options.prefix}:{self._form.spec_digest.hex()}:"
        pattern = re.sub(r"[][*?^\\-]", r"\\\g<0>", place).encode() + b"*"
        removed, cursor, seen = 0, b"0", set[bytes]()
        end_s = time.monotonic() + _CLEAR_TIMEOUTS * self._options.timeout_s
        with self._wire() as wire:
            while True:
                wire.within(self._options.timeout_s)
                wire.send([command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _CONTROL)])
                cursor, names = _scanned(wire, place.encode())
                if names:
                    wire.send([command(b"UNLINK", *names)])
                    removed += _number(wire.reply())
                if cursor == b"0":
                    return removed
                # A cursor counts on and never comes again; one that does would go round for ever.
                if cursor in seen or time.monotonic() > end_s:
                    raise StorageError(f"redis: SCAN has no end; {removed} objects were removed")
                seen.add(cursor)

    def _count(self, commands: Sequence[bytes]) -> list[int]:
        """Pipeline commands that answer with a number."""
        numbers: list[int] = []
        with self._wire() as wire:
            for begin in range(0, len(commands), _CONTROL):
                some = commands[begin : begin + _CONTROL]
                wire.within(self._options.timeout_s)
                wire.send([b"".join(some)])
                numbers += [_number(wire.reply()) for _ in some]
        return numbers

    def _read_batch(
        self, wire: RedisWire, keys: Sequence[ObjectKey], into: Sequence[memoryview]
    ) -> list[ReadStatus]:
        wire.within(self._options.timeout_s)
        wire.send([b"".join([command(b"GET", name) for name in self._names(keys)])])
        heads = blank_heads(len(keys))
        statuses = [ReadStatus.HIT] * len(keys)
        hashes = [0] * len(keys)
        for i, (head, page) in enumerate(zip(head_views(heads), into, strict=True)):
            length = wire.bulk((head, page))
            if isinstance(length, ServerError):
                # Under our name, but no string: the blank header makes it CORRUPT.
                if length.code != "WRONGTYPE":
                    raise _refused("GET", length)
            elif length is None:
                statuses[i] = ReadStatus.MISS
            elif length == HEADER_BYTES + len(page):
                hashes[i] = payload_hash(page)
        genuine = are_genuine(keys, self._form, heads, hashes)
        for i in np.flatnonzero(~genuine).tolist():
            if statuses[i] is ReadStatus.HIT:
                statuses[i] = ReadStatus.CORRUPT
        return statuses

    def _write_batch(
        self, wire: RedisWire, keys: Sequence[ObjectKey], pages: Sequence[memoryview]
    ) -> Iterator[WriteStatus]:
        ttl_s = self._options.ttl_s
        options = [b"NX"] if ttl_s is None else [b"NX", b"PX", _milliseconds(ttl_s)]
        tail = command(*options).partition(b"\r\n")[2]
        heads = head_views(unsealed_heads(keys, self._form))
        wire.within(self._options.timeout_s)
        after = b""
        for name, head, page in zip(self._names(keys), heads, pages, strict=True):
            seal_head(head, page)
            start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n" % (3 + len(options), len(name), name)
            size = b"$%d\r\n" % (HEADER_BYTES + len(page))
            wire.send((b"".join((after, start, size, head)), page))
            after = b"\r\n" + tail
        wire.send((after,))
        return map(_written, [wire.reply() for _ in keys])

    @contextmanager
    def _wire(self) -> Generator[RedisWire]:
        """The connection, alive and in step; it is given up where the body does not get through."""
        if self._pool is None:
            raise StorageError("redis: the store is closed")
        try:
            connection = self._pool.get_connection()
        except StorageError:
            raise
        except Exception as error:  # its parser may raise anything, as on what it did not ask for
            raise StorageError(f"redis: no connection: {error}") from error
        try:
            # redis-py has no public way to a reply's bytes that does not copy them first.
            wire = RedisWire(connection._sock)  # noqa: SLF001
            wire.within(self._options.timeout_s)
            yield wire
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)

    def _log_in(self, connection: Any) -> None:  # noqa: ANN401 - redis-py
        """In place of redis-py's own way, which takes any answer however long it is, and as much
        time as its pieces take together."""
        connection._parser.on_connect(connection)  # noqa: SLF001 - or it misses a dropped connection
        words = [part.encode() for part in (connection.username, connection.password) if part]
        logins = [command(b"AUTH", *words)] if words else []
        if connection.db:
            logins.append(command(b"SELECT", b"%d" % connection.db))
        try:
            wire = RedisWire(connection._sock)  # noqa: SLF001 - as in `_wire`
            for login in logins:
                wire.within(self._options.timeout_s)
                wire.send([login])
                _expect(wire.reply(), "the login")
        except BaseException:  # or the pool would keep a connection that nobody has logged in
            connection.disconnect()
            raise


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % max(1, round(seconds * 1000))


def _refused(what: str, error: ServerError) -> StorageError:
    return StorageError(f"redis: {what} was refused: {error}")


def _expect(reply: Reply, what: str) -> None:
    if isinstance(reply, ServerError):
        raise _refused(what, reply)
    if not isinstance(reply, bytes):
        raise StorageError(f"redis: an unexpected answer to {what}")


def _number(reply: Reply) -> int:
    if isinstance(reply, ServerError):
        raise _refused("a command", reply)
    if not isinstance(reply, int):
        raise StorageError("redis: an answer is no number")
    return reply


def _scanned(wire: RedisWire, place: bytes) -> tuple[bytes, list[bytes]]:
    """The reply to SCAN: where to go on, and what was found, all of which begins with ``place``."""
    parts = wire.array(2)
    if isinstance(parts, ServerError):
        raise _refused("SCAN", parts)
    cursor = wire.string(_CURSOR_BYTES)
    found = wire.array(_MOST_NAMES)
    if isinstance(found, ServerError) or parts != 2 or not cursor.isdigit():
        raise StorageError("redis: an unexpected answer to SCAN")
    names = [wire.string(_NAME_BYTES) for _ in range(found)]
    if not all(name.startswith(place) for name in names):
        raise StorageError("redis: SCAN found what is not ours")
    return cursor, names


def _written(reply: Reply) -> WriteStatus:
    match reply:
        case b"OK":
            return WriteStatus.STORED
        case None:
            return WriteStatus.PRESENT
        case ServerError() if reply.code in _NO_ROOM:
            return WriteStatus.REFUSED
        case ServerError():
            raise _refused("SET", reply)
        case _:
            raise StorageError("redis: an unexpected answer to SET")

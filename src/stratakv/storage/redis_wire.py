"""Commands and replies of a Redis connection, without the client's copies.

Owns the bytes on one socket that redis-py has opened, secured and logged in: redis-py copies a
reply four times before its caller sees it, here a page goes from the kernel into its buffer. Every
call has one deadline, so that a server that drips is as bounded as one that is silent. Must not
know what a page is.
"""

import re
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Final

from stratakv.core.errors import StorageError

_STAGED_BYTES: Final = 4096
"""Read at once where the next bytes are a line: what follows it was copied once too often, so it
is little."""


_NUMBER: Final = re.compile(rb"-?[0-9]{1,19}")
_MOST_BYTES: Final = 512 << 20
"""Of a string, by Redis's own rule: nobody waits for more."""
_SHOWN: Final = 200
"""Characters of what a server says, for a log: it may say anything."""


class ServerError(Exception):
    """The server answered ``-CODE text``. Not a fault of the connection."""

    def __init__(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace")[:_SHOWN]
        super().__init__("".join(c if c.isprintable() else "?" for c in text))
        self.code = text.partition(" ")[0]


Reply = int | bytes | None | ServerError
"""A number, a simple string, nothing, or a refusal."""


def command(*arguments: bytes) -> bytes:
    """One command as the protocol writes it."""
    parts = [b"*%d\r\n" % len(arguments)]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"".join(parts)


class RedisWire:
    """One socket, one thread. After a StorageError the stream is out of step: close it. Whatever a
    server says, nothing else is raised, and memory is taken for what a caller allows."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._bytes = bytearray(_STAGED_BYTES)
        self._staged = memoryview(self._bytes)
        self._begin = self._end = 0
        self._deadline_s = 0.0

    def within(self, limit_s: float) -> None:
        """What is sent and read from now on ends ``limit_s`` from now, or raises StorageError at
        twice that at the latest: one system call may wait as long as all of them."""
        self._deadline_s = time.monotonic() + limit_s
        self._sock.settimeout(limit_s)

    def send(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Send them all; a chunk is not copied."""
        try:
            for chunk in chunks:
                self._patience()
                self._sock.sendall(chunk)
        except OSError as error:
            raise StorageError(f"redis: sending failed: {error}") from error

    def reply(self) -> Reply:
        """The next reply, which is not a bulk string with something in it."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        match kind:
            case b"+":
                return rest
            case b":":
                return _number(line)
            case b"-":
                return ServerError(rest)
            case b"$" if rest == b"-1":
                return None
            case _:
                raise _unexpected(line)

    def bulk(self, into: Sequence[memoryview]) -> int | ServerError | None:
        """Read the next reply, a bulk string, into these buffers, one after another: its length, or
        None where there is no such key. One of another length than they have is skipped."""
        line = self._line()
        if line[:1] == b"-":
            return ServerError(line[1:])
        if line[:1] != b"$":
            raise _unexpected(line)
        length = _number(line)
        if length == -1:
            return None
        if not 0 <= length <= _MOST_BYTES:
            raise _unexpected(line)
        if length == sum(map(len, into)):
            for place in into:
                self._fill(place)
            self._skip(2)
        else:
            self._skip(length + 2)
        return length

    def array(self, most: int) -> int | ServerError:
        """How many replies the next one has in it, ``most`` at most; they are read one by one."""
        line = self._line()
        if line[:1] == b"-":
            return ServerError(line[1:])
        if line[:1] != b"*" or not 0 <= _number(line) <= most:
            raise _unexpected(line)
        return _number(line)

    def string(self, most: int) -> bytes:
        """The next reply, a bulk string of ``most`` bytes at most, which must be there."""
        line = self._line()
        if line[:1] != b"$" or not 0 <= _number(line) <= most:
            raise _unexpected(line)
        found = bytearray(_number(line))
        self._fill(memoryview(found))
        self._skip(2)
        return bytes(found)

    def _line(self) -> bytes:
        while True:
            stop = self._bytes.find(b"\r\n", self._begin, self._end)
            if stop >= 0:
                line = bytes(self._staged[self._begin : stop])
                self._begin = stop + 2
                return line
            rest = bytes(self._staged[self._begin : self._end])
            if len(rest) == _STAGED_BYTES:
                raise StorageError("redis: a reply line has no end")
            self._staged[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
            self._end += self._receive(self._staged[self._end :])

    def _fill(self, place: memoryview) -> None:
        done = min(self._end - self._begin, len(place))
        place[:done] = self._staged[self._begin : self._begin + done]
        self._begin += done
        while done < len(place):
            done += self._receive(place[done:])

    def _skip(self, length: int) -> None:
        while length > 0:
            if self._begin == self._end:
                self._begin, self._end = 0, self._receive(self._staged)
            step = min(length, self._end - self._begin)
            self._begin += step
            length -= step

    def _receive(self, place: memoryview) -> int:
        self._patience()
        try:
            count = self._sock.recv_into(place)
        except OSError as error:
            raise StorageError(f"redis: reading failed: {error}") from error
        if count == 0:
            raise StorageError("redis: the server closed the connection")
        return count

    def _patience(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise StorageError("redis: the server took too long")


def _number(line: bytes) -> int:
    """What stands behind the first byte of a line."""
    if _NUMBER.fullmatch(line, 1) is None:
        raise _unexpected(line)
    return int(line[1:])


def _unexpected(line: bytes) -> StorageError:
    return StorageError(f"redis: unexpected reply {line[:16]!r}")

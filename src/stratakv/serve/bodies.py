"""Reads request bodies.

Owns their bound, and that of all that are read or worked on at once. Must not know what is in them.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final, TypeAlias

from starlette.requests import Request

from stratakv.serve import fields
from stratakv.serve.errors import ApiError, too_many_bodies
from stratakv.serve.fields import JsonObject

log = logging.getLogger(__name__)

TOGETHER_BYTES: Final = 256 << 20
SMALL_BYTES: Final = 1 << 15
"""A body of that size is always taken: connections are bounded."""
READ_ON: Final = 4
"""Of one that is too large, that many times of what is allowed is read for its client's sake."""

HoldBytes: TypeAlias = Callable[[int], bool]
"""To hold that many bytes for one body, in place of those before; False, and none, where there is
no memory for it."""


class BodyMemory:
    """The bodies that are held at once, ``most_bytes`` of them. A client gets no more than it
    leaves for others: one alone half of it, each of two a third. Used on the event loop alone."""

    def __init__(self, most_bytes: int = TOGETHER_BYTES) -> None:
        self.held_bytes = 0
        self._most_bytes = most_bytes
        self._of_client: Counter[str] = Counter()

    @contextmanager
    def share(self, client: str) -> Generator[HoldBytes]:
        """For one body of ``client``; what it holds is given back at the end of the block."""
        ours = 0

        def hold(size: int) -> bool:
            nonlocal ours
            wanted = size if size > SMALL_BYTES else 0
            left = self._most_bytes - self.held_bytes + ours - wanted
            fits = self._of_client[client] - ours + wanted <= left
            self._set(client, ours, wanted if fits else 0)
            ours = wanted if fits else 0
            return fits or not wanted

        try:
            yield hold
        finally:
            hold(0)

    def _set(self, client: str, before: int, after: int) -> None:
        self.held_bytes += after - before
        self._of_client[client] += after - before
        if not self._of_client[client]:
            del self._of_client[client]


async def json_object(request: Request, most_bytes: int) -> JsonObject:
    """The JSON body, which is read at once: ``most_bytes`` are few."""
    return fields.parse_object(await whole(request, most_bytes, lambda _: True))


async def whole(request: Request, most_bytes: int, hold: HoldBytes) -> bytes:
    """The body. ApiError for one that is too large (413) or for which there is no memory now (503):
    it is read a little further and thrown away, so that a client gets to read the answer instead of
    a broken pipe. One whose header names far too many bytes is refused before it comes."""
    body = bytearray()
    size, fits = 0, True
    if _declared(request) > READ_ON * most_bytes:
        raise _too_large(most_bytes)
    async for chunk in request.stream():
        size += len(chunk)
        fits = fits and size <= most_bytes and hold(size)
        if fits:
            body += chunk
            continue
        body.clear()
        hold(0)
        if size > READ_ON * most_bytes:
            break
    if size > most_bytes:
        raise _too_large(most_bytes)
    if not fits:
        log.warning("requests get a 503: other bodies take the memory that there is for them")
        raise too_many_bodies()
    return bytes(body)


def _declared(request: Request) -> int:
    """Bytes that the header says will come; the server's parser has checked it."""
    given = request.headers.get("content-length", "")
    return int(given) if given.isdecimal() else 0


def _too_large(most_bytes: int) -> ApiError:
    message = f"the request body has more than {most_bytes} bytes"
    return ApiError(message, status=413, code="body_too_large")

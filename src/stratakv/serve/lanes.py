"""Where a request's long computations run: beside the event loop, in turn, short ones apart.

Owns two threads, who waits for each, and in which order. Must not know what is computed.
"""

import asyncio
import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from starlette.requests import Request

T = TypeVar("T")

INLINE_BYTES: Final = 1 << 12
"""Text of that size is worked on where it is: it takes no longer than 2 ms."""
LONG_BYTES: Final = 1 << 16
"""From here on, work waits in the lane of long work, and short work does not wait for it."""
EACH_BYTES: Final = 64
"""A text, a message or a choice costs as much as that many bytes beside its own."""


class FairThread:
    """One thread, which clients use in turn, however much each of them has queued. A request queues
    one piece of work at a time, so that requests of one client take turns as well."""

    def __init__(self, name: str, after: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"stratakv-{name}")
        self._after = after
        self._busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def busy(self) -> bool:
        return self._busy

    @property
    def waiting(self) -> int:
        """Clients whose work waits for its turn."""
        return len(self._waiting)

    async def run(self, client: str, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        if self._busy:
            turn = loop.create_future()
            self._waiting.setdefault(client, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._busy = True
        try:
            return await loop.run_in_executor(self._pool, self._worked, work)
        finally:
            self._pass_on()

    def _worked(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            self._after()

    def _pass_on(self) -> None:
        """The next client's turn; it comes to the end of the row."""
        while self._waiting:
            client, queue = next(iter(self._waiting.items()))
            del self._waiting[client]
            turn = queue.popleft()
            if queue:
                self._waiting[client] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False


class Lanes:
    """Short work has a thread that never does any long."""

    def __init__(self) -> None:
        self.short: Final = FairThread("short", lambda: None)
        self.long: Final = FairThread("long", give_memory_back)

    async def run(self, client: str, size: int, work: Callable[[], T]) -> T:
        """``size``: bytes to work on, with what is left of the same request: many small pieces are
        long work. What ``work`` raises is raised here."""
        if size < INLINE_BYTES:
            return work()
        lane = self.short if size < LONG_BYTES else self.long
        return await lane.run(client, work)


def in_pieces(parts: Sequence[T], size_of: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Neighbours together, about ``LONG_BYTES`` in a piece: what one request works on at a turn."""
    start = size = 0
    for end, part in enumerate(parts, 1):
        size += size_of(part)
        if size >= LONG_BYTES:
            yield parts[start:end]
            start, size = end, 0
    if start < len(parts):
        yield parts[start:]


def client_of(request: Request) -> str:
    """Whose turn it is when work waits."""
    return "" if request.client is None else request.client.host


def give_memory_back() -> None:
    """Return freed memory to the system: glibc keeps what a thread of its has once used."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def _malloc_trim() -> "Callable[[int], int] | None":
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except AttributeError:  # another C library
        return None


_MALLOC_TRIM: Final = _malloc_trim()

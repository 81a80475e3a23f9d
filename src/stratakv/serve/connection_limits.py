"""How many connections there may be, and who has to go when there are more.

Owns the register of open connections, the order in which those leave that nobody works for, and the
answer to who comes when all are worked for. Must not read or write a socket (``connections``).
"""

import logging
import os
import resource
from dataclasses import dataclass
from typing import Final, Protocol

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.disagg.peer_limits import MOST_PEERS
from stratakv.serve.errors import crowded
from stratakv.serve.middleware import OPEN_PATHS

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE: Final = 64
"""Connections that one turn of the event loop accepts."""
SPARE: Final = 64
"""Connections above the limit, in which probes are answered and others refused with a 503."""
RESERVED_FILES: Final = 3 * ACCEPTED_AT_ONCE + SPARE + 64
"""Open files that are none of a counted connection: those that are accepted and not yet made or
closed and not yet gone, spare ones, and stores, sockets and weights of the server's own."""
PEER_FILES: Final = 16
"""Of a link to another server: NIXL's agent has 15 once it is connected, Mooncake's engine 7."""
MOST_FILES: Final = 1 << 16
"""As far as the soft limit is raised: some systems have a hard one of a thousand million."""
MOST_CONNECTIONS: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """``most``: open connections. ``keep_alive_s``: one may stay that long without a request.
    ``request_s``: in which a request has come, and one second more for each
    ``connections.BYTES_PER_S`` of its body."""

    most: int = 512
    keep_alive_s: float = 75.0
    request_s: float = 10.0


LIMITS: Final = ConnectionLimits()


class Leaving(Protocol):
    """A connection, as its register knows it."""

    def leave(self) -> None:
        """Close, now: there is no request whose answer is being made."""
        ...


class Crowd:
    """The open connections of one server; used on its event loop alone."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits: Final = limits
        self._open: set[Leaving] = set()
        self._idle: dict[Leaving, None] = {}

    @property
    def crowded(self) -> bool:
        """There are more than allowed."""
        return len(self._open) > self.limits.most

    def enter(self, one: Leaving) -> bool:
        """Count a new connection; False where there is no room even to refuse it. Where all places
        are taken, the one leaves that has been idle for longest."""
        while len(self._open) >= self.limits.most and self._idle:
            longest = next(iter(self._idle))
            self.exit(longest)
            longest.leave()
        if len(self._open) >= self.limits.most + SPARE:
            log.warning("connections are closed unheard: --limit-concurrency are being answered")
            return False
        self._open.add(one)
        self._idle[one] = None
        return True

    def exit(self, one: Leaving) -> None:
        """It is closed, or will be at once."""
        self._open.discard(one)
        self._idle.pop(one, None)

    def busy(self, one: Leaving) -> None:
        """A whole request has come; until ``idle`` its answer is being made."""
        self._idle.pop(one, None)

    def idle(self, one: Leaving) -> None:
        if one in self._open:
            self._idle[one] = None


class TurnAway:
    """Answers 503 while a server is crowded, but for probes. Plain ASGI."""

    def __init__(self, app: ASGIApp, crowd: Crowd) -> None:
        self._app = app
        self._crowd = crowd

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and self._crowd.crowded:
            log.warning("requests get a 503: --limit-concurrency connections are open")
            error = crowded(self._crowd.limits.most)
            headers = {**error.headers, "Connection": "close"}
            await JSONResponse(error.body, error.status, headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def connection_limits(config: ServerConfig) -> ConnectionLimits:
    """Raise the process's limit of open files, and say how many connections fit. ConfigError where
    that are fewer than were asked for."""
    files = raise_file_limit()
    fit = files - len(os.listdir("/dev/fd")) - RESERVED_FILES - _of_peers(config, files)
    wanted = config.limit_concurrency
    if fit < (wanted or 1):
        asked = "" if wanted is None else f" {wanted}"
        raise ConfigError(
            f"--limit-concurrency{asked}: this process may open {files} files, which leaves room "
            f"for {max(fit, 0)} connections; allowed are 1 to as many (ulimit -n)"
        )
    return ConnectionLimits(
        most=wanted or min(fit, MOST_CONNECTIONS),
        keep_alive_s=config.timeout_keep_alive,
        request_s=config.timeout_request,
    )


def _of_peers(config: ServerConfig, files: int) -> int:
    """Open files that links to other servers may take. Where there are few, a quarter of ``files``:
    a peer for which none is left is refused."""
    if config.role == "unified":
        return 0
    return min(MOST_PEERS * PEER_FILES, files // 4)


def raise_file_limit() -> int:
    """The soft limit of open files, as high as this process may set it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    allowed = MOST_FILES if hard == endless else min(hard, MOST_FILES)
    if soft == endless or soft >= allowed:
        return MOST_FILES if soft == endless else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):  # some systems have one more limit, which they do not report
        return soft
    return allowed

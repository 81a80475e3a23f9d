"""Runs a service on a socket until a signal or the engine's death ends it.

Owns the process's signals and the order of the end: refuse, finish, abort, store, close. Must not
know routes.
"""

import asyncio
import logging
import math
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import closing
from functools import partial
from types import FrameType
from typing import Final, TypedDict, cast

import uvicorn

from stratakv.core.clock import Clock
from stratakv.core.logs import announce
from stratakv.serve.connection_limits import ACCEPTED_AT_ONCE, LIMITS, ConnectionLimits, Crowd
from stratakv.serve.connections import ClientConnection
from stratakv.serve.driver import EngineDriver, Health
from stratakv.serve.http_api import build_app
from stratakv.serve.log_throttle import quieten
from stratakv.serve.service import Service
from stratakv.serve.sockets import bound_socket
from stratakv.serve.throughput import ThroughputLog
from stratakv.serve.tls import TlsFiles

log = logging.getLogger(__name__)

FLUSH_S: Final = 1.0
"""What clients get to read their last words after an abort or the engine's death."""
STOP_S: Final = 30.0
STORE_S: Final = 10.0
"""What is queued for storage gets that long to be written."""
BACKLOG: Final = 2048
"""Connections that wait to be accepted."""


def serve_forever(
    service: Service,
    *,
    host: str,
    port: int,
    drain_s: float,
    limits: ConnectionLimits = LIMITS,
    stopped: Callable[[], None] = lambda: None,
    joins: socket.socket | None = None,
) -> int:
    """Start the engine and answer until SIGTERM or SIGINT; returns the process's exit code: 0 after
    a drain, 1 after the engine's death.

    ``port`` 0 takes a free one. Announces ``stratakv: listening on http://HOST:PORT``, or https,
    once requests are taken. ``stopped``: called when the engine's thread has ended. ``joins``:
    where other servers join this one, bound. Raises ConfigError when the address cannot be had.
    """
    listener = bound_socket(host, port)
    quieten()
    server = Server(service, drain_s=drain_s, limits=limits)
    service.driver.start()
    with closing(service.spans):
        try:
            server.run([listener] if joins is None else [listener, joins])
        finally:
            service.storage.settle(STORE_S)
            ended = service.driver.stop(STOP_S)
            if ended:  # the engine's thread was the store's owner
                try:
                    stopped()
                finally:
                    service.storage.close()
    if not ended:
        log.error("the engine's step did not end within %s s", STOP_S)
    return 0 if ended and service.driver.health is Health.STOPPED else 1


class Server(uvicorn.Server):
    """uvicorn, which on a signal first lets the engine finish what runs.

    While it drains it still answers: new requests and ``/health`` get a 503. A second signal ends
    the wait. ``exit`` on the engine's death comes after waiting clients were answered.
    """

    def __init__(
        self, service: Service, *, drain_s: float, limits: ConnectionLimits = LIMITS
    ) -> None:
        crowd = Crowd(limits)
        config = uvicorn.Config(
            build_app(service, crowd),
            http=cast("type[asyncio.Protocol]", partial(ClientConnection, crowd)),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=math.ceil(limits.keep_alive_s),
            backlog=ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=round(FLUSH_S),
            **_encryption(service.web.tls),
        )
        super().__init__(config)
        self._end = _End(service.driver, service.clock, drain_s)
        self._throughput = ThroughputLog(service.driver, service.metrics, service.clock)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for i, listener in enumerate(sockets or ()):
            listener.listen(BACKLOG)  # asyncio takes one number for this and for one turn's accepts
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            what = "servers that decode join" if i else "listening on"
            scheme = "https" if self.config.is_ssl else "http"
            url = f"{scheme}://{shown}:{port}"
            announce(f"stratakv: {what} {url}", f"{what} {url}", {"url": url})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        log.info("%s: draining", signal.Signals(sig).name)
        self._end.signals += 1

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this ten times a second."""
        self._throughput.tick()
        return self._end.due() or await super().on_tick(counter)


class _Encryption(TypedDict, total=False):
    """uvicorn's words."""

    ssl_certfile: str
    ssl_keyfile: str | None
    ssl_ca_certs: str | None
    ssl_cert_reqs: int


def _encryption(tls: TlsFiles | None) -> _Encryption:
    if tls is None:
        return {}
    return {
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.key,
        "ssl_ca_certs": tls.clients,
        "ssl_cert_reqs": ssl.CERT_NONE if tls.clients is None else ssl.CERT_REQUIRED,
    }


class _End:
    """When to leave: polled, since a signal handler may do no more than count."""

    def __init__(self, driver: EngineDriver, clock: Clock, drain_s: float) -> None:
        self.signals = 0
        self._driver = driver
        self._clock = clock
        self._drain_s = drain_s
        self._abort_at_s: float | None = None
        self._leave_at_s: float | None = None

    def due(self) -> bool:
        now_s = self._clock.now_s()
        if self._leave_at_s is not None:
            idle = self._driver.open_requests == 0 and self._driver.health is not Health.FAILED
            return idle or now_s >= self._leave_at_s
        if self._driver.health is Health.FAILED:
            self._leave_at_s = now_s + FLUSH_S
        elif self._abort_at_s is not None:
            if self._driver.open_requests == 0:
                return True
            if now_s >= self._abort_at_s or self.signals > 1:
                self._driver.abort_all()
                self._leave_at_s = now_s + FLUSH_S
        elif self.signals:
            self._driver.drain()
            self._abort_at_s = now_s + self._drain_s
        return False

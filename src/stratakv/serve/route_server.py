"""Runs a router on a socket until a signal ends it. Owns its process."""

import socket
import sys

import uvicorn

from stratakv.core.config import RouteConfig
from stratakv.serve.route import build_router
from stratakv.serve.sockets import bound_socket

DRAIN_S = 30


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            sys.stdout.write(f"stratakv: listening on http://{shown}:{port}\n")
            sys.stdout.flush()


def route(config: RouteConfig) -> int:
    """The exit code."""
    listener = bound_socket(config.host, config.port)
    server = uvicorn.Config(
        build_router(config), ws="none", access_log=False, log_config=None, server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
    )  # fmt: skip
    _Server(server).run([listener])
    return 0

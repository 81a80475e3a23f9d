"""A bound socket, or why there is none. Owns the refusal; must not serve."""

import socket

from stratakv.core.errors import ConfigError


def bound_socket(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A TCP socket that is bound, not yet listening."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise ConfigError(
            f"--host {host} {flag} {port} cannot be bound: {error}; allowed are an address of "
            "this machine and a port that is free, 0 for any"
        ) from error
    return found

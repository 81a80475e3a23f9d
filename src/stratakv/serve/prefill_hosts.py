"""At which hosts a server that decodes joins prefill servers: a client names one, and it gets this
server's key and the way to its memory.

Owns the comparison of names. Pure; nothing is looked up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from stratakv.core.config import ServerConfig
from stratakv.serve.errors import invalid

_LOCAL: Final = "localhost"


@dataclass(frozen=True, slots=True)
class PrefillHosts:
    """``named``: by the operator; without any, all, or with ``keyed`` those of this machine."""

    named: frozenset[str] = frozenset()
    keyed: bool = False

    @staticmethod
    def of(server: ServerConfig, keys: Mapping[str, str]) -> "PrefillHosts":
        return PrefillHosts(frozenset(map(host_name, server.prefill_hosts)), bool(keys))

    def check(self, field: str, place: str) -> None:
        """``place``: HOST:PORT, from ``field`` of a body. ApiError (400) where nobody is joined
        at that host."""
        host = host_name(place.rpartition(":")[0].removeprefix("[").removesuffix("]"))
        if self.named:
            if host not in self.named:
                message = f"this server joins no prefill server at {host!r}; allowed are the hosts "
                raise invalid(field, message + "that its --prefill-hosts names")
        elif self.keyed and not _is_local(host):
            message = f"this server has API keys, and names none to {host!r}; allowed are hosts "
            message += "that its --prefill-hosts names; it names none: loopback addresses alone"
            raise invalid(field, message)


def host_name(host: str) -> str:
    """One text for all ways to write an address, or a name."""
    try:
        return str(ip_address(host))
    except ValueError:
        return host.lower()


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == _LOCAL

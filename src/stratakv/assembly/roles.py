"""The roles of a server that only computes prompts, or only decodes, and the transports under them.

Owns the choice of both by name, and what is missing for it. Must not know requests or HTTP routes.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Final

from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.disagg.deadlines import HandOffLimits
from stratakv.disagg.decode_role import DecodeRole
from stratakv.disagg.http_join import HttpCarry
from stratakv.disagg.joining import PeerJoiner
from stratakv.disagg.mooncake import MooncakeTransport, MooncakeTransportOptions
from stratakv.disagg.nixl import NixlTransport
from stratakv.disagg.peers import OpenTransport, Peers
from stratakv.disagg.prefill_role import PrefillRole
from stratakv.disagg.session import SessionLimits
from stratakv.disagg.statistics import SessionStats
from stratakv.disagg.transport import Memory, PeerId, Transport
from stratakv.engine.request import Request
from stratakv.memory.device_pools import DevicePools
from stratakv.spec.groups import CacheSpec

HEARTBEAT_S: Final = 0.05
"""How often an engine without work looks for words of its peers."""
_MODULES: Final = {"nixl": ("nixl", "nixl_cu12", "nixl_cu13"), "mooncake": ("mooncake",)}


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoleParts:
    """``role``: of the engine that is to be built. ``peers``: whom it works with, once opened over
    the engine's pools. ``stop``: ends what ``role`` has begun on threads."""

    role: PrefillRole | DecodeRole
    peers: Peers
    open_transport: OpenTransport
    stop: Callable[[], None] = field(default=_nothing)

    def given(self) -> PrefillRole | DecodeRole:
        """As a socket takes it."""
        return self.role

    def open(self, spec: CacheSpec, pools: object, model: bytes) -> None:
        """``model``: identity of the weights."""
        assert isinstance(pools, DevicePools), f"no peer can write to {type(pools).__name__}"
        self.peers.open(spec, pools, model, self.open_transport)

    def stats(self) -> SessionStats:
        return self.role.stats()

    def close(self) -> None:
        """When the engine's thread has ended; waits for the fences."""
        self.stop()
        self.peers.close()


def role_parts(server: ServerConfig) -> RoleParts | None:
    """None: a server that does both. ConfigError where the transport's library is missing."""
    if server.role == "unified":
        return None
    open_transport = _transport(server)
    peers, seconds = Peers(), server.transfer_timeout
    limits = HandOffLimits(sessions=SessionLimits(seconds, seconds, seconds))
    if server.role == "prefill":
        return RoleParts(
            role=PrefillRole(peers, limits), peers=peers, open_transport=open_transport
        )
    carry = HttpCarry(PeerId(f"decode-{uuid.uuid4()}"), server.api_key)
    role = DecodeRole(peers, _prefill_of, limits, join=PeerJoiner(peers, carry))
    return RoleParts(role=role, peers=peers, open_transport=open_transport, stop=carry.close)


def _prefill_of(request: Request) -> PeerId | None:
    session = request.prompt.session
    return None if session is None else PeerId(session.prefill)


def _transport(server: ServerConfig) -> OpenTransport:
    name = server.transport_name
    if not any(find_spec(module) for module in _MODULES[name]):
        raise ConfigError(
            f"--transport {name}: its library is not installed; allowed after: "
            f"pip install 'stratakv[{name}]' (Linux)"
        )
    if name == "nixl":
        return NixlTransport
    options = MooncakeTransportOptions(host=server.reached_at)
    return partial(_mooncake, options)


def _mooncake(options: MooncakeTransportOptions, memories: Sequence[Memory]) -> Transport:
    return MooncakeTransport(memories, options)

"""The roles of a server that only computes prompts or only decodes, and the transports under them.

Owns the choice of both by name, what is missing for it, and what several ranks need beside: each
has a role and peers of its own, and they agree. Must not know requests or HTTP routes.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Final, TypeAlias

from stratakv.agreement.agreement import DigestInputs
from stratakv.assembly.rank_context import RankContext
from stratakv.assembly.sizing import Sizes
from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.disagg.agreeing_role import AgreeingRole
from stratakv.disagg.deadlines import HandOffLimits
from stratakv.disagg.decode_role import DecodeRole
from stratakv.disagg.handshake import ALL, SideRank
from stratakv.disagg.http_join import HttpCarry
from stratakv.disagg.joining import JoinAnswer, PeerJoiner, join
from stratakv.disagg.mooncake import MooncakeTransport, MooncakeTransportOptions
from stratakv.disagg.nixl import NixlTransport
from stratakv.disagg.peers import OpenTransport, Peers
from stratakv.disagg.prefill_role import PrefillRole
from stratakv.disagg.ranked_joining import RankedJoiner, RankedPeers, join_ranks
from stratakv.disagg.session import SessionLimits
from stratakv.disagg.statistics import SessionStats
from stratakv.disagg.transport import Memory, PeerId, Transport
from stratakv.engine.loop import Engine
from stratakv.engine.ranked import RankedEngine
from stratakv.engine.request import Prompt, Request
from stratakv.engine.roles import Role
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena

HEARTBEAT_S: Final = 0.05
"""How often an engine without work looks for words of its peers."""
_MODULES: Final = {"nixl": ("nixl", "nixl_cu12", "nixl_cu13"), "mooncake": ("mooncake",)}


def _nothing() -> None:
    pass


OwnRole: TypeAlias = PrefillRole | DecodeRole


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoleParts:
    """``role``: of the engine that is to be built, and ``own`` what this rank has of it; the same
    with one rank. ``peers``: whom it works with, once opened over the engine's pools; ``place``:
    which rank of how many this is. ``stop``: ends what ``role`` has begun on threads."""

    role: Role
    own: OwnRole
    peers: Peers
    open_transport: OpenTransport
    place: tuple[int, int] = (0, 1)
    stop: Callable[[], None] = field(default=_nothing)

    def given(self) -> Role:
        """As a socket takes it."""
        return self.role

    def open(self, sizes: Sizes, pools: object, arenas: Sequence[HostArena], model: bytes) -> None:
        """``model``: identity of the weights."""
        assert isinstance(pools, DevicePools), f"no peer can write to {type(pools).__name__}"
        rank, ranks = self.place
        share = ALL if ranks == 1 else SideRank(rank, ranks, sizes.sharding.whole.digest)
        self.peers.open(sizes.spec, pools, model, self.open_transport, share, arenas)

    def join(
        self, port: Engine | RankedEngine, peer: PeerId, introductions: Sequence[bytes]
    ) -> JoinAnswer:
        """Work with a peer that has introduced itself; on the thread of ``port``, rank 0's."""
        match port:
            case RankedEngine():
                return join_ranks(port.call_peers, peer, introductions)
            case Engine():
                return join(self.peers, peer, introductions)

    def serve_again(self, submit: Callable[[Prompt], None]) -> None:
        """Prompts that decode sends back are given to ``submit``, rank 0's."""
        if isinstance(self.own, PrefillRole):
            self.own.submit_to(submit)

    def stats(self) -> SessionStats:
        """Of this rank."""
        return self.own.stats()

    def close(self) -> None:
        """When the engine steps no more; waits for the fences."""
        self.stop()
        self.peers.close()


def check_role(server: ServerConfig) -> None:
    """ConfigError where the transport's library is missing."""
    name = server.transport_name
    if server.role != "unified" and not any(find_spec(module) for module in _MODULES[name]):
        raise ConfigError(
            f"--transport {name}: its library is not installed; allowed after: "
            f"pip install 'stratakv[{name}]' (Linux)"
        )


def role_parts(
    server: ServerConfig, ranks: RankContext | None = None, join_key: str | None = None
) -> RoleParts | None:
    """None: a server that does both. ConfigError where the transport's library is missing, or
    where ranks were started with other roles. ``join_key``: what opens the other servers' API, None
    where anyone may ask."""
    if ranks is not None:
        ranks.same([
            ("--role", server.role),
            ("--transport", server.transport_name),
            ("--transfer-timeout", server.transfer_timeout),
        ])  # fmt: skip
    if server.role == "unified":
        return None
    check_role(server)
    peers, seconds = Peers(), server.transfer_timeout
    limits = HandOffLimits(sessions=SessionLimits(seconds, seconds, seconds))
    carry = None
    if server.role == "decode" and (ranks is None or ranks.leads):
        carry = HttpCarry(PeerId(f"decode-{uuid.uuid4()}"), join_key)
    make = _prefill if server.role == "prefill" else partial(_decode, carry)
    role, own = make(peers, limits, ranks)
    return RoleParts(
        role=role,
        own=own,
        peers=peers,
        open_transport=_transport(server),
        place=(0, 1) if ranks is None else ranks.place,
        stop=_nothing if carry is None else carry.close,
    )


def _prefill(
    peers: Peers, limits: HandOffLimits, ranks: RankContext | None
) -> tuple[Role, OwnRole]:
    if ranks is None:
        own = PrefillRole(peers, limits)
        return own, own
    own = PrefillRole(peers, limits, ranks.clock)
    return agreeing(own, RankedPeers(peers, ranks.ranks.rank), ranks), own


def _decode(
    carry: HttpCarry | None, peers: Peers, limits: HandOffLimits, ranks: RankContext | None
) -> tuple[Role, OwnRole]:
    if ranks is None:
        assert carry is not None, "nobody brings introductions"
        own = DecodeRole(peers, _prefill_of, limits, join=PeerJoiner(peers, carry))
        return own, own
    joiner = RankedJoiner(peers, ranks.ranks.rank, ranks.sync.outbox.append, carry)
    own = DecodeRole(peers, _prefill_of, limits, ranks.clock, joiner)
    return agreeing(own, joiner.links, ranks), own


def agreeing(own: OwnRole, links: RankedPeers, ranks: RankContext) -> AgreeingRole:
    """What a rank's engine is given for its ``own`` role. From now on all ranks vote on it."""
    role = AgreeingRole(own, own)

    def figures() -> DigestInputs:
        return {**role.figures(), **links.figures()}

    ranks.agreement.include(role)
    ranks.agreement.include(links)
    ranks.agreement.watch("hand-offs", figures)
    ranks.sync.work_with(links)
    return role


def _prefill_of(request: Request) -> PeerId | None:
    session = request.prompt.session
    return None if session is None else PeerId(session.prefill)


def _transport(server: ServerConfig) -> OpenTransport:
    if server.transport_name == "nixl":
        return NixlTransport
    options = MooncakeTransportOptions(host=server.reached_at)
    return partial(_mooncake, options)


def _mooncake(options: MooncakeTransportOptions, memories: Sequence[Memory]) -> Transport:
    return MooncakeTransport(memories, options)

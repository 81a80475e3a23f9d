"""The roles of a server that only computes prompts or only decodes, and the transports under them.

Owns the choice of both by name, what is missing for it, and what several ranks need beside: each
has a role and peers of its own, and they agree. Must not know requests or HTTP routes.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Final, TypeAlias

from stratakv.agreement.agreement import DigestInputs
from stratakv.assembly.rank_context import RankContext
from stratakv.assembly.sizing import Sizes
from stratakv.core.clock import MonotonicClock
from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.core.wakeup import Wake, Wakeup
from stratakv.disagg.agreeing_role import AgreeingRole, Lane
from stratakv.disagg.deadlines import HandOffLimits
from stratakv.disagg.decode_role import DecodeRole
from stratakv.disagg.handshake import ALL, SideRank
from stratakv.disagg.http_join import HttpCarry
from stratakv.disagg.joining import JoinAnswer, JoinedByHand, PeerJoiner, join
from stratakv.disagg.lanes import shares
from stratakv.disagg.mooncake import MooncakeTransport, MooncakeTransportOptions
from stratakv.disagg.nixl import NixlTransport
from stratakv.disagg.peers import OpenTransport, Peers
from stratakv.disagg.prefill_role import PrefillRole
from stratakv.disagg.ranked_joining import RankedHost, RankedJoiner
from stratakv.disagg.ranked_peers import RankedPeers
from stratakv.disagg.rests import Rests
from stratakv.disagg.session import SessionLimits
from stratakv.disagg.statistics import SessionStats
from stratakv.disagg.transport import PeerId
from stratakv.engine.request import Prompt, Request
from stratakv.engine.roles import Role
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.spec.sharding import Sharding, sharding_of

HEARTBEAT_S: Final = 0.05
"""How often an engine without work looks for words of its peers."""
_MODULES: Final = {"nixl": ("nixl", "nixl_cu12", "nixl_cu13"), "mooncake": ("mooncake",)}


OwnRole: TypeAlias = PrefillRole | DecodeRole
Host: TypeAlias = Callable[[PeerId, Sequence[bytes]], "Future[JoinAnswer]"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoleParts:
    """``role``: of the engine that is to be built, and ``own`` what this rank has of it, by lane;
    the same with one rank and lane. ``peers``: whom each lane works with, once opened over the
    engine's pools; ``rank``: which one this is, None where there are no others. ``join``: work with
    a peer that has introduced itself, on the engine's thread, rank 0's; a later step brings the
    answer. ``wakeup``: ends an engine's pause when a peer's event comes."""

    role: Role
    own: tuple[OwnRole, ...]
    peers: tuple[Peers, ...]
    open_transport: OpenTransport
    rank: int | None
    join: Host
    wakeup: Wakeup

    def given(self) -> Role:
        """As a socket takes it."""
        return self.role

    def sleep(self, wait_s: float) -> bool:
        """As a socket takes it: how the engine lets a moment pass."""
        return self.wakeup.wait(wait_s)

    def open(
        self,
        sizes: Sizes,
        pools: object,
        arenas: Sequence[HostArena],
        model: bytes,
        config: Mapping[str, object],
    ) -> None:
        """``model``: identity of the weights; ``config``: as for ``sharding_of``."""
        assert isinstance(pools, DevicePools), f"no peer can write to {type(pools).__name__}"
        parts = (ALL,)
        if self.rank is not None:
            receives = isinstance(self.own[0], DecodeRole)
            parts = lane_shares(
                sizes.sharding, config, len(self.peers), self.rank, receives=receives
            )
        for peers, share in zip(self.peers, parts, strict=True):
            peers.open(sizes.spec, pools, model, self.open_transport, share, arenas)

    def serve_again(self, submit: Callable[[Prompt], None]) -> None:
        """Prompts that decode sends back are given to ``submit``, rank 0's."""
        if isinstance(self.own[0], PrefillRole):
            self.own[0].submit_to(submit)

    def stats(self) -> SessionStats:
        """Of this rank's first lane."""
        return self.own[0].stats()

    def close(self) -> None:
        """When the engine steps no more; waits for the fences."""
        for peers in self.peers:
            peers.close()


def check_role(server: ServerConfig) -> None:
    """ConfigError where the transport's library is missing."""
    name = server.transport_name
    if server.role != "unified" and not any(find_spec(module) for module in _MODULES[name]):
        raise ConfigError(
            f"--transport {name}: its library is not installed; allowed after: "
            f"pip install 'stratakv[{name}]' (Linux)"
        )


def role_parts(
    server: ServerConfig,
    vocab_size: int,
    ranks: RankContext | None = None,
    join_key: str | None = None,
) -> RoleParts | None:
    """None: a server that does both. ConfigError where the transport's library is missing, or
    where ranks were started with other roles. ``vocab_size``: token ids are below it.
    ``join_key``: what opens the other servers' API, None where anyone may ask."""
    if ranks is not None:
        ranks.same([
            ("--role", server.role),
            ("--transport", server.transport_name),
            ("--transfer-timeout", server.transfer_timeout),
            ("--peer-tp", server.peer_tp),
        ])  # fmt: skip
    if server.role == "unified":
        return None
    check_role(server)
    seconds, lanes = server.transfer_timeout, lanes_of(server, ranks)
    clock = MonotonicClock() if ranks is None else ranks.clock
    peers = tuple(Peers(clock) for _ in range(lanes))
    limits = HandOffLimits(sessions=SessionLimits(seconds, seconds, seconds))
    carry = None
    if server.role == "decode" and (ranks is None or ranks.leads):
        carry = HttpCarry(PeerId(f"decode-{uuid.uuid4()}"), join_key)
    make = _prefill if server.role == "prefill" else partial(_decode, carry, vocab_size)
    role, own, host = make(peers, limits, ranks)
    wakeup = Wakeup()
    return RoleParts(
        role=role,
        own=own,
        peers=peers,
        open_transport=_transport(server, wakeup.set),
        rank=None if ranks is None else ranks.ranks.rank,
        join=host,
        wakeup=wakeup,
    )


def lanes_of(server: ServerConfig, ranks: RankContext | None) -> int:
    """Ranks of peers that a rank of this server stands for."""
    own = 1 if ranks is None else ranks.ranks.size
    return max(1, (server.peer_tp or own) // own)


def lane_shares(
    sharding: Sharding,
    config: Mapping[str, object],
    lanes: int,
    rank: int,
    *,
    receives: bool,
) -> tuple[SideRank, ...]:
    """What each lane of a rank has of its pages. ConfigError as ``shares`` and ``sharding_of``."""
    handed_over = sharding
    if lanes > 1:
        handed_over = sharding_of(config, sharding.whole, lanes * sharding.ranks)
    return shares(sharding, handed_over, rank, receives=receives)


def _prefill(
    peers: tuple[Peers, ...], limits: HandOffLimits, ranks: RankContext | None
) -> tuple[Role, tuple[OwnRole, ...], Host]:
    if ranks is None:
        own = PrefillRole(peers[0], limits)
        return own, (own,), partial(join, peers[0])
    lanes = tuple(PrefillRole(one, limits, ranks.clock) for one in peers)
    host = RankedHost(peers, ranks.ranks.rank * len(peers), ranks.sync.outbox.append)
    return agreeing(lanes, host.links, ranks), lanes, host.join


def _decode(
    carry: HttpCarry | None,
    vocab_size: int,
    peers: tuple[Peers, ...],
    limits: HandOffLimits,
    ranks: RankContext | None,
) -> tuple[Role, tuple[OwnRole, ...], Host]:
    if ranks is None:
        assert carry is not None, "nobody brings introductions"
        joins_one = PeerJoiner(peers[0], carry, Rests(MonotonicClock()))
        own = DecodeRole(peers[0], _prefill_of, limits, join=joins_one, vocab_size=vocab_size)
        return own, (own,), _joins_itself
    first = ranks.ranks.rank * len(peers)
    joiner = RankedJoiner(peers, first, ranks.sync.outbox.append, carry, Rests(ranks.clock))
    joins = [joiner, *(JoinedByHand() for _ in peers[1:])]  # which joins for all of them
    lanes = tuple(
        DecodeRole(one, _prefill_of, limits, ranks.clock, join, vocab_size)
        for one, join in zip(peers, joins, strict=True)
    )
    return agreeing(lanes, joiner.links, ranks), lanes, _joins_itself


def _joins_itself(peer: PeerId, introductions: Sequence[bytes]) -> "Future[JoinAnswer]":
    raise AssertionError(f"{peer} joins a side that decodes, which takes {len(introductions)}")


def agreeing(own: Sequence[OwnRole], links: RankedPeers, ranks: RankContext) -> AgreeingRole:
    """What a rank's engine is given for its ``own`` roles. From now on all ranks vote on it."""
    role = AgreeingRole([Lane(each, each) for each in own])

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


def _transport(server: ServerConfig, wake: Wake) -> OpenTransport:
    if server.transport_name == "nixl":
        return partial(NixlTransport, wake=wake)
    options = MooncakeTransportOptions(host=server.reached_at)
    return partial(MooncakeTransport, options=options, wake=wake)

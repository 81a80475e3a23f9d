"""Engines that this one hands requests to or takes them from: who they are, and the way to each.

Owns the handshake, a peer's words, and the thread that describes this side to a new one, which may
register all its memory again. One thread calls it, between steps. Must not know what a request is;
a peer's bytes and words are the transport's.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from stratakv.core.clock import Clock, MonotonicClock
from stratakv.core.errors import TransportError
from stratakv.disagg.handshake import ALL, Handshake, SideRank
from stratakv.disagg.link_uses import LinkUses
from stratakv.disagg.messages import PROTOCOL, Joiner, Message, encode, parts
from stratakv.disagg.page_places import PagePlaces, PairedPlaces, places_of
from stratakv.disagg.peer_limits import MOST_PEERS
from stratakv.disagg.statistics import LinkState
from stratakv.disagg.transport import (
    Disconnected,
    Done,
    Failed,
    Lost,
    Memory,
    Notified,
    PeerId,
    TransferId,
    Transport,
    Writes,
)
from stratakv.memory.device_pools import DevicePages
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import CacheSpec


class StillEndingError(TransportError):
    """The last link of that name, or one that makes room for it, is being torn down: ask again."""


NO_WRITES: Final = Writes(*(np.empty(0, np.int64) for _ in range(5)))
OpenTransport: TypeAlias = Callable[[Sequence[Memory]], Transport]
OnIntroduced: TypeAlias = Callable[[bytes | TransportError], None]
"""Given what a peer must be given, or why there is nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class MessageReceived:
    """``message`` of a peer; the bytes that went before it are here."""

    peer: PeerId
    message: Message


PeerEvent: TypeAlias = MessageReceived | Done | Failed | Lost | Disconnected


@dataclass(slots=True, eq=False)
class _Peer:
    """``pairing``: where pages lie on both sides, once it is connected. ``ending``: its link is
    torn down."""

    pairing: PairedPlaces | None = None
    ending: bool = False
    joiner: Joiner = field(default_factory=Joiner)


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    spec: CacheSpec
    handshake: Handshake
    share: SideRank
    places: PagePlaces
    transport: Transport
    describing: ThreadPoolExecutor


def handshake_of(spec: CacheSpec, model: bytes, share: SideRank) -> Handshake:
    """Of one rank that serves ``model``, the identity of its weights, with ``spec``."""
    buffers = [buffer for group in spec.groups for buffer in group.buffers]
    return Handshake(
        protocol=PROTOCOL,
        model=model.hex(),
        spec=(share.whole or spec.digest).hex(),
        page_tokens=spec.page_tokens,
        dtypes=tuple(buffer.dtype for buffer in buffers),
        layout=tuple(group.page_bytes // share.cut(group.id).count for group in spec.groups),
        ranks=share.ranks,
        rank=share.rank,
    )


class Peers:
    """Knows nobody until it is opened, which is when the engine has its pools. ``uses``: which
    links have sessions, as the roles say, and which are to end; the one that decodes ends them."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.uses = LinkUses(clock or MonotonicClock())
        self._opened: _Opened | None = None
        self._peers: dict[PeerId, _Peer] = {}
        self._events: list[PeerEvent] = []
        self._described: dict[PeerId, tuple[Future[bytes], OnIntroduced]] = {}  # under way

    def open(
        self,
        spec: CacheSpec,
        pools: DevicePages,
        model: bytes,
        open_transport: OpenTransport,
        share: SideRank = ALL,
        arenas: Sequence[HostArena] = (),
    ) -> None:
        """``model``: identity of the weights. Pages of ``pools`` are what peers read and write, and
        ``share`` what of the model's they are. ``arenas``: of each group, where one has its home on
        the host; its pages there are written to as well."""
        assert self._opened is None, "open already"
        memories, places = places_of(spec, pools, arenas, share)
        handshake = handshake_of(spec, model, share)
        thread = ThreadPoolExecutor(1, thread_name_prefix="stratakv-describe")
        thread.submit(int).result()  # started now: later the system may have no thread left
        transport = open_transport(memories)
        self._opened = _Opened(spec, handshake, share, places, transport, thread)

    @property
    def spec(self) -> CacheSpec:
        return self._end.spec

    # -- joining ---------------------------------------------------------------------------------

    def introduce(self, peer: PeerId) -> bytes:
        """What ``peer`` must be given to ``meet`` this side. StillEndingError while one of that
        name is here, which is ended then, or where one without sessions is to make room: it can
        be asked again. TransportError where there are too many, all with sessions."""
        self.expect_place(peer)
        described = self._end.transport.describe(peer)
        self._peers[peer] = _Peer()
        return self._words(described)

    def introduce_then(self, peer: PeerId, then: OnIntroduced) -> None:
        """As ``introduce``, on a thread of its own: ``then`` is called by a later ``poll``, or by
        ``close``. StillEndingError at once, and TransportError where there are too many."""
        self.expect_place(peer)
        self._peers[peer] = _Peer()
        described = self._end.describing.submit(self._end.transport.describe, peer)
        self._described[peer] = described, then

    def expect_place(self, peer: PeerId) -> None:
        """Nothing where ``introduce`` would not raise now."""
        if peer in self._peers:
            self.disconnect(peer)
            raise StillEndingError(f"the last link of {peer} is being torn down: ask again")
        if len(self._peers) < MOST_PEERS:
            return
        if self.uses.makes_room():
            raise StillEndingError("a link without sessions makes room: ask again")
        raise TransportError(f"{MOST_PEERS} peers are joined already, none idle; no more fit")

    def _words(self, described: bytes) -> bytes:
        fields = {
            "handshake": self._end.handshake.encode().decode(),
            "places": self._end.places.columns(),
            "transport": base64.b64encode(described).decode(),
        }
        return json.dumps(fields).encode()

    def verify(self, peer: PeerId, introduction: bytes) -> None:
        """TransportError that says why, each difference with both values, where ``peer`` cannot
        work with this side. Costs nothing of the transport."""
        self._read(peer, introduction)

    def _read(self, peer: PeerId, introduction: bytes) -> tuple[PagePlaces, bytes]:
        handshake, places, described = _introduction(introduction)
        share = self._end.share
        reason = self._end.handshake.refusal(handshake) or self._end.places.refusal(
            places, share.alike if share.rank else ()
        )
        if reason:
            raise TransportError(f"{peer} cannot work with this side: {reason}")
        return places, described

    def meet(self, peer: PeerId, introduction: bytes) -> None:
        """Work with ``peer``, to whom this side has introduced itself. TransportError as ``verify``
        where that cannot be; its link ends then."""
        entry = self._peers.get(peer)
        if entry is None or entry.ending:
            raise TransportError(f"{peer} has gone while it was joined")
        try:
            places, described = self._read(peer, introduction)
            self._end.transport.connect(peer, described)
        except TransportError:
            self.disconnect(peer)
            raise
        entry.pairing = self._end.places.paired(places)
        self.uses.joined(peer)

    def knows(self, peer: PeerId) -> bool:
        """Whether messages can be sent to it."""
        entry = self._peers.get(peer)
        return entry is not None and entry.pairing is not None and not entry.ending

    def pairing(self, peer: PeerId) -> PairedPlaces:
        """Where pages lie here, and there. TransportError where ``peer`` is not known."""
        entry = self._peers.get(peer)
        if entry is None or entry.pairing is None:
            raise TransportError(f"{peer} is not here")
        return entry.pairing

    # -- words -----------------------------------------------------------------------------------

    def send(self, peer: PeerId, message: Message, writes: Writes = NO_WRITES) -> TransferId | None:
        """Write, and send ``message`` behind it; what ends with the last of it. None, and nothing
        is done, where the peer is not known, or has named pages beyond its own memory."""
        if not self.knows(peer):
            return None
        transfer = None
        try:
            for part in parts(encode(message)):
                transfer = self._end.transport.post(peer, writes, part)
                writes = NO_WRITES
        except TransportError as error:
            self.disconnect(peer, str(error))
            return None
        return transfer

    def poll(self) -> Sequence[PeerEvent]:
        """What has happened since the last call, in order for each peer; ``Disconnected`` is the
        last of one, and a peer that sends nonsense is lost."""
        if self._opened is None:
            return ()
        self._introduce()
        for event in self._opened.transport.poll():
            match event:
                case Notified(peer, notification):
                    self._on_notification(peer, notification)
                case Lost(peer):
                    self._ends(peer)
                    self._events.append(event)
                case Disconnected(peer):
                    self._remove(peer)
                    self._events.append(event)
                case Done() | Failed():
                    self._events.append(event)
        found, self._events = self._events, []
        return found

    def disconnect(self, peer: PeerId, reason: str = "") -> None:
        """End a peer's link. ``reason``: what it is ``Lost`` for, which ``poll`` reports."""
        entry = self._peers.get(peer)
        if entry is None or entry.ending:
            return
        self._ends(peer)
        self._events.append(Lost(peer, reason or "it was disconnected"))
        if peer not in self._described:  # else when it is
            self._end.transport.disconnect(peer)

    def close(self) -> None:
        """End all links and wait for the fences. The pools are the engine's alone from then on, and
        nobody is known any more. TransportError where a peer may still write."""
        if self._opened is None:
            return
        opened, self._opened = self._opened, None
        opened.describing.shutdown(cancel_futures=True)
        for peer in list(self._peers):
            self._ends(peer)
            self._remove(peer)
        waiting, self._described = self._described, {}
        for peer, (_, then) in waiting.items():
            then(TransportError(f"{peer} was not joined: this side ends"))
        opened.transport.close()

    def counts(self) -> Mapping[LinkState, int]:
        """Places that are taken, by what they are taken for."""
        ending = sum(entry.ending for entry in self._peers.values())
        joined = sum(not one.ending and one.pairing is not None for one in self._peers.values())
        return {
            LinkState.JOINING: len(self._peers) - joined - ending,
            LinkState.IN_USE: joined - self.uses.idle,
            LinkState.IDLE: self.uses.idle,
            LinkState.ENDING: ending,
        }

    def _ends(self, peer: PeerId) -> None:
        self._peers[peer].ending = True
        self.uses.ends(peer)

    def _remove(self, peer: PeerId) -> None:
        del self._peers[peer]
        self.uses.ended(peer)

    @property
    def _end(self) -> _Opened:
        assert self._opened is not None, "not open"
        return self._opened

    def _introduce(self) -> None:
        """To whom this side is described by now."""
        for peer in [peer for peer, (described, _) in self._described.items() if described.done()]:
            described, then = self._described.pop(peer)
            entry = self._peers[peer]
            try:
                found = described.result()
            except TransportError as error:
                self._remove(peer)
                if entry.ending:
                    self._events.append(Disconnected(peer))
                then(error)
                continue
            if entry.ending:
                self._end.transport.disconnect(peer)
                then(TransportError(f"{peer} has gone while it was joined"))
            else:
                then(self._words(found))

    def _on_notification(self, peer: PeerId, notification: bytes) -> None:
        entry = self._peers[peer]
        if entry.ending:
            return  # its sessions have failed, and the fence comes
        try:
            message = entry.joiner.add(notification)
        except TransportError as error:
            self.disconnect(peer, str(error))
            return
        if message is not None:
            self._events.append(MessageReceived(peer, message))


def _introduction(data: bytes) -> tuple[Handshake, PagePlaces, bytes]:
    try:
        fields: Any = json.loads(data)
        handshake, places = str(fields["handshake"]).encode(), fields["places"]
        described = base64.b64decode(fields["transport"], validate=True)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TransportError(f"the peer's introduction cannot be read: {error!r}") from error
    return Handshake.decode(handshake), PagePlaces.of_columns(places), described

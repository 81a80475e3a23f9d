"""A transport that is slow and untidy wherever its promises let it be, over any other one.

Owns the faults. What it promises, it keeps, and passes the suite; but for ``lost``, with which some
transfers never end before their link does. Deterministic for a ``Random`` and a sequence of calls.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import assert_never

import numpy as np

from stratakv.disagg.transport import (
    Disconnected,
    Done,
    Event,
    Failed,
    Lost,
    Notified,
    PeerId,
    TransferId,
    Transport,
    Writes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportFaults:
    """``late``: at most so many polls pass before a post is begun, whatever the caller has given up
    meanwhile. ``delay``: before an event is delivered. ``parts``: at most, of one post, in any
    order. ``lost``: the share of transfers whose ``Done`` is never delivered."""

    late: int = 0
    delay: int = 0
    parts: int = 1
    lost: float = 0.0


@dataclass(slots=True)
class _Post:
    transfer: TransferId
    writes: Writes
    notification: bytes | None
    polls: int


@dataclass(slots=True)
class _Peer:
    """``waiting``: not begun yet, oldest first; ``begun``: those that the caller knows no end of.
    ``events``: what is to be delivered, and after how many polls. ``gone``: the last of them is its
    ``Disconnected``."""

    waiting: deque[_Post] = field(default_factory=deque[_Post])
    begun: list[TransferId] = field(default_factory=list[TransferId])
    events: deque[tuple[int, Event]] = field(default_factory=deque[tuple[int, Event]])
    gone: bool = False


class FaultyTransport:
    """``transport`` is used by nobody else, and this by one thread."""

    def __init__(self, transport: Transport, random: Random, faults: TransportFaults) -> None:
        self._transport, self._random, self._faults = transport, random, faults
        self._peers: dict[PeerId, _Peer] = {}
        self._parts: dict[TransferId, tuple[PeerId, TransferId | None]] = {}
        """Transfers of the inner transport; with what ends with its last part."""
        self._transfers = count()

    def describe(self, peer: PeerId) -> bytes:
        described = self._transport.describe(peer)
        self._peers[peer] = _Peer()
        return described

    def connect(self, peer: PeerId, description: bytes) -> None:
        self._transport.connect(peer, description)

    def post(self, peer: PeerId, writes: Writes, notification: bytes | None = None) -> TransferId:
        transfer = TransferId(next(self._transfers))
        post = _Post(transfer, writes, notification, self._random.randint(0, self._faults.late))
        state = self._peers[peer]
        if state.gone:  # as the caller is soon to be notified
            state.events.insert(len(state.events) - 1, (0, Failed(transfer, "the peer was gone")))
        elif state.waiting or post.polls:
            state.waiting.append(post)
        else:
            self._begin(peer, post)
        return transfer

    def poll(self) -> Sequence[Event]:
        for peer, state in self._peers.items():
            while state.waiting:
                state.waiting[0].polls -= 1
                if state.waiting[0].polls >= 0:
                    break
                self._begin(peer, state.waiting.popleft())
        for event in self._transport.poll():
            self._on_event(event)
        found: list[Event] = []
        peers = list(self._peers)
        self._random.shuffle(peers)
        for peer in peers:
            found += self._deliver(peer)
        return found

    def disconnect(self, peer: PeerId) -> None:
        self._transport.disconnect(peer)

    def close(self) -> None:
        self._transport.close()
        self._peers.clear()

    def _begin(self, peer: PeerId, post: _Post) -> None:
        """In parts of neighbouring ranges, shuffled; the last one brings the notification."""
        count_ = len(post.writes.sizes)
        cuts = self._random.randint(1, max(1, min(self._faults.parts, count_)))
        orders = np.array_split(np.arange(count_), cuts)
        self._random.shuffle(orders)
        for at, order in enumerate(orders, 1):
            columns = (post.writes.regions, post.writes.offsets, post.writes.peer_regions)
            more = (post.writes.peer_offsets, post.writes.sizes)
            part = Writes(*(each[order] for each in (*columns, *more)))
            last = at == len(orders)
            inner = self._transport.post(peer, part, post.notification if last else None)
            self._parts[inner] = peer, post.transfer if last else None
        self._peers[peer].begun.append(post.transfer)

    def _on_event(self, event: Event) -> None:
        match event:
            case Done():
                peer, transfer = self._parts.pop(event.transfer)
                if transfer is not None and self._random.random() >= self._faults.lost:
                    self._end(peer, Done(transfer))
            case Failed():
                peer, transfer = self._parts.pop(event.transfer)
                if transfer is not None:
                    self._end(peer, Failed(transfer, event.reason))
            case Notified() | Lost():
                self._later(event.peer, event)
            case Disconnected():
                state = self._peers[event.peer]
                left = [*state.begun, *(post.transfer for post in state.waiting)]
                state.waiting.clear()
                for transfer in left:
                    self._end(event.peer, Failed(transfer, "the peer was disconnected"))
                self._later(event.peer, event)
                state.gone = True
            case _:
                assert_never(event)

    def _end(self, peer: PeerId, end: Done | Failed) -> None:
        if end.transfer in self._peers[peer].begun:
            self._peers[peer].begun.remove(end.transfer)
        self._later(peer, end)

    def _later(self, peer: PeerId, event: Event) -> None:
        self._peers[peer].events.append((self._random.randint(0, self._faults.delay), event))

    def _deliver(self, peer: PeerId) -> list[Event]:
        """In order: an event that is due waits for those before it."""
        events = self._peers[peer].events
        found: list[Event] = []
        while events:
            polls, event = events[0]
            if polls:
                events[0] = polls - 1, event
                break
            found.append(event)
            events.popleft()
        if found and isinstance(found[-1], Disconnected):
            del self._peers[peer]
        return found

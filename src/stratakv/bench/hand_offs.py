"""Pages of many requests from one engine's pools to another's, and the same ranges by the
transport's library alone.

Owns both sides of the measurement: pages through ``Peers``, with their pairing and the message that
proves them, as fast as a few requests at a time go; and, as what that is compared with, each
request's one call of the library, with nothing of ours but its adapter (``Wire``): no thread of a
link, no slices, beats, messages, pauses or pages. The receiving side is a process of its own, as
a server is, but for a transport that has no other process (``TransportChoice.beside``).
"""

import time
import zlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from threading import Event
from typing import Any, Final, TypeAlias, assert_never

import numpy as np

from stratakv.bench.transports import TRANSPORTS, TransportChoice
from stratakv.cache.footprint import TransferPages, taken_spans
from stratakv.cache.records import TierTokens
from stratakv.core.errors import TransportError
from stratakv.core.wakeup import Wakeup
from stratakv.disagg.messages import Arrival, Attempt
from stratakv.disagg.page_places import pages_of, places_of
from stratakv.disagg.peers import MessageReceived, PeerEvent, Peers
from stratakv.disagg.ranges import Regions, joined, located
from stratakv.disagg.transport import Done, Lost, Memory, PeerId
from stratakv.disagg.wire import Ranges, Wire
from stratakv.engine.roles import FirstToken
from stratakv.memory.device_pools import DevicePools
from stratakv.spec.groups import CacheSpec

_PREFILL, _DECODE = PeerId("prefill"), PeerId("decode")
_PAUSE_S: Final = 0.0002
"""Between two looks of the end that is written to, by the library alone: over TCP, NIXL takes bytes
while it is looked at."""
_STEP_S: Final = 0.005
"""An engine's pause: as long, where no event ends it."""
_BETWEEN_S: Final = 0.0001
"""Between two requests that are sent: an engine computes then, and the link's thread gets the
interpreter's lock."""
_HANGS_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffLoad:
    """``requests`` of ``prompt`` tokens, of pages anywhere in the pools, of which ``under_way`` are
    written or wait to be."""

    spec: CacheSpec
    requests: int
    prompt: int
    under_way: int

    def spans(self) -> list[range]:
        """Page indexes of one request that decode takes, by group."""
        return taken_spans(self.spec, self.prompt)

    @property
    def request_bytes(self) -> int:
        groups = zip(self.spec.groups, self.spans(), strict=True)
        return sum(group.page_bytes * len(span) for group, span in groups)

    def pages(self, seed: int) -> list[TransferPages]:
        """Of each request, scattered."""
        random, spans = np.random.default_rng(seed), self.spans()
        pages = [random.permutation(self.requests * len(span)).tolist() for span in spans]
        return [
            TransferPages(
                self.prompt,
                tuple(
                    pages_of(group.id, span.start, own[at * len(span) : (at + 1) * len(span)])
                    for group, span, own in zip(self.spec.groups, spans, pages, strict=True)
                ),
            )
            for at in range(self.requests)
        ]


@dataclass(frozen=True, slots=True)
class _ByLibrary:
    """Look at the wire until there is another message."""


@dataclass(frozen=True, slots=True)
class _HandedOver:
    """Answer with the time at which so many ``requests`` are proved to be there."""

    requests: int


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Answer with the sum of these ``ranges`` of the memory here."""

    ranges: Sequence[Ranges]


_Command: TypeAlias = _ByLibrary | _HandedOver | _Sums | None


@dataclass(frozen=True, slots=True, eq=False)
class _Introduction:
    peers: bytes
    wire: bytes
    regions: Regions


class _Side:
    """An engine's pools, and both ways to the other one's."""

    def __init__(self, choice: TransportChoice, load: HandOffLoad, seed: int) -> None:
        spans = load.spans()
        pools = DevicePools(load.spec, [load.requests * len(span) for span in spans])
        self.memories: Sequence[Memory]
        self.memories, _ = places_of(load.spec, pools, ())
        random = np.random.default_rng(seed)
        for memory in self.memories:  # which has no pages of the system's before
            memory[:] = random.integers(0, 256, len(memory), np.uint8)
        self.wakeup, self.peers = Wakeup(), Peers()
        self.peers.open(load.spec, pools, b"bench", partial(choice.open, self.wakeup.set))
        self.wire: Wire = choice.wire()(self.memories)

    @property
    def regions(self) -> Regions:
        return Regions.of([(each.ctypes.data, each.nbytes) for each in self.memories])

    def join(self, pipe: Connection, peer: PeerId) -> Regions:
        """The other side's."""
        mine = _Introduction(self.peers.introduce(peer), self.wire.describe(), self.regions)
        theirs: _Introduction = _asked(pipe, mine)
        self.peers.meet(peer, theirs.peers)
        self.wire.connect(theirs.wire)
        self.wire.notify(b"here")
        while not self.wire.notifications():  # UCX may abort a process whose peer leaves meanwhile
            time.sleep(_PAUSE_S)
        return theirs.regions

    def events(self, pause_s: float = _STEP_S) -> Sequence[PeerEvent]:
        """What has happened, after a pause that ends with the first of it."""
        self.wakeup.wait(pause_s)
        found = self.peers.poll()
        for event in found:
            if isinstance(event, Lost):
                raise TransportError(event.reason)
        return found

    def sum(self, ranges: Sequence[Ranges]) -> int:
        """Over all bytes in order. Addresses are this process's."""
        found = 0
        for each in ranges:
            for address, size in zip(each.sources.tolist(), each.sizes.tolist(), strict=True):
                memory = next(
                    one for one in self.memories if 0 <= address - one.ctypes.data < one.nbytes
                )
                at = address - memory.ctypes.data
                found = zlib.crc32(memory[at : at + size].data, found)
        return found

    def close(self) -> None:
        self.peers.close()
        while not self.wire.sever():
            time.sleep(_PAUSE_S)


def receive(name: str, load: HandOffLoad, pipe: Connection) -> None:
    """The side that is written to, until the other one ends; on a thread or in a process."""
    with suppress(EOFError, BrokenPipeError):  # it has ended early, and says why
        side = _Side(TRANSPORTS[name], load, seed=1)
        try:
            side.join(pipe, _PREFILL)
            pipe.send(None)
            while (command := pipe.recv()) is not None:
                _obey(side, command, pipe)
        finally:
            side.close()


def _obey(side: _Side, command: _Command, pipe: Connection) -> None:
    match command:
        case _ByLibrary():
            pipe.send(None)
            while not pipe.poll():
                side.wire.notifications()
                time.sleep(_PAUSE_S)
        case _HandedOver(requests):
            pipe.send(None)
            while requests:
                requests -= sum(isinstance(event, MessageReceived) for event in side.events())
            pipe.send(time.perf_counter())  # one clock for all processes of a machine
        case _Sums(ranges):
            pipe.send(side.sum(ranges))
        case None:
            pass
        case _:
            assert_never(command)


def _answer(pipe: Connection) -> Any:  # noqa: ANN401 - of each command another
    """TransportError where the other side has ended, or does not answer."""
    try:
        if pipe.poll(_HANGS_S):
            return pipe.recv()
    except (EOFError, OSError):
        raise TransportError("the side that is written to has ended") from None
    raise TransportError("the side that is written to does not answer")


def _asked(pipe: Connection, command: object) -> Any:  # noqa: ANN401 - of each command another
    """The answer; TransportError as ``_answer``."""
    with suppress(BrokenPipeError):  # there is no answer then
        pipe.send(command)
    return _answer(pipe)


class HandOffs:
    """The side that writes."""

    def __init__(self, side: _Side, load: HandOffLoad, pipe: Connection, there: Regions) -> None:
        self._side, self.load, self._pipe = side, load, pipe
        self._pairing = side.peers.pairing(_DECODE)
        self._pages = list(zip(load.pages(1), load.pages(2), strict=True))
        self._ranges = [
            joined(located(self._pairing.writes(*pages), side.regions, there))
            for pages in self._pages
        ]
        self._laps = 0

    @classmethod
    @contextmanager
    def opened(cls, name: str, load: HandOffLoad) -> "Generator[HandOffs]":
        """ConfigError where the transport is not installed, TransportError where it cannot be had
        here."""
        choice = TRANSPORTS[name]
        choice.wire()
        with choice.beside(partial(receive, name, load)) as pipe:
            side = _Side(choice, load, seed=0)
            try:
                there = side.join(pipe, _DECODE)
                _answer(pipe)
                yield cls(side, load, pipe, there)
                pipe.send(None)
            finally:
                side.close()

    def hand_over(self, requests: int) -> float:
        """Seconds until decode has the proof of each of the first ``requests``. TransportError
        where a side is lost."""
        self._command(_HandedOver(requests))
        begun_s = time.perf_counter()
        self._laps += 1
        sent = done = 0
        while done < requests:
            pause_s = _STEP_S
            if sent < min(requests, done + self.load.under_way):
                self._send(sent)
                sent, pause_s = sent + 1, _BETWEEN_S
            done += sum(isinstance(event, Done) for event in self._side.events(pause_s))
        return _answer(self._pipe) - begun_s

    def _send(self, at: int) -> None:
        proof = Arrival(Attempt(f"r{at}", self._laps), FirstToken(1), TierTokens(0, 0, 0))
        self._side.peers.send(_DECODE, proof, self._pairing.writes(*self._pages[at]))

    def by_library(self, requests: int) -> float:
        """Seconds until every byte of them is there. TransportError where the library fails."""
        self._command(_ByLibrary())
        begun_s, never = time.perf_counter(), Event()
        for ranges in self._ranges[:requests]:
            self._side.wire.write(ranges, None, never)
        return time.perf_counter() - begun_s

    def _command(self, command: _Command) -> None:
        _asked(self._pipe, command)

    def sums(self, requests: int) -> tuple[int, int]:
        """Of all bytes of the first ``requests``: as they are here, and there."""
        here = self._ranges[:requests]
        there = _Sums([Ranges(each.targets, each.sources, each.sizes) for each in here])
        return self._side.sum(here), _asked(self._pipe, there)

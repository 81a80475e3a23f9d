"""How many bytes a transport's library moves by itself, within one process.

Owns the measurement that a hand-off is compared with: the same ranges between the same memories,
each request's one call of the library, with nothing of ours but its adapter (``Wire``): no thread
of a link, no slices, beats, messages, pauses or pages.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from stratakv.disagg.loopback import LoopbackTransport, LoopbackWire
from stratakv.disagg.mooncake import MooncakeTransport, MooncakeTransportOptions, mooncake_wire
from stratakv.disagg.nixl import NixlOptions, NixlTransport, nixl_wire
from stratakv.disagg.transport import Memory, Transport
from stratakv.disagg.wire import OpenWire, Ranges, Wire

OpenTransport: TypeAlias = Callable[[Sequence[Memory]], Transport]
_PAUSE_S: Final = 0.0002
"""Between two looks of the end that is written to: over TCP, NIXL takes bytes while it is looked
at. Its own thread for that was slower in every case, and so were looks without a pause."""


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """``wire``: the library under ``open``, ConfigError where it is missing."""

    open: OpenTransport
    wire: Callable[[], OpenWire]


def _loopback() -> OpenWire:
    return LoopbackWire


def _nixl(names: str) -> TransportChoice:
    options = NixlOptions(transports=names)
    return TransportChoice(
        lambda memories: NixlTransport(memories, options), lambda: nixl_wire(options)
    )


TRANSPORTS: Final[dict[str, TransportChoice]] = {
    "loopback": TransportChoice(LoopbackTransport, _loopback),
    "nixl, TCP": _nixl("tcp"),
    "nixl, shared memory": _nixl("sm,tcp,self"),
    "mooncake, TCP": TransportChoice(
        MooncakeTransport, lambda: mooncake_wire(MooncakeTransportOptions())
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class WriteCase:
    """``batches``: of addresses in ``here`` and ``there``, in order."""

    here: Sequence[Memory]
    there: Sequence[Memory]
    batches: Sequence[Ranges]

    @property
    def size_bytes(self) -> int:
        return sum(int(batch.sizes.sum()) for batch in self.batches)


@dataclass(frozen=True, slots=True, eq=False)
class BareWires:
    """Both ends of a wire, which carries ``case`` again and again."""

    source: Wire
    target: Wire
    case: WriteCase
    writer: ThreadPoolExecutor

    @staticmethod
    @contextmanager
    def opened(open_wire: OpenWire, case: WriteCase) -> "Generator[BareWires]":
        source, target = open_wire(case.here), open_wire(case.there)
        try:
            described = source.describe(), target.describe()
            source.connect(described[1])
            target.connect(described[0])
            _meet(source, target)
            with ThreadPoolExecutor(1) as writer:
                yield BareWires(source, target, case, writer)
        finally:
            for wire in (source, target):
                wire.sever()
            for wire in (source, target):
                while not wire.sever():
                    time.sleep(_PAUSE_S)

    def round(self) -> None:
        """Every byte once. TransportError where the library fails."""
        written = self.writer.submit(self._write)
        while not written.done():
            self.target.notifications()
            time.sleep(_PAUSE_S)
        written.result()

    def _write(self) -> None:
        never = threading.Event()
        for batch in self.case.batches:
            self.source.write(batch, None, never)


def _meet(one: Wire, two: Wire) -> None:
    """Of a peer that leaves while the two connect, UCX may abort the process."""
    for wire in (one, two):
        wire.notify(b"here")
    met = [False, False]
    while not all(met):
        for at, wire in enumerate((one, two)):
            met[at] |= bool(wire.notifications())
        time.sleep(_PAUSE_S)

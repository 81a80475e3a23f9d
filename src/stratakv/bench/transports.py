"""The transports that are measured: what opens each, the library under it, and where its other side
runs. Owns no measurement.
"""

import multiprocessing
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Final, TypeAlias

from stratakv.core.wakeup import Wake
from stratakv.disagg.loopback import LoopbackTransport, LoopbackWire
from stratakv.disagg.mooncake import MooncakeTransport, MooncakeTransportOptions, mooncake_wire
from stratakv.disagg.nixl import NixlOptions, NixlTransport, nixl_wire
from stratakv.disagg.transport import Memory, Transport
from stratakv.disagg.wire import OpenWire

OtherSide: TypeAlias = Callable[[Connection], None]
_ENDS_S: Final = 30.0


@contextmanager
def on_a_thread(act: OtherSide) -> Generator[Connection]:
    """``act`` with one end of a pipe; the other end is given. It has ended afterwards."""
    mine, theirs = Pipe()
    thread = threading.Thread(target=_acted, args=(act, theirs), daemon=True)
    thread.start()
    try:
        with mine:
            yield mine
    finally:
        thread.join(_ENDS_S)


def _acted(act: OtherSide, pipe: Connection) -> None:
    with pipe:
        act(pipe)


@contextmanager
def in_a_process(act: OtherSide) -> Generator[Connection]:
    """The same in a process of its own; ``act`` can be pickled."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=act, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        with mine:
            yield mine
    finally:
        process.join(_ENDS_S)
        process.kill()
        process.join()


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """``open``: notifies of its events. ``wire``: the library under it, ConfigError where it is
    missing. ``beside``: where the side runs that is written to."""

    open: Callable[[Wake, Sequence[Memory]], Transport]
    wire: Callable[[], OpenWire]
    beside: Callable[[OtherSide], AbstractContextManager[Connection]] = in_a_process


def _open_loopback(wake: Wake, memories: Sequence[Memory]) -> Transport:
    return LoopbackTransport(memories, wake=wake)


def _loopback_wire() -> OpenWire:
    return LoopbackWire


def _open_nixl(options: NixlOptions, wake: Wake, memories: Sequence[Memory]) -> Transport:
    return NixlTransport(memories, options, wake=wake)


def _nixl(names: str) -> TransportChoice:
    options = NixlOptions(transports=names)
    return TransportChoice(partial(_open_nixl, options), partial(nixl_wire, options))


def _open_mooncake(wake: Wake, memories: Sequence[Memory]) -> Transport:
    return MooncakeTransport(memories, wake=wake)


TRANSPORTS: Final[dict[str, TransportChoice]] = {
    "loopback": TransportChoice(_open_loopback, _loopback_wire, on_a_thread),
    "nixl, TCP": _nixl("tcp"),
    "nixl, shared memory": _nixl("sm,tcp,self"),
    "mooncake, TCP": TransportChoice(
        _open_mooncake, partial(mooncake_wire, MooncakeTransportOptions())
    ),
}

"""Two ends of a transport, here and in another process, as a suite drives them. Owns no test.

A side is a transport with its memory and all events that it has polled. What it is asked to do it
does at once; ``until`` looks at all of them until something is so.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

import numpy as np

from stratakv.disagg.transport import (
    Disconnected,
    Done,
    Event,
    Failed,
    Lost,
    Memory,
    Notified,
    PeerId,
    TransferId,
    Transport,
    Writes,
)
from stratakv.testing.patience import PATIENCE_S, wait_until

OpenTransport = Callable[[Sequence[Memory]], Transport]
EventT = TypeVar("EventT", bound=Event)

GUARD: Final = 0xA5


def memory(size: int, value: int = GUARD) -> Memory:
    return np.full(size, value, np.uint8)


def writes_of(*ranges: tuple[int, int, int, int, int]) -> Writes:
    """Of (region, offset, peer's region, peer's offset, bytes)."""
    table = np.array(ranges, np.int64).reshape(-1, 5)
    return Writes(*(table[:, at].copy() for at in range(5)))


@dataclass(slots=True, eq=False)
class TransportSide:
    transport: Transport
    memories: Sequence[Memory]
    events: list[Event] = field(default_factory=list[Event])

    @staticmethod
    def of(open_transport: OpenTransport, *sizes: int) -> "TransportSide":
        memories = [memory(size) for size in sizes]
        return TransportSide(open_transport(memories), memories)

    def poll(self) -> None:
        self.events += self.transport.poll()

    def events_of(self, kind: type[EventT]) -> list[EventT]:
        return [event for event in self.events if isinstance(event, kind)]

    def notes(self, peer: str) -> list[bytes]:
        return [event.notification for event in self.events_of(Notified) if event.peer == peer]

    def ends(self, transfer: TransferId) -> list[Done | Failed]:
        """All events of its end, which is one."""
        return [
            e for e in (*self.events_of(Done), *self.events_of(Failed)) if e.transfer == transfer
        ]

    def is_done(self, *transfers: TransferId) -> bool:
        self.poll()
        failed = [end for t in transfers for end in self.ends(t) if isinstance(end, Failed)]
        assert not failed, f"transfers failed: {failed}"
        return all(self.ends(transfer) for transfer in transfers)

    def is_gone(self, peer: str) -> bool:
        self.poll()
        return any(event.peer == peer for event in self.events_of(Disconnected))

    def has_lost(self, peer: str) -> bool:
        self.poll()
        return any(event.peer == peer for event in self.events_of(Lost))

    def verify_ends(self, transfers: Sequence[TransferId], peer: str) -> None:
        """After the end of the link: each transfer has ended once, and before the fence."""
        fence = self.events.index(Disconnected(PeerId(peer)))
        for transfer in transfers:
            ends = self.ends(transfer)
            assert len(ends) == 1, f"transfer {transfer} ended as {ends}"
            assert self.events.index(ends[0]) < fence, f"{ends[0]} came after the fence"


def meet(
    one: "TransportSide | Child", one_name: str, two: "TransportSide | Child", two_name: str
) -> None:
    """Each describes itself to the other; ``one`` is called ``one_name`` there."""
    described = one.transport.describe(PeerId(two_name))
    answer = two.transport.describe(PeerId(one_name))
    two.transport.connect(PeerId(one_name), described)
    one.transport.connect(PeerId(two_name), answer)


def until(condition: Callable[[], object], what: str, *sides: "TransportSide | Child") -> None:
    def looked() -> object:
        for side in sides:
            side.poll()
        return condition()

    wait_until(looked, what)


class Child:
    """A side in a process of its own. ``transport`` and ``poll`` work as a ``TransportSide``'s."""

    def __init__(self, open_transport: OpenTransport, *sizes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, open_transport, sizes)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.transport: Transport = _Remote(self._call)
        self.events: list[Event] = []

    def poll(self) -> None:
        self.events += self._call("poll")

    def fill(self, region: int, value: int) -> None:
        self._call("fill", region, value)

    def bytes_of(self, region: int) -> Memory:
        return np.frombuffer(self._call("bytes_of", region), np.uint8)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE_S)

    def freeze(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def end(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE_S)
        self._pipe.close()

    def _call(self, verb: str, *arguments: object) -> Any:  # noqa: ANN401 - as its verb says
        self._pipe.send((verb, arguments))
        assert self._pipe.poll(PATIENCE_S), f"no answer to {verb}"
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class _Remote:
    """The transport of a child."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def describe(self, peer: PeerId) -> bytes:
        return self._call("describe", peer)

    def connect(self, peer: PeerId, description: bytes) -> None:
        self._call("connect", peer, description)

    def post(self, peer: PeerId, writes: Writes, notification: bytes | None = None) -> TransferId:
        return self._call("post", peer, writes, notification)

    def poll(self) -> Sequence[Event]:
        return self._call("poll")

    def disconnect(self, peer: PeerId) -> None:
        self._call("disconnect", peer)

    def close(self) -> None:
        self._call("close")


def _serve(pipe: Connection, open_transport: OpenTransport, sizes: Sequence[int]) -> None:
    side = TransportSide.of(open_transport, *sizes)

    def fill(region: int, value: int) -> None:
        side.memories[region][:] = value

    def bytes_of(region: int) -> bytes:
        return side.memories[region].tobytes()

    verbs: dict[str, Callable[..., Any]] = {"fill": fill, "bytes_of": bytes_of}
    while True:
        try:
            verb, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        do = verbs[verb] if verb in verbs else getattr(side.transport, verb)
        try:
            pipe.send(do(*arguments))
        except Exception as error:  # noqa: BLE001 - raised in the test
            pipe.send(error)

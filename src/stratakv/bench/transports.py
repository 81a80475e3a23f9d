"""How many bytes a transport moves by itself, within one process.

Owns the measurement that a hand-off is compared with: the same bytes in pages, nothing else done.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from stratakv.core.errors import TransportError
from stratakv.disagg.transport import Done, Failed, Lost, Memory, PeerId, Transport, Writes

OpenTransport: TypeAlias = Callable[[Sequence[Memory]], Transport]
_SOURCE, _TARGET = PeerId("source"), PeerId("target")
_PAUSE_S = 0.0002


@dataclass(frozen=True, slots=True)
class TransportCase:
    """``pages`` of ``page_bytes`` go to shuffled places, in posts of ``pages_at_once``."""

    pages: int
    page_bytes: int
    pages_at_once: int

    @property
    def size_bytes(self) -> int:
        return self.pages * self.page_bytes


@dataclass(frozen=True, slots=True, eq=False)
class RawTransport:
    """A source whose target takes ``case`` again and again."""

    transport: Transport
    case: TransportCase

    @staticmethod
    @contextmanager
    def opened(open_transport: OpenTransport, case: TransportCase) -> "Generator[RawTransport]":
        """Both ends are in this process."""
        transport = open_transport([np.ones(case.size_bytes, np.uint8)])
        try:
            described = transport.describe(_TARGET)
            with _target(open_transport, case, described) as answer:
                transport.connect(_TARGET, answer)
                yield RawTransport(transport, case)
        finally:
            transport.close()

    def round(self) -> None:
        """Every page once. TransportError where the peer is lost."""
        case = self.case
        places = np.random.default_rng(case.pages).permutation(case.pages) * case.page_bytes
        starts = np.arange(case.pages, dtype=np.int64) * case.page_bytes
        left = set[int]()
        for at in range(0, case.pages, case.pages_at_once):
            part = slice(at, at + case.pages_at_once)
            zeros = np.zeros(len(starts[part]), np.int64)
            sizes = np.full(len(zeros), case.page_bytes, np.int64)
            writes = Writes(zeros, starts[part], zeros, places[part], sizes)
            left.add(self.transport.post(_TARGET, writes))
        while left:
            for event in self.transport.poll():
                if isinstance(event, Failed | Lost):
                    raise TransportError(event.reason)
                if isinstance(event, Done):
                    left.discard(event.transfer)
            time.sleep(_PAUSE_S)


@contextmanager
def _target(
    open_transport: OpenTransport, case: TransportCase, described: bytes
) -> Generator[bytes]:
    """The target is in this process, with a thread of its transport's own."""
    transport = open_transport([np.zeros(case.size_bytes, np.uint8)])
    try:
        answer = transport.describe(_SOURCE)
        transport.connect(_SOURCE, described)
        yield answer
    finally:
        transport.close()

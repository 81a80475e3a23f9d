"""What both halves of the suite for transports stand on, and what it asks of one. Owns no test.
Needs the ``testing`` extra.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
import pytest

from stratakv.disagg.transport import PeerId, TransferId
from stratakv.testing.transport_sides import Child, OpenTransport, TransportSide, meet, writes_of

REGION_BYTES: Final = (40_000, 1 << 20)
MANY_BYTES: Final = 8 << 20
"""Of one post of those that are under way for a while."""
MANY: Final = 24
NOTHING: Final = writes_of()
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSubject:
    """What the suite must know of a transport.

    ``open``: over these regions; a side calls it once. ``elsewhere``: whether the other side may be
    in another process of this machine; ``open`` is pickled for it then. ``impatient``: opens one
    that soon gives up a peer which hangs; None where no process can. ``copies``: what a peer writes
    its own process copies, so that the fence of one that hangs waits until it goes on or ends.
    """

    open: OpenTransport
    elsewhere: bool
    impatient: OpenTransport | None = None
    copies: bool = False


Sides = Callable[..., TransportSide]


def scramble(side: TransportSide, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for each in side.memories:
        each[:] = rng.integers(0, 256, len(each), np.uint8)


def post_many(side: TransportSide | Child, peer: PeerId) -> list[TransferId]:
    """More than is written at once, all of it to the same place."""
    whole = writes_of((0, 0, 0, 0, MANY_BYTES))
    return [side.transport.post(peer, whole, b"%d" % at) for at in range(MANY)]


class TransportSuite:
    """What the tests stand on. For a suite with some of the tests, name them:
    ``test_close = TransportConformance.test_close_is_a_fence_for_all_and_twice_is_once``."""

    @pytest.fixture
    def sides(self, subject: TransportSubject) -> Generator[Sides, None, None]:
        with ExitStack() as closing:

            def of(*sizes: int) -> TransportSide:
                side = TransportSide.of(subject.open, *sizes)
                closing.callback(side.transport.close)
                return side

            yield of

    @pytest.fixture
    def pair(self, sides: Sides) -> tuple[TransportSide, TransportSide]:
        one, two = sides(*REGION_BYTES), sides(*REGION_BYTES)
        meet(one, A, two, B)
        return one, two

    @pytest.fixture
    def child(self, subject: TransportSubject) -> Generator[Callable[..., Child], None, None]:
        if not subject.elsewhere:
            pytest.skip("both sides are in one process")
        with ExitStack() as ending:

            def of(*sizes: int) -> Child:
                found = Child(subject.open, *sizes)
                ending.callback(found.end)
                return found

            yield of

"""Whom not to ask for a while: who could not be joined, so that the next requests get the same
reason at once, and who has said that it is to be asked again.

Owns the reasons, and how long each holds: asking costs an agent of the transport, which
registers all memory. Pure but for its clock.
"""

from typing import Final, TypeVar

from stratakv.core.clock import Clock
from stratakv.disagg.transport import PeerId

REST_S: Final = 3.0
"""Shorter than a server takes to start, so that one that comes back does not find it."""
AGAIN_S: Final = 0.25
"""Between two calls to a peer that cannot take this side yet."""
NOT_YET: Final = "its last link is being torn down, or it has no free place"
"""What such a peer says."""
MOST: Final = 1024
"""Peers that are kept in mind: names are clients'. The oldest goes first."""
T = TypeVar("T")


class Rests:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refused: dict[PeerId, tuple[float, str]] = {}  # until when, and why
        self._paused: dict[PeerId, float] = {}  # until when

    def reason(self, peer: PeerId) -> str | None:
        """Why nobody could join it; None: it may be asked."""
        until_s, reason = self._refused.get(peer, (0.0, ""))
        return reason if self._clock.now_s() < until_s else None

    def add(self, peer: PeerId, reason: str) -> None:
        """Nobody can join it."""
        self._paused.pop(peer, None)
        _keep(self._refused, peer, (self._clock.now_s() + REST_S, reason))

    def pauses(self, peer: PeerId) -> bool:
        """Whether it is to be left alone, though nobody is refused for it."""
        return self._clock.now_s() < self._paused.get(peer, 0.0)

    def pause(self, peer: PeerId) -> None:
        """It is to be asked again."""
        _keep(self._paused, peer, self._clock.now_s() + AGAIN_S)

    def waits_for(self, peer: PeerId) -> str:
        """What it said when it was asked last; "" where that was not to ask again."""
        return NOT_YET if peer in self._paused else ""

    def joined(self, peer: PeerId) -> None:
        self._paused.pop(peer, None)


def _keep(kept: dict[PeerId, T], peer: PeerId, what: T) -> None:
    kept.pop(peer, None)
    if len(kept) == MOST:
        del kept[next(iter(kept))]
    kept[peer] = what

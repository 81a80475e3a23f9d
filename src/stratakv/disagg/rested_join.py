"""Whom nobody could join is not asked again at once: the next requests get the same reason.

Owns the reasons, and how long each holds: asking costs an agent of the transport, which
registers all memory. Pure but for the ``Join`` that it is around.
"""

from collections.abc import Sequence
from typing import Final

from stratakv.core.clock import Clock
from stratakv.disagg.joining import Join
from stratakv.disagg.transport import PeerId

REST_S: Final = 3.0
"""Shorter than a server takes to start, so that one that comes back does not find it."""
MOST: Final = 1024
"""Peers whose reasons are kept: names are clients'. The oldest goes first."""


class RestedJoin:
    """Around ``join``."""

    def __init__(self, join: Join, clock: Clock) -> None:
        self._join, self._clock = join, clock
        self._rests: dict[PeerId, tuple[float, str]] = {}  # until when and why; in order of the end
        self._asked: dict[PeerId, str] = {}

    def ask(self, peer: PeerId) -> None:
        until_s, reason = self._rests.get(peer, (0.0, ""))
        if self._clock.now_s() < until_s:
            self._asked[peer] = reason
        else:
            self._join.ask(peer)

    def part(self, peer: PeerId) -> None:
        self._join.part(peer)

    def refused(self) -> Sequence[tuple[PeerId, str]]:
        found, self._asked = list(self._asked.items()), {}
        for peer, reason in self._join.refused():
            self._rests.pop(peer, None)
            if len(self._rests) == MOST:
                del self._rests[next(iter(self._rests))]
            self._rests[peer] = self._clock.now_s() + REST_S, reason
            found.append((peer, reason))
        return found

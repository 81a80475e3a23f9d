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


class Rests:
    """Why nobody could join a peer, for as long as that holds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rests: dict[PeerId, tuple[float, str]] = {}  # until when and why; in order of the end

    def reason(self, peer: PeerId) -> str | None:
        """None: it may be asked."""
        until_s, reason = self._rests.get(peer, (0.0, ""))
        return reason if self._clock.now_s() < until_s else None

    def add(self, peer: PeerId, reason: str) -> None:
        self._rests.pop(peer, None)
        if len(self._rests) == MOST:
            del self._rests[next(iter(self._rests))]
        self._rests[peer] = self._clock.now_s() + REST_S, reason


class RestedJoin:
    """Around ``join``, of a side of one rank."""

    def __init__(self, join: Join, clock: Clock) -> None:
        self._join, self._rests = join, Rests(clock)
        self._asked: dict[PeerId, str] = {}

    def ask(self, peer: PeerId) -> None:
        reason = self._rests.reason(peer)
        if reason is not None:
            self._asked[peer] = reason
        else:
            self._join.ask(peer)

    def part(self, peer: PeerId) -> None:
        self._join.part(peer)

    def refused(self) -> Sequence[tuple[PeerId, str]]:
        found, self._asked = list(self._asked.items()), {}
        for peer, reason in self._join.refused():
            self._rests.add(peer, reason)
            found.append((peer, reason))
        return found

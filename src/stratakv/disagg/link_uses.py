"""Which links have sessions, and which of the others are to end: a link costs an agent of the
transport, with files and memory of its own, and whom a side joins its clients name.

Owns the count of sessions of each link, since when it has none, and the choice of the next one to
go: the oldest. A session counts as long as a page of it may be written. Pure but for its clock;
must not end links, nor know which side may (the one that decodes: it alone begins sessions).
"""

from collections import Counter
from typing import Final

from stratakv.core.clock import Clock
from stratakv.disagg.link import DEFAULT_LINK
from stratakv.disagg.transport import PeerId

IDLE_S: Final = 300.0
"""A link ends when it had no session for so long."""
SETTLED_S: Final = DEFAULT_LINK.lost_after_s
"""None ends earlier, whoever needs its place: what the peer writes behind a session's last word has
been reported as done to it by then, or its link is lost there."""
MAKES_ROOM_S: Final = 2 * SETTLED_S
"""One that was chosen and has not ended for so long makes no room: another one is chosen, and the
first again after the last: the other side may have had a session when it was asked to leave."""


class LinkUses:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions = Counter[PeerId]()
        self._joined: set[PeerId] = set()
        self._idle: dict[PeerId, float] = {}  # since when; the oldest first
        self._chosen: dict[PeerId, float] = {}  # to make room, since when; the last one last

    # -- links -----------------------------------------------------------------------------------

    def joined(self, peer: PeerId) -> None:
        """Messages can be sent to it."""
        self._joined.add(peer)
        if not self._sessions[peer]:
            self._idle[peer] = self._clock.now_s()

    def ends(self, peer: PeerId) -> None:
        """It is being torn down, and takes up its place until it is."""
        self._joined.discard(peer)
        self._idle.pop(peer, None)

    def ended(self, peer: PeerId) -> None:
        self._chosen.pop(peer, None)

    # -- sessions --------------------------------------------------------------------------------

    def use(self, peer: PeerId) -> None:
        """One more session, whether its peer is joined or not."""
        self._sessions[peer] += 1
        self._idle.pop(peer, None)
        if peer in self._joined:
            self._chosen.pop(peer, None)

    def leave(self, peer: PeerId) -> None:
        """One has ended, and nobody writes pages of it."""
        self._sessions[peer] -= 1
        if not self._sessions[peer]:
            del self._sessions[peer]
            if peer in self._joined:
                self._idle[peer] = self._clock.now_s()

    def kept(self, peer: PeerId) -> None:
        """It was to end, and another rank has a session of it."""
        self._chosen.pop(peer, None)
        if self._idle.pop(peer, None) is not None:
            self._idle[peer] = self._clock.now_s()

    def in_use(self, peer: PeerId) -> bool:
        return self._sessions[peer] > 0

    @property
    def idle(self) -> int:
        """Links without a session."""
        return len(self._idle)

    # -- who is to go ----------------------------------------------------------------------------

    def choose(self, peer: PeerId) -> None:
        """The other side needs its place."""
        if peer in self._idle:
            self._chosen.setdefault(peer, self._clock.now_s())

    def makes_room(self) -> bool:
        """Whether a link is ending, or chosen to, for one more; one for all who ask meanwhile."""
        now_s = self._clock.now_s()
        if any(now_s - since_s < MAKES_ROOM_S for since_s in self._chosen.values()):
            return True
        oldest = next((peer for peer in self._idle if peer not in self._chosen), None)
        if oldest is None:
            oldest = next((peer for peer in self._chosen if peer in self._idle), None)
        if oldest is None:
            return False
        self._chosen.pop(oldest, None)
        self._chosen[oldest] = now_s
        return True

    def overdue(self) -> list[PeerId]:
        """Links that are to end now."""
        now_s, found = self._clock.now_s(), list[PeerId]()
        for peer, since_s in self._idle.items():
            if now_s - since_s < IDLE_S:
                break  # and the others are younger
            found.append(peer)
        chosen = (peer for peer in self._chosen if peer in self._idle and peer not in found)
        return found + [peer for peer in chosen if now_s - self._idle[peer] >= SETTLED_S]

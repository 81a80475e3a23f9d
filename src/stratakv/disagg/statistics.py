"""What a role counts of its sessions.

Owns the record and the counts; must not know pages or peers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from stratakv.disagg.page_leases import LeaseCounts
from stratakv.disagg.session import ENDED, FailureCause, Session, SessionState


class LinkState(Enum):
    """What a place for a peer is taken for."""

    JOINING = "joining"
    IN_USE = "in_use"  # a session has not ended, or its pages may still be written
    IDLE = "idle"
    ENDING = "ending"  # not behind its fence yet


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """``states``: sessions now, by the state they are in. ``succeeded``: that ended well, ever;
    ``failed``: that did not, by cause. ``leases``: pages that peers may write, None where prompts
    are computed. ``links``: peers by state."""

    states: Mapping[SessionState, int]
    succeeded: int
    failed: Mapping[FailureCause, int]
    leases: LeaseCounts | None
    links: Mapping[LinkState, int]


class SessionCounts:
    def __init__(self) -> None:
        self._succeeded = 0
        self._failed = dict.fromkeys(FailureCause, 0)

    def moved(self, before: Session, after: Session) -> None:
        """A session has gone on; an end counts once."""
        if before.ended or not after.ended:
            return
        if after.cause is None:
            self._succeeded += 1
        else:
            self._failed[after.cause] += 1

    def refused(self) -> None:
        """One that was not opened: its peer has too many, or another one has it."""
        self._failed[FailureCause.REFUSED] += 1

    def stats(
        self,
        sessions: Iterable[Session],
        leases: LeaseCounts | None,
        links: Mapping[LinkState, int],
    ) -> SessionStats:
        now = Counter(session.state for session in sessions)
        states = {state: now[state] for state in SessionState if state not in ENDED}
        return SessionStats(
            states=states,
            succeeded=self._succeeded,
            failed=dict(self._failed),
            leases=leases,
            links=links,
        )

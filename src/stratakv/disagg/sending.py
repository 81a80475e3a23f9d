"""One request's hand-off where its prompt is computed: what is kept of it between two messages.

Owns the record, and whether its two sides fit together. Must not know who is notified of its end
(``prefill_role``), nor how messages and bytes travel.
"""

from dataclasses import dataclass, field
from typing import Final

from stratakv.cache.footprint import TransferPages
from stratakv.cache.records import CachedTokens, TierTokens
from stratakv.core.errors import TransportError
from stratakv.core.ids import RequestId
from stratakv.disagg.deadlines import prompt_identity
from stratakv.disagg.messages import Attempt, Reserve
from stratakv.disagg.session import (
    Aborted,
    FailureCause,
    Session,
    SessionEvent,
    SessionState,
    TransferBegun,
)
from stratakv.disagg.transport import PeerId, TransferId
from stratakv.engine.request import Request

CLAIM_LOOKS: Final = 8
UNCLAIMED: Final = "nobody has brought its request to prefill in time, which has none of that name"


def tiers_of(cached: CachedTokens | None) -> TierTokens:
    """None: nothing was cached."""
    if cached is None:
        return TierTokens(0, 0, 0)
    return TierTokens(cached.device, cached.host, cached.storage)


@dataclass(frozen=True, slots=True)
class ClaimDue:
    """It passes at a time, and not before this side has looked so often: what came during one step
    that takes minutes is taken in the ones after it."""

    until_s: float
    looks: int

    def passed(self, now_s: float, looks: int) -> bool:
        return now_s >= self.until_s and looks >= self.looks


@dataclass(frozen=True, slots=True)
class PagesWanted:
    """Who has asked for the pages, and which. ``claim``: until when the request must have come
    here; decode holds the pages of its whole prompt meanwhile."""

    peer: PeerId
    reserve: Reserve
    claim: ClaimDue

    @property
    def attempt(self) -> Attempt:
        return self.reserve.attempt


@dataclass(slots=True, eq=False)
class Sending:
    """``request``: of this engine, once it has come, with the identity of its ``prompt`` and the
    length of that, ``tokens``. ``wanted``: once decode has asked. ``sent``: the page index up to
    which each group's pages were written, and ``writes`` those under way; ``proved``: the last one
    is among them, with the proof behind it."""

    session: Session
    request: RequestId | None = None
    prompt: str = ""
    tokens: int = 0
    wanted: PagesWanted | None = None
    sent: list[int] = field(default_factory=list[int])
    writes: set[TransferId] = field(default_factory=set[TransferId])
    proved: bool = False

    def bind(self, request: Request) -> None:
        """It is the session of ``request``, which is to be computed here."""
        self.request, self.tokens = request.id, request.prompt_tokens
        self.prompt = prompt_identity(request, request.prompt.sampling)

    def want(self, wanted: PagesWanted) -> None:
        self.wanted = wanted

    def verify(self) -> None:
        """TransportError where it is wanted for another prompt than its request's."""
        reserve = self.computed_for.reserve
        there = reserve.prompt, reserve.pages.tokens
        if self.request is not None and (self.prompt, self.tokens) != there:
            raise TransportError(f"{self.session.name} is another prompt there")

    def is_of(self, attempt: Attempt, peer: PeerId) -> bool:
        wanted = self.wanted
        return wanted is not None and (wanted.attempt, wanted.peer) == (attempt, peer)

    @property
    def computed_for(self) -> PagesWanted:
        assert self.wanted is not None, f"{self.request} was computed for nobody"
        return self.wanted

    def advance(self, source: TransferPages) -> TransferPages:
        """Where what of ``source`` was not written before is to lie; it counts as written."""
        sent = self.sent or [0] * len(source.groups)
        target = self.computed_for.reserve.pages.part(sent, source)
        self.sent = source.reached(sent)
        return target

    def move(self, event: SessionEvent, now_s: float) -> Session:
        """What the session was before ``event``."""
        before, self.session = self.session, self.session.after(event, now_s)
        return before

    def transfer(self, now_s: float) -> Session:
        """Bytes are on their way, or more of them; what the session was before."""
        if self.session.state is not SessionState.TRANSFERRING:
            return self.move(TransferBegun(), now_s)
        before, self.session = self.session, self.session.extended(now_s)
        return before

    @property
    def deadline_s(self) -> float:
        """When it is next to be looked at."""
        if self.wanted is None or self.request is not None:
            return self.session.deadline_s
        return min(self.session.deadline_s, self.wanted.claim.until_s)

    def expire(self, now_s: float, looks: int) -> Session:
        """The session by ``now_s``, failed where somebody waits for too long."""
        waits = self.wanted if self.request is None else None
        if waits is not None and waits.claim.passed(now_s, looks):
            return self.session.after(Aborted(UNCLAIMED, FailureCause.TIMEOUT), now_s)
        return self.session.expire(now_s)

    def prove(self) -> None:
        self.proved = True
